"""Plans the weights of a checkpoint, the bits of every matrix and the text to calibrate with, and writes their file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.codecs import CODECS, Rows, take_turns
from edgeinfer.bundle.kinds import KINDS, Segment
from edgeinfer.bundle.manifest import PlanRecord, TensorEntry
from edgeinfer.bundle.packing import QuantizedMatrix, QuantizedShape, find_expert, widen
from edgeinfer.bundle.tables import Outline, is_looked_up
from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.core.options.load import CONVERTED_BITS, FLOAT_BITS, WIDTHS
from edgeinfer.core.results import Progress
from edgeinfer.export.architectures.described import Described
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.architectures.tensors import TensorPlan
from edgeinfer.export.options import NO_TEXT, ExportConfig
from edgeinfer.export.source.calibration_text import DEFAULT_TEXT, CalibrationText, read_calibration_text
from edgeinfer.export.source.sidecar import Sidecar
from edgeinfer.quant.blocks import Grid, packed
from edgeinfer.quant.budget import Candidate, candidate_schemes, plan_below, plan_within
from edgeinfer.quant.calibration_layers import uncomputed
from edgeinfer.quant.methods import METHODS, method_for
from edgeinfer.quant.policy import QuantPlan, QuantScheme
from edgeinfer.quant.probing import probe_tokens
from edgeinfer.quant.sensitivity import expected_costs, measure_costs
from edgeinfer.quant.statistics import InputStatistics

# Of the divergence that is allowed, what is planned, as texts differ: planned for 0.02, Gemma-3-270M has 0.019 on
# WikiText-2, 0.018 on code and 0.056 on chats, half of which is a citation that it knows by heart.
_CAUTION = 0.5
# Of an encoder, unless others are asked for: MiniLM's vectors keep a cosine of 0.999.
_ENCODER_BITS = 8
# What each way to store each matrix is predicted to cost.
Costs = dict[str, list[Candidate]]


@dataclass(frozen=True)
class WeightPlan:
    """The scheme of every matrix, and the calibration text, None where nothing is calibrated."""

    quant: QuantPlan
    text: CalibrationText | None
    costs: Costs | None = None  # that the bits were chosen by

    def record(self) -> PlanRecord:
        """The plan for the manifest."""
        return self.quant.record(*(() if self.text is None else (self.text.sha256, self.text.tokens)))


def with_defaults(config: ExportConfig, described: Described) -> ExportConfig:
    """Fills in the options that depend on the model; without a text where the one that ships cannot be used."""
    if described.spec.encoder is not None and config.bits is None and config.target_size is None:
        # No text says what fewer bits cost: vectors are not compared by a divergence.
        config = dataclasses.replace(config, bits=_ENCODER_BITS, calibration=NO_TEXT)
    packed = any(plan.kept(int(config.bits or 4)) for plan in described.plans)
    if config.calibration == DEFAULT_TEXT and (packed or uncomputed(described.spec)):
        bits = (4 if packed else None) if config.bits not in CONVERTED_BITS else config.bits
        config = dataclasses.replace(config, calibration=NO_TEXT, bits=bits)
    sizes = {plan.name: math.prod(plan.shape) for plan in described.plans}
    return config.with_defaults(sum(sizes.values()), sizes["embed"])


def plan_weights(
    config: ExportConfig,
    sidecar: Sidecar,
    described: Described,
    tensors: PlannedTensors,
    parameters: int,
    progress: Progress | None = None,
    costs: Costs | None = None,
) -> WeightPlan:
    """Plans the weights of a complete configuration; with a budget, the model is probed for the smallest loss, unless
    the costs of an earlier plan are given."""
    text = None
    if config.is_calibrated:
        assert config.calibration_tokens is not None, "call with_defaults first"
        tokenizer, context = sidecar.files["tokenizer.json"], described.spec.max_positions
        text = read_calibration_text(config.calibration, tokenizer, config.calibration_tokens, context)
    return _plan(config, described, tensors, parameters, text, progress, costs)


def _plan(
    config: ExportConfig,
    described: Described,
    tensors: PlannedTensors,
    parameters: int,
    text: CalibrationText | None,
    progress: Progress | None,
    costs: Costs | None,
) -> WeightPlan:
    spec, plans = described.spec, described.plans
    shapes, method = {plan.name: plan.shape for plan in plans}, config.method or "rtn"
    budget = config.budget_bytes(parameters)
    if not config.has_budget:
        bits = config.policy.bits
        kept = {} if bits == FLOAT_BITS else {plan.name: scheme for plan in plans if (scheme := plan.kept(bits))}
        if kept and text is not None:
            message = "A checkpoint of packed weights, which are kept as they are, is not rounded for a text."
            raise UsageError(message, "Leave the calibration text out.")
        return WeightPlan(QuantPlan.from_policy(config.policy, shapes, config.bits_for, method, kept), text)
    by_name = {plan.name: plan for plan in plans}

    def draw(name: str, scheme: QuantScheme | None) -> Outline:
        return outline(by_name[name], scheme)

    candidates = candidate_schemes(shapes, config.limits, config.layout)
    most = budget or config.max_size
    if most is not None:
        # An impossible budget is refused before the model is probed, which takes a while.
        unknown = {name: [Candidate(scheme, 0.0) for scheme in schemes] for name, schemes in candidates.items()}
        try:
            plan_within(most, unknown, shapes, draw, config.layout)
        except BudgetError as error:
            if config.bits is None or config.bits < min(WIDTHS):
                raise
            budget = error.minimum_bytes  # 2 bits of a weight are 2.25 with its scale
    if costs is None and text is None:
        costs = expected_costs(tensors, {name: shape[0] for name, shape in shapes.items()}, candidates)
    elif costs is None:
        assert text is not None, "the case before"
        tokens, fed = probe_tokens(spec, parameters), METHODS[method].needs == "hessian"
        costs = measure_costs(spec, tensors.tensor, text.texts, candidates, progress, tokens=tokens, fed_forward=fed)
    rest = (costs, shapes, draw, config.layout, method)
    if budget is not None:
        return WeightPlan(plan_within(budget, *rest), text, costs)
    return WeightPlan(plan_below(_CAUTION * config.max_divergence, *rest, config.max_size), text, costs)


# Values of a float32 tensor in memory at a time, 32 MB: exporting needs little memory whatever the tensor's size.
_SLAB_VALUES = 1 << 23
_PAIRED = ".gate_up"
# Bits and blocks whose passes are faster with inline scales: docs/log/2026-11-25.md, "scales among the weights".
_INLINE = ((4, 32), (4, 64))

# Gives rows start..stop-1 of a float32 tensor.
FloatRows = Callable[[int, int], NDArray[np.float32]]


def outline(plan: TensorPlan, scheme: QuantScheme | None) -> Outline:
    if scheme is None:
        vocabulary = plan.name == "head" or is_looked_up(plan.name)
        # Linear layers are stored as MatMul takes them; vocabulary matrices by rows, which the embedding gathers.
        return Outline(plan.name, plan.shape, transposed=len(plan.shape) == 2 and not vocabulary)
    factor = plan.sources[0].scale if scheme.segments else 1.0
    return Outline(plan.name, plan.shape, _shape(plan.name, plan.shape, scheme), factor=factor)


def _shape(name: str, shape: tuple[int, ...], scheme: QuantScheme) -> QuantizedShape:
    n, k = shape
    segments = (Segment(scheme.kind, n),) if scheme.kind else scheme.segments
    if segments:
        paired = name.endswith(_PAIRED) and len(segments) == 1 and not KINDS[segments[0].kind].floats
        return QuantizedShape(n, k, scheme.bits, 32, False, paired, segments=segments)
    zeros, paired = not scheme.symmetric, name.endswith(_PAIRED)
    # The directory that the operator of experts reads has a place for scales of their own.
    inline = (scheme.bits, scheme.block_size) in _INLINE and not scheme.e2m1 and find_expert(name) is None
    return QuantizedShape(n, k, scheme.bits, scheme.block_size, zeros, paired, scheme.e2m1, inline, scheme.vectors)


def quantized_rows(
    rows: FloatRows, k: int, scheme: QuantScheme, method: str = "rtn", statistics: InputStatistics | None = None
) -> Rows:
    """Rows of a matrix of K columns, quantized on demand."""
    solver = method_for(method, statistics).set_up(Grid.of(scheme), k, statistics)
    return lambda start, stop: packed(solver, rows(start, stop), scheme)


def stored_rows(matrix: QuantizedMatrix) -> Rows:
    def rows(start: int, stop: int) -> QuantizedMatrix:
        zeros = None if matrix.zero_points is None else matrix.zero_points[start:stop]
        return QuantizedMatrix(matrix.data[start:stop], matrix.scales[start:stop], zeros)

    return rows


def write_quantized(file: BinaryIO, entry: TensorEntry, rows: Rows, scheme: QuantScheme) -> None:
    """Writes a quantized matrix to its place, which may be wider than the scheme: experts share one format."""
    source = _shape(entry.name, entry.shape, scheme)
    CODECS[entry.layout].write(file, entry, lambda start, stop: widen(rows(start, stop), source, entry.quantized))


def write_floats(file: BinaryIO, entry: TensorEntry, rows: FloatRows) -> None:
    count, width = entry.shape[0], math.prod(entry.shape[1:])
    step = max(1, _SLAB_VALUES // width)
    file.seek(entry.data.offset)
    if entry.transposed:
        whole = np.empty(entry.data.shape, np.float32)
        for start, stop in _runs(count, step):
            whole[:, start:stop] = rows(start, stop).T
        file.write(whole.data)
        return
    if entry.interleaved:
        half = count // 2
        for start, stop in _runs(half, max(1, step // 2)):
            file.write(take_turns([rows(start, stop), rows(half + start, half + stop)]).data)
        return
    for start, stop in _runs(count, step):
        file.write(np.ascontiguousarray(rows(start, stop)).data)


def _runs(count: int, step: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + step, count)) for start in range(0, count, step))
