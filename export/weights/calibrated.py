"""Writes the weights of a model while it runs over texts: each matrix is quantized for its own inputs.

Layer by layer, so that memory holds one layer and the hidden states. Scales of input channels can move from one layer
into the one before it, so that quantizing loses less (AWQ): a matrix whose columns are multiplied by s, after something
that divides by s, computes the same, but the errors of its large inputs' weights become smaller. What can divide: the
norm before queries, keys and values, and before gate and up; the rows of the values, before the attention's output; the
rows of up, before down.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.weights.planning import WeightPlan, quantized_rows, stored_rows, write_floats, write_quantized
from edgeinfer.quant.awq import scale_search
from edgeinfer.quant.blocks import dequantized
from edgeinfer.quant.calibration import Calibration, CalibrationOptions, calibrate, default_streams
from edgeinfer.quant.methods import METHODS, quantize
from edgeinfer.quant.policy import QuantPlan
from edgeinfer.quant.statistics import InputStatistics
from edgeinfer.results import Progress

Floats = NDArray[np.float32]
_RowsT = TypeVar("_RowsT")

_log = logging.getLogger("edgeinfer")


def write_weights(
    file: BinaryIO,
    spec: DecoderSpec,
    tensors: PlannedTensors,
    entries: Sequence[TensorEntry],
    plan: WeightPlan,
    progress: Progress | None = None,
) -> None:
    """Writes all tensors as planned."""
    if plan.text is not None and any(plan.quant.schemes.values()):
        write_calibrated(file, spec, tensors, entries, plan.quant, plan.text.texts, progress)
    else:
        write_plain(file, tensors, entries, plan.quant, progress)


def write_plain(
    file: BinaryIO,
    tensors: PlannedTensors,
    entries: Sequence[TensorEntry],
    plan: QuantPlan,
    progress: Progress | None = None,
) -> None:
    """Writes all tensors without calibration, a few MB at a time."""
    written = _Writer(file, tensors, entries, plan, progress)
    for entry in entries:
        written.write(entry.name)


def write_calibrated(
    file: BinaryIO,
    spec: DecoderSpec,
    tensors: PlannedTensors,
    entries: Sequence[TensorEntry],
    plan: QuantPlan,
    texts: Sequence[NDArray[np.int64]],
    progress: Progress | None = None,
) -> Calibration:
    """Writes all tensors; matrices are quantized for their inputs on the calibration texts."""
    written = _Writer(file, tensors, entries, plan, progress)
    method = METHODS[plan.method]
    # Also the search of scales that are folded looks at outputs, not only at the size of each input.
    hessian = method.needs == "hessian" or method.folds
    streams = default_streams(written.total) if method.needs == "hessian" else "quantized"
    options = CalibrationOptions(streams, hessian=hessian, preview=method.folds)
    found = calibrate(spec, tensors, texts, _Visitor(spec, written), options)
    if found.unused:
        names = ", ".join(found.unused[:5]) + (f" and {len(found.unused) - 5} more" if len(found.unused) > 5 else "")
        _log.warning("No token of the calibration text reached %s, which is quantized without it.", names)
    if spec.tied:
        written.write_rest({"embed": found.head.shared_with_lookups()})
    else:
        written.write_rest({"head": fold_head(tensors, plan, found.head) if method.folds else found.head})
    return found


class _Writer:
    """Writes tensors to their places and reports progress in weights."""

    def __init__(
        self,
        file: BinaryIO,
        tensors: PlannedTensors,
        entries: Iterable[TensorEntry],
        plan: QuantPlan,
        progress: Progress | None,
    ) -> None:
        self.tensors, self.plan = tensors, plan
        self._file, self._progress = file, progress
        self._left = {entry.name: entry for entry in entries}
        self.total = sum(math.prod(entry.shape) for entry in self._left.values())
        self._done = 0

    def write(self, name: str, statistics: InputStatistics | None = None) -> None:
        entry, scheme, rows = self._left[name], self.plan.scheme(name), self.tensors.of(name)
        if scheme is None:
            write_floats(self._file, entry, self._telling(entry, rows))
        elif name in self.plan.kept:
            write_quantized(self._file, entry, self._telling(entry, rows.kept(scheme)), scheme)
        else:
            quantized = quantized_rows(rows, entry.shape[1], scheme, self.plan.method, statistics)
            write_quantized(self._file, entry, self._telling(entry, quantized), scheme)
        self._count(name)

    def _telling(self, entry: TensorEntry, rows: Callable[[int, int], _RowsT]) -> Callable[[int, int], _RowsT]:
        """Rows that report progress at each run: an embedding may be most of a model."""
        progress = self._progress
        if progress is None:
            return rows
        width, size, written = math.prod(entry.shape[1:]), math.prod(entry.shape), 0

        def shown(start: int, stop: int) -> _RowsT:
            nonlocal written
            progress(entry.name, self._done + min(written, size), self.total)
            written += (stop - start) * width
            return rows(start, stop)

        return shown

    def write_whole(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        """Writes a matrix that is in memory; returns the written values as floats."""
        entry, scheme = self._left[name], self.plan.scheme(name)
        if scheme is None:
            write_floats(self._file, entry, lambda start, stop: weight[start:stop])
        else:
            n, k = weight.shape
            rows = quantized_rows(lambda start, stop: weight[start:stop], k, scheme, self.plan.method, statistics)
            matrix = rows(0, n)
            write_quantized(self._file, entry, stored_rows(matrix), scheme)
            weight = dequantized(matrix, scheme, k)
        self._count(name)
        return weight

    def write_rest(self, statistics: dict[str, InputStatistics]) -> None:
        for name in tuple(self._left):
            self.write(name, statistics.get(name))

    def _count(self, name: str) -> None:
        self._done += math.prod(self._left.pop(name).shape)
        if self._progress is not None:
            self._progress(name, self._done, self.total)


class _Visitor:
    """Quantizes and writes the matrices that calibration visits; see `quant.calibration.Visitor`."""

    def __init__(self, spec: DecoderSpec, writer: _Writer) -> None:
        self._spec, self._writer = spec, writer

    def layer(self, layer: int, statistics: dict[str, InputStatistics]) -> None:
        fold_layer(self._spec, self._writer.tensors, self._writer.plan, layer, statistics)

    def embedding(self, rows: Floats) -> Floats:  # (M, D) -> (M, D)
        """Returns the rows as they are written."""
        plan = self._writer.plan
        scheme = plan.scheme("embed")
        if scheme is None:
            return rows
        return dequantized(quantize(rows, scheme, method=plan.method), scheme, rows.shape[1])

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:
        return self._writer.write_whole(name, weight, statistics)


# Rows of each matrix that scales are searched with.
_SAMPLE = 256


def fold_layer(
    spec: DecoderSpec, tensors: PlannedTensors, plan: QuantPlan, layer: int, statistics: dict[str, InputStatistics]
) -> None:
    """Folds input scales of a layer's matrices into the tensors before them, of those with statistics of their
    inputs."""
    folder, prefix = _Folder(tensors, plan, statistics), f"layers.{layer}"
    reading = [f"{prefix}.{name}" for name in ("attn.qkv", "attn.gate", "attn.q", "attn.q_a", "attn.kv_a", "mixer.in")]
    attention, gates = [name for name in reading if name in tensors], [f"{prefix}.mixer.gates"]
    moe = spec.experts_of(layer)
    if moe is None:
        readers, others = [f"{prefix}.mlp.{'gate_up' if spec.gated else 'up'}"], []
        inner = [f"{prefix}.mlp"] if spec.gated and not spec.inner_norms else []
    else:
        experts = [f"{prefix}.mlp.experts.{e}" for e in range(moe.experts)]
        shared = [f"{prefix}.mlp.shared"] if moe.shared_size else []
        readers = [f"{e}.{'gate_up' if moe.gated else 'up'}" for e in experts] + [f"{s}.gate_up" for s in shared]
        routers = [f"{prefix}.mlp.router", f"{prefix}.mlp.shared.gate"]
        others = [name for name in routers if name in tensors]
        inner = (experts if moe.gated and not moe.expert_bias else []) + shared
    if spec.pre_norm:
        folder.into_norm(
            f"{prefix}.attn_norm",
            attention + readers * spec.parallel,
            others * spec.parallel + gates * (gates[0] in tensors),
        )
    if not (spec.value_norm or spec.inner_norms):
        values = "qkv" if spec.latent is None else "v_b"
        folder.into_values(spec, layer, f"{prefix}.attn.{values}", f"{prefix}.attn.out")
    if spec.pre_norm and not spec.parallel:
        folder.into_norm(f"{prefix}.mlp_norm", readers, others)
    for name in inner if spec.activation != "swiglu_oai" else []:
        folder.into_up(name)


def fold_head(tensors: PlannedTensors, plan: QuantPlan, statistics: InputStatistics) -> InputStatistics:
    """Folds the head's input scales into the last norm; returns the statistics of its new inputs."""
    scale = _Folder(tensors, plan, {"head": statistics}).into_norm("final_norm", ["head"])
    return statistics if scale is None else _divided(statistics, scale)


class _Folder:
    def __init__(self, tensors: PlannedTensors, plan: QuantPlan, statistics: dict[str, InputStatistics]) -> None:
        self._tensors, self._plan, self._statistics = tensors, plan, statistics

    def into_norm(self, norm: str, readers: Sequence[str], others: Sequence[str] = ()) -> Floats | None:  # (D,)
        """Makes the norm divide for the matrices that read it; None where none of them is quantized and seen."""
        quantized = [name for name in readers if self._plan.scheme(name) is not None and name in self._statistics]
        if not quantized:
            return None
        scale = self._search(quantized, _joined([self._statistics[name] for name in quantized]))
        for name in (norm, f"{norm}_bias"):
            if name in self._tensors:
                self._tensors.of(name).multiply(np.float32(1) / scale)
        for name in (*readers, *others):
            self._tensors.of(name).multiply(scale[None])
        return scale

    def into_values(self, spec: DecoderSpec, layer: int, qkv: str, out: str) -> None:
        """Makes the rows of the values divide for the output; heads that share values share scales."""
        statistics = self._statistics.get(out)
        if statistics is None or self._plan.scheme(out) is None:
            return
        own = spec.heads(layer)
        heads = (own.kv_heads, own.heads // own.kv_heads, own.size)
        if spec.latent is not None:
            heads = (spec.num_heads, 1, spec.heads_size // spec.num_heads)
        square = statistics.mean_square.reshape(heads).mean(axis=1, keepdims=True)
        shared = np.broadcast_to(square, heads).reshape(-1)
        scale = self._search([out], dataclasses.replace(statistics, mean_square=shared))
        self._divide_last(qkv, scale.reshape(heads)[:, 0].reshape(-1))
        self._tensors.of(out).multiply(scale[None])

    def into_up(self, prefix: str) -> None:
        """Makes the rows of up, which follow those of gate, divide for down."""
        gate_up, down = f"{prefix}.gate_up", f"{prefix}.down"
        statistics = self._statistics.get(down)
        if statistics is None or self._plan.scheme(down) is None:
            return
        scale = self._search([down], statistics)
        self._divide_last(gate_up, scale)
        self._tensors.of(down).multiply(scale[None])

    def _divide_last(self, name: str, scale: Floats) -> None:
        """Divides the last rows of a matrix and of its bias."""
        rows = self._tensors.of(name)
        factors = np.ones(rows.shape[0], np.float32)
        factors[-len(scale) :] = 1 / scale
        rows.multiply(factors[:, None])
        if f"{name}_bias" in self._tensors:
            self._tensors.of(f"{name}_bias").multiply(factors)

    def _search(self, names: Sequence[str], statistics: InputStatistics) -> Floats:  # (K,)
        scheme = self._plan.scheme(names[0])
        assert scheme is not None, "only what is quantized is searched"
        return scale_search([self._sample(name) for name in names], statistics, scheme)

    def _sample(self, name: str) -> Floats:  # (at most about _SAMPLE, K)
        count = self._tensors.of(name).shape[0]
        return self._tensors.rows(name, np.arange(0, count, max(1, count // _SAMPLE)))


def _joined(parts: Sequence[InputStatistics]) -> InputStatistics:
    """Statistics joined from different tokens."""
    count = sum(part.count for part in parts)
    shares = [np.float32(part.count / count) for part in parts]
    hessians = [share * part.hessian for share, part in zip(shares, parts, strict=True) if part.hessian is not None]
    return InputStatistics(
        count,
        np.sum([share * part.mean_square for share, part in zip(shares, parts, strict=True)], axis=0),
        np.sum([share * part.mean for share, part in zip(shares, parts, strict=True)], axis=0),
        np.sum(hessians, axis=0) if len(hessians) == len(parts) else None,
    )


def _divided(statistics: InputStatistics, scale: Floats) -> InputStatistics:
    """Statistics of inputs divided by a scale (K,)."""
    square = None if statistics.hessian is None else statistics.hessian / scale / scale[:, None]
    return InputStatistics(statistics.count, statistics.mean_square / scale**2, statistics.mean / scale, square)
