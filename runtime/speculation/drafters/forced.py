"""Drafts what a grammar or template leaves no choice about; knows nothing of grammars."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.runtime.speculation.contracts import Context, Guess, Resumption, Round, State

__all__ = ["ForcedDrafter"]


class ForcedDrafter:
    """Implements `contracts.Drafter`: proposes what `context.forced` says, whatever the model thinks."""

    name = "forced"
    uses_target = False
    branches = False
    draws = False
    # The target's own choice goes by the same constraint: of a closed list nothing else can come, of a grammar nothing
    # but another spelling of the same text, and how often that comes is learnt.
    priors: Sequence[float] = (0.999,)

    def begin(self, tokens: Sequence[int]) -> None:
        """Nothing to begin."""

    def guesses(self, context: Context, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """The token that must follow, or spells what must; or nothing."""
        forced = context.forced(drafted)
        return (Guess(forced[0], 0),) if forced else ()

    def resume(self, context: Context, drafted: Sequence[int]) -> Resumption | None:
        """Nothing: it does not use the target."""
        return None

    def observe(self, round: Round) -> None:
        """Nothing to learn."""

    def nbytes(self) -> int:
        """Holds nothing."""
        return 0

    def state(self) -> State:
        """Nothing to keep."""
        return {}

    def restore(self, state: State) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        """Nothing to free."""
