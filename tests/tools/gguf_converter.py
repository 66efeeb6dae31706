"""GGUF files of small random checkpoints, ours and those of llama.cpp's own converter, tensor by tensor and run.

    python -m tests.tools.gguf_converter LLAMA_CPP [NAME ...]

LLAMA_CPP is a folder with llama.cpp's sources, whose convert_hf_to_gguf.py is taken. For each checkpoint of
tests/export/gguf_cases.py a line says how many tensors and keys differ, and how far llama.cpp's logits of both files
are from transformers'. Tokenizers are left out of both, and keys that are for people.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import EdgeInferError
from edgeinfer.export.gguf.writer import write_gguf
from tests.export.gguf_cases import GGUF_CASES
from tests.export.packed import make_mxfp4
from tests.export.passes import TOKENS, expected_logits
from tests.factories import make_checkpoint
from tests.gguf_models import GgufModel

# Keys of no model, which are for people or of tokenizers.
_OTHER = ("general.", "tokenizer.", "GGUF.")
# What the loader takes where a file lacks a key.
_DEFAULTS: dict[str, Any] = {
    "rope.freq_base": 10000.0,
    "rope.scaling.type": "none",
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
    "attention.sliding_window": 0,
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_norm": False,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "expert_shared_count": 0,
}
_SHOWN = 12
_OURS, _THEIRS, _EXPECTED = "ours.gguf", "theirs.gguf", "logits.npy"
# Name of a case whose checkpoint has packed experts.
_PACKED = "GptOss in MXFP4"
_CLASSES = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}


@dataclass
class Comparison:
    """One configuration.

    Attributes:
        architecture: llama.cpp's name.
        tensors, keys: what differs, in words.
        ours, theirs: largest difference of llama.cpp's logits from transformers', or why there are none.
        count: tensors of the converter's file.
    """

    architecture: str = ""
    tensors: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    ours: str = ""
    theirs: str = ""
    count: int = 0

    @property
    def summary(self) -> str:
        """All of it in a line."""
        same = f"{self.count} equal" if not self.tensors else f"{len(self.tensors)} of {self.count} tensors differ"
        same += f", {len(self.keys)} keys differ" if self.keys else ""
        there = f"{self.architecture} {same}; " if self.architecture else ""
        return f"{there}ours {self.ours}; theirs {self.theirs}"


def convert(checkpoint: Path, target: Path) -> None:
    """Runs the converter, whose package must be found, without its tokenizer."""
    conversion = importlib.import_module("conversion")
    gguf = importlib.import_module("gguf")
    hparams = conversion.ModelBase.load_hparams(checkpoint, False)
    name = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
    hparams = _published(name, hparams)
    (checkpoint / "config.json").write_text(json.dumps(hparams), "utf-8")
    found = conversion.get_model_class(_CLASSES.get(name, name))
    changes = {"set_vocab": _without_vocabulary, "model_arch": found.model_arch, "no_mtp": True}
    own = type(found.__name__, (found,), changes)
    own(checkpoint, gguf.LlamaFileType.ALL_F32, target, eager=True, hparams=hparams).write()


def _published(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with the fields of published ones that transformers no longer writes, or calls otherwise."""
    kinds = {"linear_attention": "mamba", "full_attention": "attention"}
    if name == "GraniteMoeHybridForCausalLM":
        return config | {"layer_types": [kinds[kind] for kind in config["layer_types"]]}
    if name == "NemotronHForCausalLM":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        config = config | {"hybrid_override_pattern": "".join(letters[kind] for kind in config["layers_block_type"])}
        config["mamba_d_head"] = config["mamba_head_dim"]
        experts = "E" in config["hybrid_override_pattern"]
        return config if experts else {k: v for k, v in config.items() if k != "num_experts_per_tok"}
    if name == "Mamba2ForCausalLM":
        return {field: value for field, value in config.items() if field != "intermediate_size"}
    if name == "Cohere2ForCausalLM":
        return config | {"rotary_pct": 1.0}
    if name == "HunYuanMoEV1ForCausalLM":
        layers = config["num_hidden_layers"]
        lists = {"moe_intermediate_size": config["intermediate_size"], "moe_topk": config["moe_topk"]}
        return (
            config | {field: [value] * layers for field, value in lists.items()} | {"num_shared_expert": [1] * layers}
        )
    return config


def _without_vocabulary(self: Any) -> None:
    self.gguf_writer.add_tokenizer_model("no_vocab")
    self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])


def compare(ours: Path, theirs: Path) -> Comparison:
    """Tensors by name, shape, type and values; keys by value."""
    reader = importlib.import_module("gguf").GGUFReader
    first, second = reader(ours), reader(theirs)
    found = Comparison(str(second.fields["general.architecture"].contents()), count=len(second.tensors))
    mine, wanted = ({t.name: t for t in each.tensors} for each in (first, second))
    found.tensors += [f"{name} is missing" for name in wanted.keys() - mine.keys()]
    found.tensors += [f"{name} is not theirs" for name in mine.keys() - wanted.keys()]
    for name in mine.keys() & wanted.keys():
        found.tensors += _differences(name, mine[name], wanted[name])
    mine, wanted = (_keys(each.fields) for each in (first, second))
    for name in sorted(mine.keys() | wanted.keys()):
        if not _alike(mine.get(name), wanted.get(name)):
            found.keys.append(f"{name}: {mine.get(name)!r}, theirs {wanted.get(name)!r}")
    return found


def _differences(name: str, mine: Any, wanted: Any) -> Iterator[str]:
    first, second = (f"{_shape(each)} {each.tensor_type.name}" for each in (mine, wanted))
    if first != second:
        yield f"{name}: {first}, theirs {second}"
    elif not np.array_equal(mine.data.ravel(), wanted.data.ravel()):
        off = np.abs(mine.data.ravel() - wanted.data.ravel()).max()
        yield f"{name}: values, by {off:.1e} of {np.abs(wanted.data).max():.1e}"


def _shape(tensor: Any) -> list[int]:
    """As ggml has it, where sizes that a file does not give are 1."""
    shape = [int(size) for size in tensor.shape]
    while len(shape) > 1 and shape[-1] == 1:
        shape.pop()
    return shape


def _keys(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What the loader reads, with what it takes where nothing is said."""
    there = {name: value.contents() for name, value in fields.items()}
    arch = there["general.architecture"]
    keys = {f"{arch}.{name}": value for name, value in _DEFAULTS.items()}
    heads = there.get(f"{arch}.attention.head_count")
    if heads and not isinstance(heads, list):
        width = there.get(f"{arch}.attention.key_length", there[f"{arch}.embedding_length"] // heads)
        keys |= {f"{arch}.attention.{name}_length": width for name in ("key", "value")}
        keys[f"{arch}.rope.dimension_count"] = width
    return keys | {name: value for name, value in there.items() if not name.startswith(_OTHER)}


def _alike(mine: Any, wanted: Any) -> bool:
    if isinstance(mine, float) and isinstance(wanted, float):
        return math.isclose(mine, wanted, rel_tol=1e-6)
    return bool(mine == wanted)


def _difference(path: Path) -> str:
    """How far llama.cpp's logits are from those saved with the file."""
    try:
        with GgufModel(path, 256) as model:
            found = np.concatenate([rows.copy() for rows in model.logits(TOKENS.tolist())])
    except EdgeInferError:
        return "llama.cpp refuses"
    return f"{np.abs(found - np.load(path.with_name(_EXPECTED))).max():.1e}"


def _written(name: str, settings: Mapping[str, Any], folder: Path) -> Comparison:
    """Makes a checkpoint, both files of it, and transformers' logits."""
    packed = name == _PACKED
    model = make_mxfp4(folder / "checkpoint") if packed else make_checkpoint(folder / "checkpoint", name, **settings)
    np.save(folder / _EXPECTED, expected_logits(model, TOKENS))
    found = Comparison()
    try:
        write_gguf(folder / "checkpoint", folder / _OURS, vocabulary=False)
    except EdgeInferError as error:
        found.ours = f"refused: {error.message}"
    try:
        convert(folder / "checkpoint", folder / _THEIRS)
    except Exception as error:
        found.theirs = f"{type(error).__name__}: {error}".splitlines()[0]
    if not found.ours and not found.theirs:
        return compare(folder / _OURS, folder / _THEIRS)
    return found


def _begin(llama_cpp: Path) -> None:
    """Lets a process find the converter; its own tests must not be found before ours."""
    sys.path[:0] = [str(llama_cpp / "gguf-py"), str(llama_cpp)]
    os.environ["GGML_NO_BACKTRACE"] = "1"
    logging.disable(logging.WARNING)


class _Worker:
    """A process for what llama.cpp may end."""

    def __init__(self, llama_cpp: Path) -> None:
        self._llama_cpp, self._pool = llama_cpp, _pool(llama_cpp)

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What the work gives, or that it ended."""
        try:
            return self._pool.submit(work, *arguments).result()
        except BrokenProcessPool:
            self._pool = _pool(self._llama_cpp)
            return "llama.cpp ends the process"

    def close(self) -> None:
        """Ends the process."""
        self._pool.shutdown()


def _pool(llama_cpp: Path) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=(llama_cpp,))


def main() -> None:
    """Prints a line for each configuration, and what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("names", nargs="*", help="families by transformers' names; all where none is given")
    arguments = parser.parse_args()
    worker = _Worker(arguments.llama_cpp)
    for name, settings in (*GGUF_CASES, (_PACKED, {})):
        if arguments.names and name not in arguments.names:
            continue
        with tempfile.TemporaryDirectory() as given:
            folder = Path(given)
            found = worker.run(_written, name, settings, folder)
            found.ours = found.ours or worker.run(_difference, folder / _OURS)
            found.theirs = found.theirs or worker.run(_difference, folder / _THEIRS)
        print(f"{name}: {found.summary}", flush=True)
        for line in (*found.tensors[:_SHOWN], *found.keys):
            print(f"    {line}")
    worker.close()


if __name__ == "__main__":
    main()
