"""What `edgeinfer bench peers` sets side by side: the models, in the formats of all engines, and the engines.

To add an engine: a class in engines/, its line in worker.ENGINES, and a line in PEERS.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import edgeinfer
from edgeinfer.apps.bench.driver import token_ids
from edgeinfer.apps.bench.model_files import Artifacts, BundleKind, ModelFiles
from edgeinfer.apps.bench.prompts import builtin_prompts, tokenize_prompts
from edgeinfer.apps.bench.synthetic import SHAPES, write_header
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import digest_of
from edgeinfer.errors import BackendError, CheckpointError, UsageError

BUILTIN = "tales"
# llama.cpp's types with as many bits as our bundles and groups of the same size, by bits.
_GGUF = {4: "Q4_0", 8: "Q8_0"}
# Values that share a scale in llama.cpp's Q4_0 and Q8_0, and by default in onnxruntime-genai.
THEIR_GROUP = 32
# How far from the likeliest token, of the way to the mean of all, one may be and still count as the same. Of a trained
# model that is a tie; logits of random weights lie close together, and another model's choice is at 1 on average.
_TRAINED_TOLERANCE, _RANDOM_TOLERANCE = 0.02, 0.5
_PROMPTS, _PROMPT_TOKENS = 6, 64
# Files of a bundle that its checkpoint has, too.
_COPIED = ("tokenizer.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class PeerModel:
    """A model that all engines are given.

    Attributes:
        name: in tables.
        files: in the formats of the engines.
        bits: of the weights where an engine quantizes.
        group: values that share a scale in our bundle, by our own default.
        longest: tokens that it holds.
        tolerance: how far from the reference's likeliest token another may be, see `_TRAINED_TOLERANCE`.
        trained: whether its text means something.
        ours: its bundle, where one is there already.
    """

    name: str
    files: ModelFiles
    bits: int
    group: int
    longest: int
    tolerance: float
    trained: bool
    ours: Path | None = None

    def bundle(self, group: int | None = None) -> Path:
        """As edgeinfer takes it, in groups of the default size or of another."""
        if self.ours is not None and group is None:
            return self.ours
        return self.files.bundle(BundleKind(bits=self.bits, group_size=group or self.group))

    def prompts(self) -> list[list[int]]:
        """Token ids of a few short texts."""
        if not self.trained:
            return [token_ids(_PROMPT_TOKENS + 8 * index)[8 * index :] for index in range(_PROMPTS)]
        with edgeinfer.load(self.bundle(), speculation="off", remember=False) as model:
            tokenized = tokenize_prompts(model, builtin_prompts(2), _PROMPT_TOKENS)
        return [list(each.ids)[-2 * _PROMPT_TOKENS :] for each in tokenized[:_PROMPTS]]


def text_of(prompts: Sequence[Sequence[int]], tokens: int) -> list[int]:
    """So many tokens: the prompts one after the other, again and again."""
    return list(islice(cycle([token for prompt in prompts for token in prompt]), tokens))


class _BundleFiles(ModelFiles):
    """Files made of the weights of a bundle."""

    def __init__(self, folder: Path, name: str, bundle: Path) -> None:
        super().__init__(folder, name)
        self._bundle = bundle

    def checkpoint(self) -> Path:
        """The bundle's weights, multiplied out."""
        return self._make("checkpoint", lambda path: write_bundle_checkpoint(open_bundle(self._bundle), path))


class _CheckpointFiles(ModelFiles):
    """Files made of a user's checkpoint."""

    def __init__(self, folder: Path, name: str, source: Path) -> None:
        super().__init__(folder, name)
        self._source = source

    def checkpoint(self) -> Path:
        """The checkpoint itself."""
        return self._source


def builtin_model(folder: Path, bundle: Path) -> PeerModel:
    """The built-in model; others are given its weights multiplied out and rounded to 8 bits of their own."""
    manifest = open_bundle(bundle).manifest
    weights = manifest.files["weights.bin"].sha256[:8]
    files = _BundleFiles(folder / f"{BUILTIN}-{weights}", BUILTIN, bundle)
    return PeerModel(BUILTIN, files, 8, THEIR_GROUP, manifest.geometry.max_positions, _TRAINED_TOLERANCE, True, bundle)


def shape_model(folder: Path, name: str) -> PeerModel:
    """Random weights of a shape."""
    if name not in SHAPES:
        raise UsageError(f"Unknown model {name!r}.", f"Known models: {', '.join((BUILTIN, *SHAPES))}.")
    shape = SHAPES[name]
    group = _default_group(shape.parameters)
    return PeerModel(name, Artifacts(folder, shape), 4, group, shape.max_position, _RANDOM_TOLERANCE, False)


def checkpoint_model(folder: Path, source: Path) -> PeerModel:
    """A trained checkpoint."""
    if not (source / "config.json").is_file() or not (source / "model.safetensors").is_file():
        hint = "Give a folder with config.json and model.safetensors."
        raise CheckpointError(f"{source} is no checkpoint in one file.", hint)
    config = json.loads((source / "config.json").read_text("utf-8"))
    digest = digest_of(source / "model.safetensors")
    name = source.resolve().name
    files = _CheckpointFiles(folder / f"{name}-{digest[:8]}", name, source)
    longest = config.get("max_position_embeddings", 0)
    from edgeinfer.export.source.checkpoint import Checkpoint  # needs the export extra

    with Checkpoint(source) as tensors:
        group = _default_group(sum(map(math.prod, tensors.shapes.values())))
    return PeerModel(name, files, 8, group, longest, _TRAINED_TOLERANCE, True)


def _default_group(parameters: int) -> int:
    from edgeinfer.quant.policy import default_group_size

    return default_group_size(parameters)


def write_bundle_checkpoint(bundle: Bundle, target: Path) -> None:
    """Writes a checkpoint in float32 whose weights are the bundle's, multiplied out."""
    from edgeinfer.export.source.checkpoint import (  # needs the export extra
        checkpoint_config,
        checkpoint_tensors,
    )

    config = checkpoint_config(bundle)
    target.mkdir(parents=True, exist_ok=True)
    for name in _COPIED:
        if bundle.has(name):
            shutil.copyfile(bundle.path / name, target / name)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **bundle.read_object("special_tokens.json")}
    for name, data in (("config.json", config), ("tokenizer_config.json", tokenizer)):
        (target / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tensors = dict(checkpoint_tensors(bundle))
    with (target / "model.safetensors").open("wb") as file:
        write_header(file, {name: values.shape for name, values in tensors.items()}, "float32")
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, "<f4").data)


Make = Callable[[PeerModel, str | None], Path]


@dataclass(frozen=True)
class PeerEngine:
    """An engine.

    Attributes:
        label: its name in tables.
        kind: of worker.ENGINES.
        module: what has to be installed.
        make: its model, by an interpreter that has the engine; BackendError where that fails.
        weights: what that model holds, in the engine's own words.
        options: of the worker, beside path, threads and context.
        budget: the option that says how much memory there is; empty where it cannot be told.
        passes: of worker.ENGINES, what runs single passes of the model where the engine itself offers none.
        note: what readers of its figures should know.
    """

    label: str
    kind: str
    module: str
    make: Make
    weights: Callable[[PeerModel], str]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    budget: str = ""
    passes: str = ""
    note: str = ""


def missing(peer: PeerEngine, python: str | None, name: str) -> str:
    """Why an engine cannot be measured here; empty where it can, or where another interpreter is to have it."""
    if python is not None or find_spec(peer.module) is not None:
        return ""
    return f"{peer.module} is not installed here; name an interpreter that has it: --python {name}=PATH"


def _bundle(model: PeerModel, python: str | None) -> Path:
    return model.bundle()


def _their_groups(model: PeerModel, python: str | None) -> Path:
    if model.group == THEIR_GROUP:
        raise BackendError(f"the weights of {model.name} are in groups of {THEIR_GROUP} anyway.", "Leave it out.")
    return model.bundle(THEIR_GROUP)


def _gguf(model: PeerModel, python: str | None) -> Path:
    return model.files.exported_gguf(_GGUF[model.bits])


def _genai(model: PeerModel, python: str | None) -> Path:
    return model.files.genai(python, model.bits)


def _openvino(model: PeerModel, python: str | None) -> Path:
    return model.files.openvino_genai(python, _GGUF[model.bits])


def _float32(model: PeerModel, python: str | None) -> Path:
    return model.files.checkpoint()


def _bfloat16(model: PeerModel, python: str | None) -> Path:
    return model.files.bfloat16()


# Plain decoding, as that of all others; nothing may be left from one process to the next.
_OURS: Mapping[str, Any] = {"speculation": "off", "remember": False}
PEERS: Mapping[str, PeerEngine] = {
    "edgeinfer": PeerEngine(
        "edgeinfer",
        "edgeinfer",
        "edgeinfer",
        _bundle,
        lambda model: f"int{model.bits} g{model.group}",
        options=_OURS,
        budget="memory",
    ),
    "edgeinfer-g32": PeerEngine(
        f"edgeinfer, groups of {THEIR_GROUP}",
        "edgeinfer",
        "edgeinfer",
        _their_groups,
        lambda model: f"int{model.bits} g{THEIR_GROUP}",
        options=_OURS,
        budget="memory",
    ),
    "llamacpp": PeerEngine("llama.cpp", "llamacpp", "llama_cpp", _gguf, lambda model: _GGUF[model.bits]),
    "genai": PeerEngine(
        "onnxruntime-genai", "genai", "onnxruntime_genai", _genai, lambda model: f"int{model.bits} g{THEIR_GROUP}"
    ),
    "openvino": PeerEngine(
        "OpenVINO GenAI",
        "openvino-genai",
        "openvino_genai",
        _openvino,
        lambda model: _GGUF[model.bits],
        passes="openvino-passes",
        note="loads the model that it made of the GGUF file; its pipeline has no passes over several tokens, so that "
        "c(m) is that model's in OpenVINO's runtime",
    ),
    "transformers": PeerEngine("transformers", "transformers", "transformers", _float32, lambda model: "float32"),
    "transformers-bf16": PeerEngine(
        "transformers bfloat16",
        "transformers",
        "transformers",
        _bfloat16,
        lambda model: "bfloat16",
        options={"dtype": "bfloat16"},
    ),
}
# Whose word the others' replies are measured by.
REFERENCE = PEERS["transformers"]
