"""Drafting for texts that are decoded side by side: what a draft costs them all, and the drafters of each text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.speculation.controller import Acceptance, DraftController, RoundCosts
from edgeinfer.runtime.speculation.drafters.contract import Drafter

# Plain steps after which it is looked again how many texts share the passes.
_LOOK = 16
# How likely a draft's tokens are at best. By c(m) eight texts of a 0.5B would gain 3% by drafts that are always right,
# and lose by asking for them where they are not.
_LIKELIEST = 0.95


class BatchCosts:
    """Implements `controller.RoundCosts` for one of several texts that share each pass. A plain step costs a text its
    share of the common pass. Its drafts come on top: the others wait for all that their rows and their making take. So
    a draft pays by these costs where it raises the tokens per millisecond of all."""

    def __init__(self, costs: RoundCosts, texts: int) -> None:
        self._costs = costs
        self._others = texts - 1
        self._plain_ms = costs.pass_ms(texts)

    def pass_ms(self, rows: int) -> float:
        """The share of a plain pass, and what drafted rows add to it."""
        more = self._costs.pass_ms(self._others + rows) - self._plain_ms
        return self._plain_ms / (self._others + 1) + more

    def guess_ms(self, drafter: str) -> float:
        return self._costs.guess_ms(drafter)

    def read_ms(self, drafter: str) -> float:
        """Reading one token of the text before a guess."""
        return self._costs.read_ms(drafter)

    @property
    def round_ms(self) -> float:
        """What a round costs besides its pass and its guesses."""
        return self._costs.round_ms

    @property
    def confirmed(self) -> int:
        """Rows of the text's own in the largest pass that this session has run often."""
        return max(1, self._costs.confirmed - self._others)


class BatchController(DraftController):
    """Decides as its base does, by what drafts cost when so many texts share passes."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: RoundCosts,
        acceptance: Acceptance,
        most: int,
        width: int,
        texts: Callable[[], int],
    ) -> None:
        self._alone, self._count, self._texts = costs, texts, max(1, texts())
        super().__init__(drafters, BatchCosts(costs, self._texts), acceptance, most, width)

    @property
    def rest(self) -> int:
        """Plain steps before a drafter is asked, or before it is looked again how many texts there are."""
        if (texts := max(1, self._count())) != self._texts:
            self._texts = texts
            self._reprice(BatchCosts(self._alone, texts))
        return min(super().rest, _LOOK) if self.asks else _LOOK

    @property
    def asks(self) -> bool:
        """Whether a draft can pay among as many texts as there are, if most of it is right."""
        expected = itertools.accumulate(_LIKELIEST**depth for depth in range(len(self._pass_ms)))  # tokens of a round
        plain = next(expected) / self._pass_ms[0]
        return any(
            tokens / (ms + self._asking_ms) > plain for tokens, ms in zip(expected, self._pass_ms[1:], strict=True)
        )


class SequenceDrafting:
    """Drafters for the texts of one of several sequences."""

    def __init__(self, cache: KVCache, texts: Callable[[], int]) -> None:
        self._cache, self.texts = cache, texts
        self._drafters: dict[str, tuple[Drafter, Drafter | None]] = {}

    def of_sequence(self, drafters: Sequence[Drafter]) -> list[Drafter]:
        """The sequence's own of these drafters, without those that cannot serve several sequences."""
        for drafter in drafters:
            if self._drafters.get(drafter.name, (None,))[0] is not drafter:
                self._drafters[drafter.name] = drafter, drafter.for_sequence(self._cache)
        found = [self._drafters[drafter.name][1] for drafter in drafters]
        return [own for own in found if own is not None]

    def nbytes(self) -> int:
        """Bytes that the sequence's drafters hold of their own."""
        return sum(own.nbytes() for _, own in self._drafters.values() if own is not None)
