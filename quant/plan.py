"""What every matrix of a model is quantized to, chosen by ordered patterns of names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from edgeinfer.bundle.plan_record import PlannedTensor, PlanRecord
from edgeinfer.config import FLOAT_BITS
from edgeinfer.errors import UsageError
from edgeinfer.quant.policy import QuantPolicy, QuantScheme, is_quantizable, make_scheme

Value = TypeVar("Value")


def match_patterns(patterns: Sequence[tuple[str, Value]], names: Iterable[str]) -> dict[str, Value]:
    """The value of the last pattern that matches each name; names that none matches are left out."""
    names = list(names)
    found: dict[str, Value] = {}
    for pattern, value in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            shown = f"{names[0]} and {names[-1]}" if names else "none"
            hint = f"Names are like {shown}; edgeinfer inspect --tensors of any export lists them."
            raise UsageError(f"{pattern!r} matches no matrix that can be quantized.", hint)
        found.update(dict.fromkeys(matched, value))
    return found


@dataclass(frozen=True)
class QuantPlan:
    """The scheme of each matrix, by its canonical name, and the method that finds the values.

    Attributes:
        schemes: of every matrix; None keeps it float32. Vectors are not listed and stay float32.
        method: of edgeinfer.quant.methods, by name.
        predicted: what quantizing a matrix is predicted to cost, in nats of KL divergence per token, where known.
        budget_bytes: what the weights may take; None where bits were given.
        kept: matrices whose values a checkpoint has in their schemes already.
    """

    schemes: Mapping[str, QuantScheme | None]
    method: str = "rtn"
    predicted: Mapping[str, float] = field(default_factory=dict)
    budget_bytes: int | None = None
    kept: frozenset[str] = frozenset()

    @classmethod
    def from_policy(
        cls,
        policy: QuantPolicy,
        shapes: Mapping[str, tuple[int, ...]],
        bits_for: Sequence[tuple[str, int]] = (),
        method: str = "rtn",
        kept: Mapping[str, QuantScheme] | None = None,
    ) -> QuantPlan:
        """The plan of a policy, with the bits of some matrices given by patterns; the last match wins."""
        given = match_patterns(bits_for, [name for name, shape in shapes.items() if is_quantizable(name, shape)])
        schemes = {name: policy.scheme(name, shape) for name, shape in shapes.items() if len(shape) == 2}
        own = {name: scheme for name, scheme in (kept or {}).items() if name not in given}
        schemes |= own
        for name, bits in given.items():
            signs = {"symmetric": policy.symmetric, "vectors": policy.vectors}
            schemes[name] = make_scheme(shapes[name], bits, policy.block_size, **signs)
        return cls(schemes, method, kept=frozenset(own))

    def scheme(self, name: str) -> QuantScheme | None:
        """The scheme of a tensor; None keeps it float32, as all that are no matrices."""
        return self.schemes.get(name)

    def record(self, calibration_sha256: str | None = None, calibration_tokens: int = 0) -> PlanRecord:
        """The plan as a manifest holds it."""
        tensors = tuple(self._entry(name, scheme) for name, scheme in self.schemes.items())
        return PlanRecord(self.method, tensors, calibration_sha256, calibration_tokens, self.budget_bytes)

    def _entry(self, name: str, scheme: QuantScheme | None) -> PlannedTensor:
        cost = self.predicted.get(name)
        if scheme is None:
            return PlannedTensor(name, FLOAT_BITS, predicted_kl=cost)
        return PlannedTensor(name, scheme.bits, scheme.block_size, scheme.symmetric, cost)
