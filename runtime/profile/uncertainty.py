"""Above which entropy a model is more likely wrong than right, as learnt from a text and kept for this user."""

from __future__ import annotations

import math

from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.profile.kept import KeptMeasurement

# Nats, where nothing was learnt.
_UNMEASURED = 1.5


@dataclass(frozen=True)
class MeasuredUncertainty:
    """A model's errors on a text.

    Attributes:
        threshold: entropy in nats above which the likeliest token is rather wrong than right, both weighing the same.
        tokens: of the text.
        wrong: share of them that were not the likeliest.
        above: share of them before which the entropy was above the threshold.

    Raises:
        UsageError: a value is impossible.
    """

    threshold: float
    tokens: int
    wrong: float
    above: float

    def __post_init__(self) -> None:
        numbers = (self.threshold, self.wrong, self.above)
        possible = all(isinstance(x, float) and math.isfinite(x) and x >= 0 for x in numbers)
        if not possible or not isinstance(self.tokens, int):
            raise UsageError("An uncertainty must be a number.", "Run edgeinfer tune --uncertainty again.")


KEPT_UNCERTAINTY = KeptMeasurement(MeasuredUncertainty, "uncertainties")


def uncertainty_of(bundle: Bundle) -> float:
    """The entropy in nats above which searches take the next token for uncertain."""
    measured = KEPT_UNCERTAINTY.read(bundle)
    return _UNMEASURED if measured is None else measured.threshold
