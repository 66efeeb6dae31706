"""Drafting with fewer of the target's experts for each token; knows nothing of how experts are stored or fetched.

The expert axis of ELMoE-3D's elastic self-speculation: same weights, same routers, but each token uses `count` experts
instead of the model's own number, and, with a bias, only those that the bias allows.
"""

from __future__ import annotations

from collections.abc import Callable

from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ExpertChoice, ForwardInput, require
from edgeinfer.runtime.speculation.drafters.self_drafter import SelfDrafter

__all__ = ["ExpertsDrafter", "ResidentDrafter", "fewer_experts"]


def fewer_experts(target: Backend) -> int:
    """How many experts to draft with where nothing else is said: half of the model's own number, or what is next to it.

    Raises:
        CapabilityError: the target cannot use fewer.
    """
    counts = target.capabilities.expert_counts
    require(len(counts) > 1, target, "use fewer experts with this model", "Choose another drafter.")
    half = max(1, counts[-1] // 2)
    return max((count for count in counts if count <= half), default=counts[0])


class ExpertsDrafter(SelfDrafter):
    """Implements `contracts.Drafter`.

    Args:
        target: must be able to use fewer experts.
        count: of experts for each token; None takes `fewer_experts`.

    Raises:
        CapabilityError: the target cannot use fewer.
        UsageError: it cannot use so many or so few.
    """

    name = "experts"

    def __init__(self, target: Backend, count: int | None = None) -> None:
        usual = fewer_experts(target)
        self._count = usual if count is None else count
        counts = target.capabilities.expert_counts
        if self._count not in counts:
            message = f"This model cannot draft with {count} experts for each token."
            raise UsageError(message, f"Choose one of {', '.join(map(str, counts))} (--draft-experts).")
        super().__init__(target)

    def _run(self, tokens: Ints, positions: Ints, rows: Ints) -> Floats:
        return self._target.forward(ForwardInput(tokens, positions, rows, experts=self._choice())).logits

    def _choice(self) -> ExpertChoice:
        return ExpertChoice(self._count)


class ResidentDrafter(ExpertsDrafter):
    """Drafts with experts that are in memory, so that drafting fetches none.

    Args:
        bias: tells which are, as `ExpertChoice` takes it; asked before every pass.
        count: as `ExpertsDrafter` takes it.

    Raises:
        CapabilityError, UsageError: as `ExpertsDrafter`.
    """

    name = "resident"

    def __init__(self, target: Backend, bias: Callable[[], Floats], count: int | None = None) -> None:
        super().__init__(target, count)
        self._bias = bias

    def _choice(self) -> ExpertChoice:
        return ExpertChoice(self._count, self._bias())
