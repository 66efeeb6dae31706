"""Which policy for full contexts was measured to lose least of a model's texts, kept for this user."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from edgeinfer.bundle.store import Bundle
from edgeinfer.config import OVERFLOWS, LoadConfig
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.profile.kept import KeptMeasurement

# What LoadConfig.overflow says to take what was measured.
AUTO = "auto"
# Where nothing was.
_UNMEASURED = "window"


@dataclass(frozen=True)
class MeasuredPolicy:
    """What making room costs a model.

    Attributes:
        policy: that loses least, one of config.OVERFLOWS.
        tokens: of the text that told it.
        text, copying, needles: nats per token above those of a context that holds all of the text, mean over contexts.

    Raises:
        UsageError: a value is impossible.
    """

    policy: str
    tokens: int
    text: float
    copying: float
    needles: float

    def __post_init__(self) -> None:
        if self.policy not in OVERFLOWS or self.policy in (AUTO, "stop"):
            raise UsageError(f"A measured policy of {self.policy!r} is not known.", "Run edgeinfer tune --cache again.")
        losses = (self.text, self.copying, self.needles)
        if not isinstance(self.tokens, int) or not all(isinstance(x, float) and math.isfinite(x) for x in losses):
            raise UsageError("What a policy loses must be a number.", "Run edgeinfer tune --cache again.")


KEPT_POLICY = KeptMeasurement(MeasuredPolicy, "cache-policies")


def with_measured_policy(config: LoadConfig, bundle: Bundle) -> LoadConfig:
    """The same with the policy that was measured to lose least in the place of "auto"; window where nothing was."""
    if config.overflow != AUTO:
        return config
    measured = KEPT_POLICY.read(bundle)
    chosen: dict[str, Any] = {"overflow": _UNMEASURED if measured is None else measured.policy}
    return dataclasses.replace(config, **chosen)
