"""From a checkpoint to a bundle with a GGUF file of the requested layers and types, whole or not at all."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf.types import ggml_type
from edgeinfer.bundle.gguf_bundle import manifest_of
from edgeinfer.bundle.plan_record import PlanRecord
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import GGUF_MODEL
from edgeinfer.bundle.writing import seal, write_bundle
from edgeinfer.errors import StorageError, UsageError
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.gguf.allocation import TypePlan, check_budget, choose_types, file_kind
from edgeinfer.export.gguf.importance import Importance, gather_importance
from edgeinfer.export.gguf.keys import FILE_TYPES, context_length
from edgeinfer.export.gguf.pruning import check_layers, check_prunable, choose_layers, prune_tokens, renumbered
from edgeinfer.export.gguf.quantize import quantize_gguf
from edgeinfer.export.gguf.tensors import PlannedGgufTensor
from edgeinfer.export.gguf.tokenizer_check import check_tokenizer
from edgeinfer.export.gguf.vocabulary import Vocabulary, read_vocabulary
from edgeinfer.export.gguf.writer import GgufSource, open_gguf_source, write_gguf_source, written_bytes
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.options.file_types import COPY, PACKED_KIND, find_file_type
from edgeinfer.export.source.calibration_text import CalibrationText, read_calibration_text
from edgeinfer.export.source.checkpoint import Checkpoint
from edgeinfer.export.source.packed import MXFP4
from edgeinfer.export.source.sidecar import Sidecar, read_sidecar
from edgeinfer.quant.calibration import ModelReader, default_tokens
from edgeinfer.quant.plan import match_patterns
from edgeinfer.quant.probing import probe_tokens
from edgeinfer.quant.sensitivity import choose_texts
from edgeinfer.results import Progress

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_LAYER = re.compile(r"layers\.(\d+)\.")

# For people to read in the manifest.
Facts = dict[str, str | int | float | bool | None]
_log = logging.getLogger("edgeinfer")
_FLOAT_FILE = "float.gguf"
# Types that hold what a stored one does, so that nothing is lost before quantizing.
_FLOATS = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F32"}
# What a mixture around a type is at most, beside all its weights in that type: embedding and head have more bits.
_MIXTURE = 1.25


@dataclass(frozen=True)
class Shrunk:
    """How the file was shrunk.

    Attributes:
        kind: type of the file.
        record: for the manifest.
        pruned: layers of the checkpoint that the file lacks.
    """

    kind: str
    record: PlanRecord
    pruned: tuple[int, ...]


def check_request(checkpoint: Checkpoint, described: GgufSource, config: ExportConfig) -> None:
    """Refuses what `shrink` would refuse, as far as that is known before anything is written."""
    layers = config.prune_layers or tuple(range(config.prune_count))
    if layers:
        check_layers(described.arch.name, described.spec.num_layers, layers)
    model = _Model.of(checkpoint, described).without(config.prune_layers)
    if described.arch.rewrite is not None and (config.calibration or config.budget_bytes(model.parameters) is not None):
        message = f"Calibrating GGUF files of {described.arch.name} is not supported."
        raise UsageError(message, "Choose a type of llama.cpp's, such as --type Q4_K_M, or export it to ONNX.")
    given = match_patterns(config.types_for, model.matrices)
    budget = config.budget_bytes(model.parameters)
    if budget is not None and not config.prune_count:
        check_budget(model.tensors, budget, given)


def shrink(
    source: Path,
    target: Path,
    checkpoint: Checkpoint,
    described: GgufSource,
    tokenizer: bytes,
    config: ExportConfig,
    progress: Progress | None = None,
) -> Shrunk:
    """Rewrites a float file with the layers and types of a configuration."""
    text = _read_text(config, described, tokenizer)
    texts = None if text is None else text.texts
    model = _Model.of(checkpoint, described)
    written = read_gguf(source)
    pruned = config.prune_layers
    if config.prune_count:
        tokens = prune_tokens(described.spec, described.parameters, config.prune_count)
        chosen = choose_texts(texts, tokens, described.spec.vocab_size)
        pruned = choose_layers(model.spec, model.reader, chosen, config.prune_count, progress)
    check_prunable(written, pruned)
    model = model.without(pruned)
    importance = None
    if texts is not None:
        importance = gather_importance(model.spec, model.reader, texts, model.tensors, progress)
    plan = _plan(config, model, texts, importance, written.data_offset, progress)
    names = {renumbered(t.name, pruned): t.name for t in described.tensors if not _lacks(t, pruned)}
    quantize_gguf(
        source,
        target,
        plan.kind,
        importance=None if importance is None else {names[name]: found for name, found in importance.items()},
        tensor_types={names[name]: kind for name, kind in plan.types.items()},
        prune_layers=pruned,
        progress=progress,
    )
    record = plan.record(*(() if text is None else (text.sha256, text.tokens)))
    return Shrunk(config.gguf_kind if plan.kind == COPY.name else plan.kind, record, pruned)


@dataclass(frozen=True)
class _Model:
    """The model that calibration runs, and the tensors of its file."""

    spec: DecoderSpec
    reader: ModelReader
    tensors: Sequence[PlannedGgufTensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint, described: GgufSource) -> _Model:
        """The whole model."""
        return cls(described.spec, PlannedTensors(checkpoint, described.computing), described.tensors)

    @property
    def matrices(self) -> list[str]:
        """Names of the tensors whose type can be chosen."""
        return [tensor.name for tensor in self.tensors if not tensor.exact]

    @property
    def parameters(self) -> int:
        """Number of weights; a head that the file stores beside a shared embedding is counted too."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def without(self, pruned: tuple[int, ...]) -> _Model:
        """The model that is left without some layers, the others moved up."""
        if not pruned:
            return self
        kept = [layer for layer in range(self.spec.num_layers) if layer not in pruned]
        windows = tuple(self.spec.windows[layer] for layer in kept) if self.spec.windows else ()
        spec = dataclasses.replace(self.spec, num_layers=len(kept), windows=windows)
        tensors = [_moved(tensor, pruned) for tensor in self.tensors if not _lacks(tensor, pruned)]
        return _Model(spec, _Shortened(self.reader, kept), tensors)


class _Shortened:
    """Weights of a model by the numbers its layers have once some are left out."""

    def __init__(self, reader: ModelReader, kept: Sequence[int]) -> None:
        self._reader, self._kept = reader, kept

    def tensor(self, name: str) -> Floats:
        """A whole tensor."""
        return self._reader.tensor(self._original(name))

    def rows(self, name: str, rows: Ints) -> Floats:  # (M,) -> (M, D)
        """Some rows of a matrix, ascending."""
        return self._reader.rows(self._original(name), rows)

    def _original(self, name: str) -> str:
        return _LAYER.sub(lambda found: f"layers.{self._kept[int(found[1])]}.", name, count=1)


def _lacks(tensor: PlannedGgufTensor, pruned: Sequence[int]) -> bool:
    found = re.match(r"blk\.(\d+)\.", tensor.name)
    return found is not None and int(found[1]) in pruned


def _moved(tensor: PlannedGgufTensor, pruned: tuple[int, ...]) -> PlannedGgufTensor:
    """A tensor by the number that its layer has once some are left out."""

    def number(found: re.Match[str]) -> str:
        layer = int(found[1])
        return f"layers.{layer - sum(p < layer for p in pruned)}."

    parts = tuple(dataclasses.replace(part, plan=_LAYER.sub(number, part.plan, count=1)) for part in tensor.parts)
    return dataclasses.replace(tensor, name=renumbered(tensor.name, pruned), parts=parts)


def _read_text(config: ExportConfig, described: GgufSource, tokenizer: bytes) -> CalibrationText | None:
    if config.calibration is None:
        return None
    tokens = config.calibration_tokens or default_tokens(described.parameters)
    return read_calibration_text(config.calibration, tokenizer, tokens, described.spec.max_positions)


def _plan(
    config: ExportConfig,
    model: _Model,
    texts: Sequence[Ints] | None,
    importance: Importance | None,
    header: int,
    progress: Progress | None,
) -> TypePlan:
    """The types of the file and of its tensors, by name or by size."""
    given = match_patterns(config.types_for, model.matrices)
    budget = config.budget_bytes(model.parameters)
    if budget is not None:
        # A size is of the whole file, bits are of its tensors.
        budget -= header if config.target_size is not None else 0
        chosen = choose_texts(texts, probe_tokens(model.spec, model.parameters), model.spec.vocab_size)
        return choose_types(model.spec, model.reader, chosen, model.tensors, budget, importance, given, progress)
    kind = find_file_type(config.gguf_kind)
    if not kind.is_float:
        return TypePlan(kind.name, given, {}, None)
    if not given:
        return TypePlan(COPY.name, {}, {}, None)
    # llama.cpp looks at single types in files of a quantized type only.
    types: Mapping[str, str] = dict.fromkeys(model.matrices, kind.base) | given
    return TypePlan(file_kind(types, model.tensors), types, {}, None)


def export_gguf(source: Path, out: Path, config: ExportConfig, progress: Progress | None = None) -> Path:
    """Exports to a GGUF file in a bundle; as `edgeinfer.export.export_checkpoint` otherwise."""
    kind = config.gguf_kind
    with Checkpoint(source) as checkpoint:
        described = open_gguf_source(checkpoint)
        check_request(checkpoint, described, config)
        sidecar = read_sidecar(source, described.config)
        words = read_vocabulary(source, described.config, described.spec.vocab_size)
        name = config.name or source.resolve().name
        direct = kind in FILE_TYPES and not config.is_reworked
        if not direct and (kind != PACKED_KIND or config.is_reworked):
            described = described.unpacked
        first = kind if direct or find_file_type(kind).is_float else _float_type(checkpoint, described)
        with write_bundle(out, replace_existing=config.force) as work:
            _check_room(work, described, first, kind)
            sidecar.write(work, table=False)
            written = work / (GGUF_MODEL if direct else _FLOAT_FILE)
            write_gguf_source(checkpoint, described, words, written, first, name=name, progress=progress)
            facts = _check_vocabulary(written, words, sidecar)
            record, pruned = None, False
            if not direct:
                tokenizer = sidecar.files["tokenizer.json"]
                shrunk = shrink(written, work / GGUF_MODEL, checkpoint, described, tokenizer, config, progress)
                record, facts["type"], pruned = shrunk.record, shrunk.kind, bool(shrunk.pruned)
                if pruned:
                    facts["pruned_layers"] = " ".join(map(str, shrunk.pruned))
                written.unlink()
            base = manifest_of(read_gguf(work / GGUF_MODEL))
            context = context_length(described.spec, described.arch)
            if context < described.spec.max_positions:
                facts["context_of_window"] = context
            manifest = dataclasses.replace(
                base,
                name=name,
                architecture=described.config.architecture or described.config.model_type,
                parameters=base.parameters if pruned else described.parameters,
                files={},
                export=config.options | facts,
                plan=record,
            )
            seal(work, manifest)
    return out


def _float_type(checkpoint: Checkpoint, described: GgufSource) -> str:
    """The type that all of the checkpoint's tensors are stored in; float32 where there are several. BF16 holds all
    values of MXFP4 too."""
    sources = [source for plan in described.plans for source in plan.sources]
    types = {checkpoint.dtype(source.name) for source in sources if not source.packing}
    packings = {source.packing for source in sources if source.packing}
    if len(types) != 1 or (packings and (packings, types) != ({MXFP4}, {"BF16"})):
        return "F32"
    return _FLOATS[types.pop()]


def _check_room(work: Path, described: GgufSource, first: str, kind: str) -> None:
    """Refuses an export that the disk has no room for, before anything is written."""
    needed = written_bytes(described, first)
    if first != kind:
        base = ggml_type(find_file_type(kind).base)
        needed += int(_MIXTURE * described.parameters * base.block_bytes / base.block_values)
    free = shutil.disk_usage(work).free
    if free < needed:
        message = f"The export takes {needed / 1e9:.1f} GB of disk space, and only {free / 1e9:.1f} GB are free."
        raise StorageError(message, "Free some space or choose another place.")


def _check_vocabulary(written: Path, words: Vocabulary, sidecar: Sidecar) -> Facts:
    """What the manifest says of the tokenizer, which is compared where llama.cpp is installed."""
    if find_spec("llama_cpp") is None:
        return {"tokenizer_check": "skipped: llama-cpp-python is not installed"}
    found = check_tokenizer(written, sidecar.files["tokenizer.json"], words)
    if found.different:
        _log.warning(
            "llama.cpp tokenizes %d rare texts, such as %r, differently from tokenizer.json.",
            len(found.different),
            found.different[0],
        )
    return {"tokenizer_texts": found.texts, "tokenizer_differences": len(found.different)}
