"""Several replies drawn side by side to their ends, and the reply that one of them becomes; chooses none itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.sampling import TokenChooser
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.contract import Reader
from edgeinfer.runtime.search.scores import logprob
from edgeinfer.runtime.search.way import Way

__all__ = ["Drawn", "DrawnWay"]


@dataclass
class Drawn:
    """One of the replies.

    Attributes:
        score: sum of its tokens' log-probabilities.
    """

    chooser: TokenChooser
    reader: Reader
    score: float = 0.0

    @property
    def mean(self) -> float:
        """Mean log-probability of its tokens."""
        return self.score / len(self.reader.tokens)

    def draw(self, logits: Floats, place: int) -> None:  # (V,)
        """Its next token."""
        token = self.chooser.token(logits, place)
        self.chooser.accept(token, logits)
        self.score += logprob(logits, token)
        self.reader.push(token)


class DrawnWay(Way):
    """Draws replies until enough is known, and answers with one of them.

    Replies are drawn in passes that feed all of them, and the one that is chosen is then fed once more, alone.
    """

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """The whole reply."""
        limit = self._share(self._config.samples, room)
        begun, replies = logits.copy(), self._begin(prompt)
        self._settled = self._backend.cache.length
        branches = Branches(self._parts, self._tally)
        live: list[tuple[Branch, Drawn]] = []
        for reply in replies:
            reply.draw(begun, len(prompt))
            live.append((branches.begin(), reply))
        for length in range(1, limit):
            live = [(branch, reply) for branch, reply in live if self._goes_on(branches, branch, reply)]
            if not live or self._enough(replies):
                break
            rows = branches.feed([(branch, reply.reader.tokens[-1:]) for branch, reply in live])
            for (_, reply), row in zip(live, rows, strict=True):
                reply.draw(row, len(prompt) + length)
        branches.end()
        self._settled = None
        self._texts = tuple(self._told(reply.reader, reply.score) for reply in replies)
        self._tally.trials = len(replies)
        self._chosen = self._choose(replies)
        return self._take(replies[self._chosen].reader.tokens, begun)

    def next(self, room: int, lost: int) -> tuple[int]:
        """Where the context had no room for as much of all of them: the reply goes on alone."""
        return self._plain()

    def _begin(self, prompt: Sequence[int]) -> list[Drawn]:
        # The reply's own chooser is told only of the one that is chosen.
        count = range(self._config.samples)
        return [Drawn(self._parts.another_chooser(prompt, index), self._parts.reader(prompt)) for index in count]

    @staticmethod
    def _goes_on(branches: Branches, branch: Branch, reply: Drawn) -> bool:
        if reply.reader.ended:
            branches.drop(branch)
        return not reply.reader.ended

    @abstractmethod
    def _enough(self, replies: Sequence[Drawn]) -> bool:
        """Whether no more needs to be drawn."""

    @abstractmethod
    def _choose(self, replies: Sequence[Drawn]) -> int:
        """Index of the reply to answer with."""
