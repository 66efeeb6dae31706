"""Drafting with a small model that is itself sped up by cheaper drafters.

SpecMQuant's hierarchy for quantized targets: the cheap drafters' tokens are verified by the small model, where rows
cost little, and the target verifies a short chain.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.runtime.speculation.drafters.contract import Context, Drafter, Guess, Round, State
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter

__all__ = ["HierarchicalDrafter"]

# With its last known token the model then takes four rows, which cost it little more than one.
_LOOK_AHEAD = 3


class HierarchicalDrafter(Drafter):
    """Guesses what its model guesses, in fewer of the model's passes.

    Args:
        model: the small model.
        cheap: drafters of the tokens that it verifies, the first wins ties. They and the model are this drafter's
            alone: no other tells them of rounds or closes them. The model's backend may be another drafter's too.
        look_ahead: most tokens that a pass of the model verifies.
    """

    name = "hierarchical"
    draws = True
    branches = True

    def __init__(self, model: ModelDrafter, cheap: Sequence[Drafter], look_ahead: int = _LOOK_AHEAD) -> None:
        self._model = model
        self._cheap = tuple(cheap)
        self._look_ahead = look_ahead
        self.priors = model.priors
        self.uses_target = any(drafter.uses_target for drafter in self._cheap)

    def begin(self, tokens: Sequence[int]) -> None:
        """Tells the model and the cheap drafters."""
        for drafter in self._members:
            drafter.begin(tokens)

    def guesses(self, context: Context, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """The model's guesses; where they are not known yet, one pass works out those of the cheap drafters' path."""
        if not self._model.knows(drafted):
            self._model.look_ahead(context, drafted, self._chain(context, drafted), width)
        return self._model.guesses(context, drafted, width)

    def _chain(self, context: Context, drafted: Sequence[int]) -> list[int]:
        """The most promising token of the cheap drafters, again and again."""
        path = [*drafted]
        while len(path) - len(drafted) < self._look_ahead:
            offers = [(d.priors[g.sign], g.token) for d in self._cheap for g in d.guesses(context, path, 1)]
            if not offers:
                break
            path.append(max(offers, key=lambda offer: offer[0])[1])
        return path[len(drafted) :]

    @property
    def _members(self) -> tuple[Drafter, ...]:
        return (self._model, *self._cheap)

    def observe(self, round: Round) -> None:
        """Tells the model and the cheap drafters."""
        for drafter in self._members:
            drafter.observe(round)

    def nbytes(self) -> int:
        """Bytes that the model and the cheap drafters hold."""
        return sum(drafter.nbytes() for drafter in self._members)

    def state(self) -> State:
        """What the cheap drafters keep, by their names."""
        return {f"{d.name}.{key}": value for d in self._cheap for key, value in d.state().items()}

    def restore(self, state: State) -> None:
        """Gives the cheap drafters back what is theirs; errors as theirs."""
        for drafter in self._cheap:
            prefix = f"{drafter.name}."
            drafter.restore({k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)})

    def close(self) -> None:
        """Closes the model and the cheap drafters."""
        for drafter in self._members:
            drafter.close()
