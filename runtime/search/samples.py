"""Parallel samples: several replies drawn side by side, each the very text that drawing it alone gives."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.search.branches import Branches
from edgeinfer.runtime.search.drawn import Drawn, draw_next
from edgeinfer.runtime.search.strategy import SearchParts, SearchStrategy
from edgeinfer.searching import SearchUse


class ParallelSamples(SearchStrategy):
    """Answers with reply 0; the others stand in the result."""

    lossless = True

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._replies: list[Drawn] = []
        self._prompt = 0  # its tokens
        self._given = 0  # tokens of reply 0
        self._branches: Branches | None = None

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """The first tokens of reply 0."""
        count, parts = self._config.samples, self._parts
        share = self._share(count, room)
        self._prompt = self._backend.cache.length
        samplers = [parts.sampler, *(parts.another_sampler(prompt, index) for index in range(1, count))]
        self._replies = [Drawn(sampler, parts.reply_text(prompt), share) for sampler in samplers]
        self._statistics.trials = count
        self._branches = Branches(self._passes)
        for reply in self._replies:
            reply.draw(logits, self._prompt)
        for reply in self._replies[1:]:
            reply.branch = self._branches.begin()
        # Last, as the others begin where the prompt ends.
        self._replies[0].branch = self._branches.begin_trunk()
        return self._give(self._branches, room)

    def next(self, room: int, lost: int) -> Sequence[int]:
        """The next tokens of reply 0."""
        assert self._branches is not None, "first comes before"
        return self._give(self._branches, self._given + room)

    def leave(self) -> None:
        """Drops the rows of other replies."""
        super().leave()
        self._branches = None
        for reply in self._replies:
            reply.branch = None

    def search_use(self) -> SearchUse:
        """What was done so far; replies that were cut off are told as far as they came."""
        self._texts = tuple(self._searched_text(reply.text, reply.score) for reply in self._replies)
        return super().search_use()

    def _give(self, branches: Branches, most: int) -> Sequence[int]:
        """What is certain of reply 0, of which its caller ends: its last token waits for the other replies.

        Args:
            most: tokens that reply 0 may have; as many as others only where others are done.
        """
        reply, others = self._replies[0], self._replies[1:]
        while True:
            fresh, ended = reply.text.tokens[self._given :], reply.text.ended or len(reply.text.tokens) >= most
            if fresh and ended and not all(other.over for other in others):
                fresh = fresh[:-1]
            if fresh:
                self._given += len(fresh)
                return fresh
            if all(other.over for other in others):
                reply.most = most
            for drawn in draw_next(self._replies, branches, self._prompt):
                if drawn.over and drawn is not reply:
                    drawn.leave(branches)  # its pages are others' now
