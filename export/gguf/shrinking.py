"""From a float GGUF file to the one that was asked for: fewer layers, types by size or by name, columns by importance.

The checkpoint the file was written from is at hand and is run in numpy for what a text shows. Knows nothing of bundles.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.plan_record import PlanRecord
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.calibration_text import CalibrationText, read_calibration_text
from edgeinfer.export.checkpoint import Checkpoint
from edgeinfer.export.config import ExportConfig
from edgeinfer.export.gguf.allocation import TypePlan, check_budget, choose_types, file_kind
from edgeinfer.export.gguf.file_types import COPY, find_file_type
from edgeinfer.export.gguf.importance import Importance, gather_importance
from edgeinfer.export.gguf.pruning import check_layers, check_prunable, choose_layers, prune_tokens, renumbered
from edgeinfer.export.gguf.quantize import Progress, quantize_gguf
from edgeinfer.export.gguf.tensors import GgufTensor
from edgeinfer.export.gguf.writer import Subject
from edgeinfer.export.planned_tensors import PlannedTensors
from edgeinfer.quant.calibration import ModelReader, default_tokens
from edgeinfer.quant.patterns import match_patterns
from edgeinfer.quant.probing import probe_tokens
from edgeinfer.quant.sensitivity import choose_texts

__all__ = ["Shrunk", "check_request", "shrink"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Shrunk:
    """What was decided on the way.

    Attributes:
        kind: type of the file.
        record: for the manifest.
        pruned: layers of the checkpoint that the file lacks.
    """

    kind: str
    record: PlanRecord
    pruned: tuple[int, ...]


def check_request(checkpoint: Checkpoint, subject: Subject, config: ExportConfig) -> None:
    """Refuses what `shrink` would, as far as it can be told before anything is written.

    Raises:
        UsageError: a pattern matches no matrix, or layers cannot be left out.
        BudgetError: no types fit the size.
    """
    layers = config.prune_layers or tuple(range(config.prune_count))
    if layers:
        check_layers(subject.arch.name, subject.spec.num_layers, layers)
    model = _Model.of(checkpoint, subject).without(config.prune_layers)
    given = match_patterns(config.types_for, model.matrices)
    budget = config.budget_bytes(model.parameters)
    if budget is not None and not config.prune_count:
        check_budget(model.tensors, budget, given)


def shrink(
    source: Path,
    target: Path,
    checkpoint: Checkpoint,
    subject: Subject,
    tokenizer: bytes,
    config: ExportConfig,
    progress: Progress | None = None,
) -> Shrunk:
    """Writes a float file again as a configuration asks for.

    Args:
        source: the checkpoint as a file of floats.
        tokenizer: contents of its tokenizer.json.

    Raises:
        UsageError: what is asked for is not possible with this model, or the calibration text is too short.
        BudgetError: no types fit the size.
        StorageError: the target cannot be written.
        BackendError: llama.cpp refuses.
    """
    text = _read_text(config, subject, tokenizer)
    texts = None if text is None else text.texts
    model = _Model.of(checkpoint, subject)
    written = read_gguf(source)
    pruned = config.prune_layers
    if config.prune_count:
        tokens = prune_tokens(subject.spec, subject.parameters, config.prune_count)
        chosen = choose_texts(texts, tokens, subject.spec.vocab_size)
        pruned = choose_layers(model.spec, model.reader, chosen, config.prune_count, progress)
    check_prunable(written, pruned)
    model = model.without(pruned)
    importance = None
    if texts is not None:
        importance = gather_importance(model.spec, model.reader, texts, model.tensors, progress)
    plan = _plan(config, model, texts, importance, written.data_offset, progress)
    names = {renumbered(t.name, pruned): t.name for t in subject.tensors if not _lacks(t, pruned)}
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
    """What calibration runs, and the tensors of its file."""

    spec: DecoderSpec
    reader: ModelReader
    tensors: Sequence[GgufTensor]

    @classmethod
    def of(cls, checkpoint: Checkpoint, subject: Subject) -> _Model:
        """The whole model."""
        return cls(subject.spec, PlannedTensors(checkpoint, subject.computing), subject.tensors)

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


def _lacks(tensor: GgufTensor, pruned: Sequence[int]) -> bool:
    found = re.match(r"blk\.(\d+)\.", tensor.name)
    return found is not None and int(found[1]) in pruned


def _moved(tensor: GgufTensor, pruned: tuple[int, ...]) -> GgufTensor:
    """A tensor by the number that its layer has once some are left out."""

    def number(found: re.Match[str]) -> str:
        layer = int(found[1])
        return f"layers.{layer - sum(p < layer for p in pruned)}."

    parts = tuple(dataclasses.replace(part, plan=_LAYER.sub(number, part.plan, count=1)) for part in tensor.parts)
    return dataclasses.replace(tensor, name=renumbered(tensor.name, pruned), parts=parts)


def _read_text(config: ExportConfig, subject: Subject, tokenizer: bytes) -> CalibrationText | None:
    if config.calibration is None:
        return None
    tokens = config.calibration_tokens or default_tokens(subject.parameters)
    return read_calibration_text(config.calibration, tokenizer, tokens, subject.spec.max_positions)


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
