"""Drafting with a small model that is itself sped up by cheaper drafters.

SpecMQuant's hierarchy for quantized targets: a tree of the cheap drafters' tokens is verified by the small model, where
rows cost little, and the target verifies a short chain.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter, Guess, Round, State
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter

# With its last known token the model then takes four rows, which cost it little more than one. A tree of so many nodes
# takes fewer passes than a chain, and fewer rows in all; larger ones take few passes less for many rows (docs/log).
_LOOK_AHEAD = 3
# Guesses of a drafter for one place.
_SIBLINGS = 3


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

    def unread(self, context: DraftContext) -> int:
        """What the model has not read."""
        return self._model.unread(context)

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        """The model's guesses; where they are not known yet, one pass works out those of the cheap drafters' path."""
        if not self._model.knows(drafted):
            tokens, parents = self._tree(context, drafted)
            self._model.look_ahead(context, drafted, tokens, parents, width)
        return self._model.guesses(context, drafted, width)

    def _tree(self, context: DraftContext, drafted: Sequence[int]) -> tuple[list[int], list[int]]:
        """The cheap drafters' likeliest paths, a node at a time: tokens and parents, -1 being the last drafted one."""
        tokens, parents, paths = list[int](), list[int](), [list[int](drafted)]
        # Of each place that may be added: how unlikely it is, when it was found, its parent and its token.
        waiting: list[tuple[float, int, int, int]] = []
        found, node, likely = 0, -1, 1.0
        while len(tokens) < self._look_ahead:
            for prior, token in self._offers(context, paths[1 + node]):
                heapq.heappush(waiting, (-likely * prior, found, node, token))
                found += 1
            if not waiting:
                break
            unlikely, _, parent, token = heapq.heappop(waiting)
            node, likely = len(tokens), -unlikely
            tokens.append(token)
            parents.append(parent)
            paths.append([*paths[1 + parent], token])
        return tokens, parents

    def _offers(self, context: DraftContext, path: Sequence[int]) -> list[tuple[float, int]]:
        """What the cheap drafters say behind a path, each token once, the likeliest first."""
        offers: dict[int, float] = {}
        for drafter in self._cheap:
            wanted = _SIBLINGS if drafter.branches and self._model.verifies_trees else 1
            for guess in drafter.guesses(context, path, wanted):
                offers[guess.token] = max(offers.get(guess.token, 0.0), drafter.priors[guess.sign])
        ranked = sorted(((prior, token) for token, prior in offers.items()), key=lambda offer: -offer[0])
        return ranked if self._model.verifies_trees else ranked[:1]

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
