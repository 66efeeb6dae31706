"""What an export asks for, made definite for one checkpoint: sizes and text; knows nothing of graphs or bundles."""

from __future__ import annotations

import math
from collections.abc import Iterable

from edgeinfer.bundle import DecoderSpec
from edgeinfer.export.architectures import TensorPlan
from edgeinfer.export.calibration_text import CalibrationText, read_calibration_text
from edgeinfer.export.config import ExportConfig
from edgeinfer.export.sidecar import Sidecar

__all__ = ["resolve", "text_of"]


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
