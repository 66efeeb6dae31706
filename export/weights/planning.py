"""Plans the weights of one checkpoint: the bits of every matrix, and the text to calibrate with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from edgeinfer.bundle.plan_record import PlanRecord
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import Outline
from edgeinfer.config import FLOAT_BITS
from edgeinfer.errors import UsageError
from edgeinfer.export.architectures.described import Described
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.architectures.plans import TensorPlan
from edgeinfer.export.options.config import ExportConfig
from edgeinfer.export.source.calibration_text import CalibrationText, read_calibration_text
from edgeinfer.export.source.sidecar import Sidecar
from edgeinfer.export.weights.writer import outline
from edgeinfer.quant.budget import Candidate, candidate_schemes, plan_within
from edgeinfer.quant.plan import QuantPlan
from edgeinfer.quant.policy import QuantScheme
from edgeinfer.quant.probing import probe_tokens
from edgeinfer.quant.sensitivity import choose_texts, measure_costs
from edgeinfer.results import Progress


@dataclass(frozen=True)
class WeightPlan:
    """What every matrix is quantized to, and the text that it is calibrated with.

    Attributes:
        text: None where nothing is calibrated.
    """

    quant: QuantPlan
    text: CalibrationText | None

    @property
    def is_calibrated(self) -> bool:
        """Whether matrices are quantized for their inputs on the text."""
        return self.text is not None and any(self.quant.schemes.values())

    def record(self) -> PlanRecord:
        """The plan as a manifest holds it."""
        return self.quant.record(*(() if self.text is None else (self.text.sha256, self.text.tokens)))


def resolve(config: ExportConfig, plans: Iterable[TensorPlan]) -> ExportConfig:
    """Decides everything in the configuration that depends on the model's size."""
    sizes = {plan.name: math.prod(plan.shape) for plan in plans}
    return config.resolve(sum(sizes.values()), sizes["embed"])


def _read_text(config: ExportConfig, sidecar: Sidecar, spec: DecoderSpec) -> CalibrationText | None:
    """Reads the calibration text of a resolved configuration in the model's tokens; None where there is none."""
    if config.calibration is None:
        return None
    assert config.calibration_tokens is not None, "resolve first"
    tokenizer = sidecar.files["tokenizer.json"]
    return read_calibration_text(config.calibration, tokenizer, config.calibration_tokens, spec.max_positions)


def plan_weights(
    config: ExportConfig,
    sidecar: Sidecar,
    described: Described,
    tensors: PlannedTensors,
    parameters: int,
    progress: Progress | None = None,
) -> WeightPlan:
    """Plans the weights of a resolved configuration; with a budget, the model is probed for the smallest loss."""
    text = _read_text(config, sidecar, described.spec)
    return WeightPlan(_plan(config, described, tensors, parameters, text, progress), text)


def _plan(
    config: ExportConfig,
    described: Described,
    tensors: PlannedTensors,
    parameters: int,
    text: CalibrationText | None,
    progress: Progress | None,
) -> QuantPlan:
    spec, plans = described.spec, described.plans
    shapes, method = {plan.name: plan.shape for plan in plans}, config.method or "rtn"
    budget = config.budget_bytes(parameters)
    if budget is None:
        bits = config.policy.bits
        kept = {} if bits == FLOAT_BITS else {plan.name: scheme for plan in plans if (scheme := plan.kept(bits))}
        if kept and text is not None:
            message = "A checkpoint of packed weights, which are kept as they are, is not rounded for a text."
            raise UsageError(message, "Leave the calibration text out.")
        return QuantPlan.from_policy(config.policy, shapes, config.bits_for, method, kept)
    by_name = {plan.name: plan for plan in plans}

    def draw(name: str, scheme: QuantScheme | None) -> Outline:
        return outline(by_name[name], scheme)

    candidates = candidate_schemes(shapes, config.limits, config.layout)
    # An impossible budget is refused before the model is probed, which takes a while.
    unknown = {name: [Candidate(scheme, 0.0) for scheme in schemes] for name, schemes in candidates.items()}
    plan_within(budget, unknown, shapes, draw, config.layout)
    chosen = choose_texts(None if text is None else text.texts, probe_tokens(spec, parameters), spec.vocab_size)
    costs = measure_costs(spec, tensors.tensor, chosen, candidates, progress)
    return plan_within(budget, costs, shapes, draw, config.layout, method)
