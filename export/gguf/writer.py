"""A checkpoint as a GGUF file in a float type or Q8_0, tensor by tensor.

Memory is that of a few rows of the largest tensor: what was written is not kept.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import CheckpointError, StorageError, UnsupportedArchitectureError, UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.architectures.base import Architecture
from edgeinfer.export.architectures.described import describe, read_spec, require_plain
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.architectures.tensors import TensorPlan
from edgeinfer.export.gguf.architectures import FILE_TYPES, ONNX_HINT, GgufArchitecture, add_decoder
from edgeinfer.export.gguf.dense import DENSE, SHARED_MIXTURES
from edgeinfer.export.gguf.gemma import GEMMAS
from edgeinfer.export.gguf.hybrid import HYBRID
from edgeinfer.export.gguf.latent import LATENT
from edgeinfer.export.gguf.mamba import MAMBA
from edgeinfer.export.gguf.tensors import MXFP4_SCHEME, PlannedGgufTensor, gguf_tensors, mxfp4_blocks, rope_tensors
from edgeinfer.export.gguf.vocabulary import Vocabulary, add_vocabulary, read_vocabulary
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.hf_config import HFConfig, read_config

Floats = NDArray[np.float32]

# Values that are converted at a time.
_RUN_VALUES = 1 << 20
_BLOCK = 32
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
GGUF_ARCHITECTURES = DENSE | GEMMAS | SHARED_MIXTURES | LATENT | HYBRID | MAMBA
_NO_GRAPH = "llama.cpp has no graph with"
_UNTRIED = "llama.cpp has them, and writing its files was not tried"
# Families without GGUF files, and why.
WITHOUT_GGUF = {
    "flex_olmo": f"{_NO_GRAPH} a mixture of experts whose norms stand behind attention and experts",
    "lfm3": f"{_NO_GRAPH} convolutions and attention with windows and gates",
    "mellum": _UNTRIED,
    "minicpm": f"{_NO_GRAPH} a router that chooses by a ReLU",
    "minimax_m2": _UNTRIED,
    "vaultgemma": f"{_NO_GRAPH} soft caps without norms after attention and MLP",
    "phimoe": f"{_NO_GRAPH} the weights of Phi-3.5-MoE's experts, each a softmax over those near it",
}


@dataclass(frozen=True)
class GgufSource:
    """A checkpoint that llama.cpp can express."""

    config: HFConfig
    spec: DecoderSpec  # with heads as wide as the checkpoint's
    arch: GgufArchitecture
    plans: tuple[TensorPlan, ...]  # tensors with the checkpoint's values: multipliers are metadata
    computing: tuple[TensorPlan, ...]  # tensors with values that compute, multipliers included
    tensors: tuple[PlannedGgufTensor, ...]  # of the file

    @property
    def unpacked(self) -> GgufSource:
        """This source with packed weights as floats, for a quantizer."""
        tensors = tuple(dataclasses.replace(tensor, packed=False) for tensor in self.tensors)
        return dataclasses.replace(self, tensors=tensors)

    @property
    def parameters(self) -> int:
        return sum(plan.parameters for plan in self.plans)


def open_gguf_source(checkpoint: Checkpoint) -> GgufSource:
    """Finds a checkpoint's architecture in llama.cpp, and checks that every tensor is there."""
    config = read_config(checkpoint.folder)
    refined = find_architecture(config).placed(checkpoint.names)
    family = dataclasses.replace(refined, refine=None)
    spec = read_spec(config, family, checkpoint)
    arch = find_gguf_architecture(family, config, spec)
    stored = describe(spec, config, refined if arch.refined else family, checkpoint)
    plans = arch.planned(config, spec, stored.plans)
    computing = refined.tensors(config, spec, checkpoint.names)
    return GgufSource(config, spec, arch, plans, computing, tuple(gguf_tensors(spec, plans, arch)))


def find_gguf_architecture(family: Architecture, config: HFConfig, spec: DecoderSpec) -> GgufArchitecture:
    found = GGUF_ARCHITECTURES.get(family.model_types[0])
    if found is None:
        lacking = WITHOUT_GGUF[family.model_types[0]]
        raise UnsupportedArchitectureError(f"There are no GGUF files of {family.classes[0]}: {lacking}.", ONNX_HINT)
    found = (found.instead and found.instead(spec)) or found
    require_plain(spec, "GGUF files", ONNX_HINT, found.known)
    found.check(config, spec)
    return found


def write_gguf(
    source: Path, target: Path, kind: str = "F32", *, vocabulary: bool = True, progress: Progress | None = None
) -> None:
    """Writes a Hugging Face checkpoint directory as one GGUF file.

    Norms, biases and routers are float32 in any case, rows that Q8_0's blocks do not divide are float16, and experts in
    MXFP4 are copied.

    Args:
        kind: "F32", "F16", "BF16" or "Q8_0".
        progress: called with a tensor's name, the number of finished tensors and their total.
    """
    if kind not in FILE_TYPES:
        raise UsageError(f"{kind!r} cannot be written directly.", f"Choose one of {', '.join(FILE_TYPES)}.")
    with Checkpoint(source) as checkpoint:
        described = open_gguf_source(checkpoint)
        words = read_vocabulary(source, described.config, described.spec.vocab_size) if vocabulary else None
        write_gguf_source(checkpoint, described, words, target, kind, name=source.resolve().name, progress=progress)


def write_gguf_source(
    checkpoint: Checkpoint,
    described: GgufSource,
    words: Vocabulary | None,
    target: Path,
    kind: str,
    *,
    name: str,
    progress: Progress | None = None,
) -> None:
    """Writes an opened checkpoint; see `write_gguf`. Without `words` there is no tokenizer."""
    writer = gguf_package().GGUFWriter(target, described.arch.name)
    planned = PlannedTensors(checkpoint, described.plans)
    shown = _shown_name(name, words)
    add_decoder(writer, described.config, described.spec, described.arch, shown, kind, planned.tensor)
    if words is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(writer, words)
    try:
        _write(writer, described, planned, kind, progress)
    except OSError as error:
        hint = "Check the free disk space and permissions."
        raise StorageError(f"Cannot write {target}: {error.strerror}.", hint) from error
    finally:
        writer.close()


def _shown_name(name: str, vocabulary: Vocabulary | None) -> str:
    """The model's name, by which llama.cpp decides whether special tokens absorb following spaces, as Phi-3's."""
    plain = _PHI3.sub("Phi 3", name)
    if vocabulary is None or vocabulary.model != "llama" or "</s>" not in vocabulary.tokens:
        return plain
    return f"{plain} (Phi-3)" if vocabulary.strips[1] else plain


def gguf_package() -> Any:
    try:
        return import_module("gguf")
    except ModuleNotFoundError as error:
        raise UsageError("The gguf package is not installed.", "pip install 'edgeinfer[gguf]'") from error


def written_bytes(described: GgufSource, kind: str) -> int:
    """Bytes of the tensors of a file, without metadata."""
    package = gguf_package()
    return sum(_tensor_bytes(package, tensor.shape, _type(package, tensor, kind)) for tensor in described.tensors)


def _write(writer: Any, described: GgufSource, planned: PlannedTensors, kind: str, progress: Progress | None) -> None:
    package, tensors, constants = gguf_package(), described.tensors, rope_tensors(described.spec.rope)
    float32 = package.GGMLQuantizationType.F32
    for name, values in constants.items():
        writer.add_tensor_info(name, values.shape, np.dtype(np.float32), values.nbytes, float32)
    for tensor in tensors:
        # The type is given apart, so that the shape is not taken for one of bytes.
        into = _type(package, tensor, kind)
        size = _tensor_bytes(package, tensor.shape, into)
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), size, into)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    [file] = writer.fout
    for values in constants.values():
        writer.write_padding(file, file.tell())
        values.tofile(file)
    for done, tensor in enumerate(tensors):
        if progress is not None:
            progress(tensor.name, done, len(tensors))
        writer.write_padding(file, file.tell())
        into = _type(package, tensor, kind)
        for data in _data(package, tensor, planned, into):
            data.tofile(file)
    writer.write_padding(file, file.tell())


def _type(package: Any, tensor: PlannedGgufTensor, kind: str) -> Any:
    if tensor.packed:
        return package.GGMLQuantizationType.MXFP4
    if tensor.exact:
        return package.GGMLQuantizationType.F32
    if kind == "Q8_0" and tensor.shape[-1] % _BLOCK:
        return package.GGMLQuantizationType.F16
    return package.GGMLQuantizationType[kind]


def _tensor_bytes(package: Any, shape: tuple[int, ...], into: Any) -> int:
    values, size = package.GGML_QUANT_SIZES[into]
    return math.prod(shape) // int(values) * int(size)


def _data(package: Any, tensor: PlannedGgufTensor, planned: PlannedTensors, into: Any) -> Iterator[NDArray[Any]]:
    """A tensor's data in runs of whole rows that change together."""
    for part in tensor.parts:
        source = planned.of(part.plan)
        at_once = max(1, _RUN_VALUES // math.prod(source.shape[1:]) // tensor.rows) * tensor.rows
        for start in range(part.start, part.stop, at_once):
            stop = min(start + at_once, part.stop)
            if tensor.packed:
                yield mxfp4_blocks(source.kept(MXFP4_SCHEME)(start, stop))
                continue
            rows = source(start, stop)
            rows = rows if tensor.change is None else tensor.change(rows)
            yield _converted(package, rows, into, tensor.name)


def _converted(package: Any, rows: Floats, into: Any, name: str) -> NDArray[Any]:
    if into == package.GGMLQuantizationType.F16:
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        if not np.isfinite(halves).all():
            message = f"{name} contains values too large for float16."
            raise CheckpointError(message, "Choose the type BF16 or F32.")
        return halves
    converted: NDArray[Any] = package.quantize(rows, into)
    return converted
