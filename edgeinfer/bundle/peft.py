"""Adapters (LoRA, Hu et al. 2021) in PEFT's layout: what they change of a model, read strictly and without PEFT.

A folder has adapter_config.json and adapter_model.safetensors, whose tensors are
`base_model.model.{module}.lora_A.weight` (rank, inputs) and `.lora_B.weight` (outputs, rank) of each linear module
(peft/utils/save_and_load.py). The module then gives W x + scale B A x, where the scale is alpha / rank, or
alpha / sqrt(rank) with use_rslora (peft/tuners/lora/layer.py).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import NUMPY_TYPES, ArrayFileError, StoredArray, read_index, read_into
from edgeinfer.bundle.bfloat16 import from_bits
from edgeinfer.bundle.strict_json import require
from edgeinfer.core.errors import AdapterError
from edgeinfer.core.records import dataclass

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_ROOT = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
# Prefixes of the names of a decoder's modules, in text models and in multimodal ones.
_PREFIXES = ("model.", "language_model.")
_MOST_CONFIG_BYTES = 1_000_000
_MOST_PATTERN = 256
# Fields of the configuration that change the arithmetic in unsupported ways, where they are set.
_VARIANTS = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save, whole copies of modules,",
    "trainable_token_indices": "trained embeddings of tokens",
    "target_parameters": "target_parameters, low-rank changes of experts and other parameters,",
    "layer_replication": "layer_replication",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "lora_bias": "lora_bias",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
}
# Initializations that change the base model's weights as well.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
_PLAIN_HINT = "Merge it into the model with PEFT (merge_and_unload), save that, and convert the result."


@dataclass(frozen=True)
class Module:
    """A linear module of the checkpoint, of which a matrix of a bundle holds some rows."""

    name: str  # as the checkpoint has it, such as model.layers.0.self_attn.q_proj
    rows: int  # of the matrix, after those of the modules before it
    scale: float = 1.0  # by which the export multiplied the module's weights
    # (period, first, share): of each `period` rows of the module the matrix has `share`, from `first` on; empty for
    # all. The others are in another matrix, or elsewhere in this one.
    pieces: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.name), "a module has no name")
        require(self.rows > 0 and self.scale != 0, f"module {self.name} has {self.rows} rows and scale {self.scale}")
        if self.pieces:
            period, first, share = self.pieces if len(self.pieces) == 3 else (0, 0, 0)
            fits = 0 <= first < first + share <= period and self.rows % share == 0
            require(fits, f"module {self.name} has {self.rows} rows, pieces {list(self.pieces)} of it")

    @property
    def outputs(self) -> int:
        """Rows of the whole module."""
        if not self.pieces:
            return self.rows
        period, _, share = self.pieces
        return self.rows // share * period

    @property
    def taken(self) -> NDArray[np.int64]:  # (rows,)
        """The rows of the module that the matrix has, in its order."""
        rows = np.arange(self.rows)
        if not self.pieces:
            return rows
        period, first, share = self.pieces
        return rows // share * period + first + rows % share


@dataclass(frozen=True)
class LowRank:
    module: str  # its name, as the adapter has it
    # `a`, `b`: where its factors lie, (rank, inputs) and (outputs, rank).
    a: StoredArray
    b: StoredArray
    scale: float  # of their product

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True)
class AdapterFile:
    """An adapter whose configuration and header were read and checked."""

    path: Path  # of the folder
    changes: Mapping[str, LowRank]  # of its modules, by `module_key`

    @property
    def nbytes(self) -> int:
        """Bytes of all factors as float32."""
        return sum(4 * (math.prod(c.a.shape) + math.prod(c.b.shape)) for c in self.changes.values())

    def digest(self) -> str:
        """SHA-256 of both files, which identifies rows that were made with the adapter."""
        found = hashlib.sha256()
        try:
            for name in (CONFIG, WEIGHTS):
                with (self.path / name).open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise AdapterError(f"{self.path / name} cannot be read: {error}.", "Download it again.") from error
        return found.hexdigest()

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        """The open file of the factors, for `factor`."""
        try:
            with (self.path / WEIGHTS).open("rb") as file:
                yield file
        except (OSError, ArrayFileError) as error:
            raise AdapterError(f"{self.path / WEIGHTS} cannot be read: {error}.", "Download it again.") from error

    def factor(self, file: BinaryIO, stored: StoredArray) -> NDArray[np.float32]:
        file.seek(stored.offset)
        kind = np.dtype("<u2") if stored.dtype == "BF16" else NUMPY_TYPES[stored.dtype]
        raw: NDArray[Any] = np.empty(stored.shape, kind)
        read_into(file, raw)
        values: NDArray[np.float32] = from_bits(raw) if stored.dtype == "BF16" else raw.astype(np.float32)
        if not np.isfinite(values).all():
            raise AdapterError(f"{self.path}: {stored.name} has numbers that are not finite.", "Train it again.")
        return values


def adapter_bytes(path: Path) -> int:
    """Bytes of an adapter in memory: factors as float32, a GGUF file as it is."""
    return path.stat().st_size if path.is_file() else open_adapter(path).nbytes


def module_key(name: str) -> str:
    """A module's name without the prefixes of checkpoints and of models in memory."""
    while True:
        prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if prefix is None:
            return name
        name = name.removeprefix(prefix)


def open_adapter(path: Path) -> AdapterFile:
    """Reads the configuration of an adapter and the header of its weights."""
    config = _read_config(path)
    _refuse_variants(path, config)
    weights = path / WEIGHTS
    if not weights.is_file():
        if (path / PICKLED).exists():
            message = f"{path} has pickled weights, {PICKLED}, which could run any code when they are read."
            raise AdapterError(message, f"Save it again with PEFT, which writes {WEIGHTS}.")
        raise AdapterError(f"{path} has no {WEIGHTS}.", "Name the folder that PEFT's save_pretrained wrote.")
    try:
        with weights.open("rb") as file:
            index = read_index(file, weights.stat().st_size)
    except (OSError, ArrayFileError) as error:
        raise AdapterError(f"{weights} {error}.", "Download it again, or train it again.") from error
    return AdapterFile(path, dict(_changes(path, config, index.arrays)))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    try:
        if file.stat().st_size > _MOST_CONFIG_BYTES:
            raise AdapterError(f"{file} is too large for a configuration.", "Download it again.")
        config = json.loads(file.read_bytes())
    except OSError as error:
        message = f"{path} is no adapter: it has no {CONFIG} that can be read."
        raise AdapterError(message, "Name the folder that PEFT's save_pretrained wrote.") from error
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is not valid JSON: {error}.", "Download it again.") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} is no JSON object.", "Download it again.")
    return config


def _refuse_variants(path: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{path} is of the type {kind}; adapters of the type LORA run.", _PLAIN_HINT)
    found = [what for field, what in _VARIANTS.items() if config.get(field)]
    if config.get("bias", "none") != "none":
        found.append(f"bias={config['bias']!r}")
    if found:
        raise AdapterError(f"{path} has {found[0].rstrip(',')}, which is not supported.", _PLAIN_HINT)
    initialization = str(config.get("init_lora_weights", ""))
    if initialization.startswith(_CHANGED_BASE):
        hint = "Convert it to plain LORA with PEFT (path_initial_model_for_weight_conversion)."
        raise AdapterError(f"{path} was trained from {initialization}, which changes the base model's weights.", hint)


def _changes(path: Path, config: Mapping[str, Any], arrays: tuple[StoredArray, ...]) -> Iterator[tuple[str, LowRank]]:
    factors: dict[str, dict[str, StoredArray]] = {}
    for stored in arrays:
        match = _FACTOR.fullmatch(stored.name.removeprefix(_ROOT))
        if match is None or not stored.name.startswith(_ROOT):
            message = f"{path}: {stored.name} is no factor of a linear module."
            raise AdapterError(message, "Adapters of linear modules alone run. " + _PLAIN_HINT)
        if stored.dtype not in ("F32", "F16", "BF16"):
            raise AdapterError(f"{path}: {stored.name} has the type {stored.dtype}.", "Save it as floats.")
        factors.setdefault(match["module"], {})[match["factor"]] = stored
    if not factors:
        raise AdapterError(f"{path} changes nothing.", "Train it, or leave it out.")
    for module, pair in factors.items():
        if len(pair) < 2:
            raise AdapterError(f"{path}: {module} lacks lora_{'B' if 'A' in pair else 'A'}.", "Download it again.")
        yield module_key(module), _change(path, config, module, pair["A"], pair["B"])


def _change(path: Path, config: Mapping[str, Any], module: str, a: StoredArray, b: StoredArray) -> LowRank:
    rank = _of_module(path, config, "rank_pattern", "r", module)
    alpha = _of_module(path, config, "alpha_pattern", "lora_alpha", module)
    fits = len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] == rank and min(*a.shape, *b.shape) > 0
    if not fits:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        message = f"{path}: the factors of {module} have the shapes {shapes}, which are not of rank {rank:g}."
        raise AdapterError(message, f"{CONFIG} and {WEIGHTS} must be of one adapter.")
    return LowRank(module, a, b, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _of_module(path: Path, config: Mapping[str, Any], patterns: str, usual: str, module: str) -> float:
    """A number of a module: the first pattern that its name ends in decides (peft/utils/other.py, get_pattern_key)."""
    table = config.get(patterns) or {}
    value = config.get(usual)
    if not isinstance(table, dict):
        raise AdapterError(f"{path}: {patterns} in {CONFIG} is no object.", "Download it again.")
    for pattern, of_pattern in table.items():
        try:
            found = len(pattern) <= _MOST_PATTERN and re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise AdapterError(f"{path}: {pattern!r} in {patterns} is no pattern: {error}.", "Correct it.") from error
        if found:
            value = of_pattern
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise AdapterError(f"{path}: {usual} of {module} is {value!r} in {CONFIG}.", "It must be a number above 0.")
    return value
