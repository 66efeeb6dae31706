"""What an export asks for, made definite for one checkpoint: the bits of every matrix, the text to calibrate with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle.tables import Outline
from edgeinfer.export.architectures import TensorPlan
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.calibration_text import CalibrationText, read_calibration_text
from edgeinfer.export.source.sidecar import Sidecar
from edgeinfer.export.weights.writer import outline
from edgeinfer.quant.budget import Candidate, candidate_schemes, plan_within
from edgeinfer.quant.plan import QuantPlan
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.probing import probe_tokens
from edgeinfer.quant.sensitivity import choose_texts, measure_costs

__all__ = ["make_plan", "resolve", "text_of"]


def resolve(config: ExportConfig, plans: Iterable[TensorPlan]) -> ExportConfig:
    """The configuration with everything decided that depends on the model's size."""
    sizes = {plan.name: math.prod(plan.shape) for plan in plans}
    return config.resolve(sum(sizes.values()), sizes["embed"])


def text_of(config: ExportConfig, sidecar: Sidecar, spec: DecoderSpec) -> CalibrationText | None:
    """The text to calibrate with, in the model's tokens; None where none is given. Of a resolved configuration only."""
    if config.calibration is None:
        return None
    assert config.calibration_tokens is not None, "resolve first"
    tokenizer = sidecar.files["tokenizer.json"]
    return read_calibration_text(config.calibration, tokenizer, config.calibration_tokens, spec.max_positions)


def make_plan(
    config: ExportConfig,
    spec: DecoderSpec,
    plans: Sequence[TensorPlan],
    tensors: PlannedTensors,
    parameters: int,
    texts: Sequence[NDArray[np.int64]] | None,
    progress: Callable[[str, int, int], None] | None = None,
) -> QuantPlan:
    """The plan of a resolved configuration; where it has a budget, the model is probed for what it loses least by.

    Args:
        parameters: of the model.
        texts: token ids of a calibration text, where there is one.

    Raises:
        UsageError: a pattern matches no matrix that can be quantized.
        BudgetError: no plan fits the budget.
        CheckpointError: a weight is not finite.
    """
    shapes, method = {plan.name: plan.shape for plan in plans}, config.method or "rtn"
    budget = config.budget_bytes(parameters)
    if budget is None:
        return QuantPlan.from_policy(config.policy, shapes, config.bits_for, method)
    by_name = {plan.name: plan for plan in plans}

    def draw(name: str, scheme: QuantScheme | None) -> Outline:
        return outline(by_name[name], scheme)

    candidates = candidate_schemes(shapes, config.limits)
    # An impossible budget is refused before the model is probed, which takes a while.
    unknown = {name: [Candidate(scheme, 0.0) for scheme in schemes] for name, schemes in candidates.items()}
    plan_within(budget, unknown, shapes, draw, config.layout)
    chosen = choose_texts(texts, probe_tokens(spec, parameters), spec.vocab_size)
    costs = measure_costs(spec, tensors.tensor, chosen, candidates, progress)
    return plan_within(budget, costs, shapes, draw, config.layout, method)
