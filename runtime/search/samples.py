"""Parallel samples: several replies drawn side by side, each the very text that drawing it alone gives.

Where a backend evaluates several sequences in one pass, each reply is one, whose beginning they share. Elsewhere all
are in one cache, and a pass draws the next token of every reply, stretch by stretch. A row that has others' rows in
between is right up to rounding only, which now and then decides a draw. So these stretches are taken as guesses: each
is fed again behind its own text, many tokens to a pass, and what is drawn there is kept, with its rows. Where a guess
was wrong, the reply goes on from what was drawn instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.search.branches import Branch
from edgeinfer.runtime.search.forked_branches import ForkedBranches, branches_of, together_backend
from edgeinfer.runtime.search.strategy import SearchParts, SearchStrategy, logprob
from edgeinfer.runtime.text import ReplyText
from edgeinfer.searching import SearchUse

__all__ = ["ParallelSamples"]

# Tokens of a stretch, at first few as somebody waits for them, then more as every stretch copies all rows.
_FIRST, _LONGEST = 8, 64


@dataclass
class _Reply:
    """One of the replies.

    Attributes:
        most: tokens it may have.
        branch: of a reply that is a sequence of its own, until it is over.
        rows: else those of its tokens but the last, by the stretches they were fed in.
        guessed: tokens that were drawn side by side with others and not yet alone.
        score: sum of its tokens' log-probabilities.
    """

    sampler: Sampler
    text: ReplyText
    most: int
    branch: Branch | None = None
    rows: list[CacheSnapshot] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    score: float = 0.0

    @property
    def tokens(self) -> list[int]:
        return self.text.tokens

    @property
    def over(self) -> bool:
        return self.text.ended or len(self.tokens) >= self.most

    def draw(self, logits: Floats, prompt: int) -> int:  # (V,)
        """Its next token."""
        token = self.sampler.sample(logits, prompt + len(self.tokens))
        self.sampler.accept(token, logits)
        self.score += logprob(logits, token)
        self.text.push(token)
        return token


class ParallelSamples(SearchStrategy):
    """Answers with reply 0; the others stand in the result."""

    lossless = True

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._replies: list[_Reply] = []
        self._prompt = 0  # its tokens
        self._given = 0  # tokens of reply 0
        self._stretch = _FIRST
        self._together = together_backend(parts) if parts.backend.capabilities.exact else None
        self._branches: ForkedBranches | None = None

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """The first tokens of reply 0."""
        count, parts = self._config.samples, self._parts
        share = self._share(count, room)
        self._prompt = self._backend.cache.length
        samplers = [parts.sampler, *(parts.another_sampler(prompt, index) for index in range(1, count))]
        self._replies = [_Reply(sampler, parts.reply_text(prompt), share) for sampler in samplers]
        self._statistics.trials = count
        for reply in self._replies:
            reply.draw(logits, self._prompt)
        if self._together is not None:
            self._branches = ForkedBranches(self._passes, self._together)
            for reply in self._replies[1:]:
                reply.branch = self._branches.begin()
            # Last, as the others begin where the prompt ends.
            self._replies[0].branch = self._branches.begin_trunk()
        return self._give(room)

    def next(self, room: int, lost: int) -> Sequence[int]:
        """The next tokens of reply 0."""
        return self._give(self._given + room)

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

    def _give(self, most: int) -> Sequence[int]:
        """What is certain of reply 0, of which its caller ends: its last token waits for the other replies.

        Args:
            most: tokens that reply 0 may have; as many as others only where others are done.
        """
        reply, others = self._replies[0], self._replies[1:]
        while True:
            fresh, ended = reply.tokens[self._given :], reply.text.ended or len(reply.tokens) >= most
            waits = ended and not all(other.over for other in others)
            if fresh and waits:
                fresh = fresh[:-1]
            if fresh:
                self._given += len(fresh)
                if self._branches is None:
                    self._restore(self._given - 1)
                return fresh
            if all(other.over for other in others):
                reply.most = most
            live = [r for r in self._replies if not r.over]
            if self._branches is None:
                self._advance(live)
            else:
                self._step(self._branches, live)

    def _step(self, branches: ForkedBranches, live: Sequence[_Reply]) -> None:
        """Draws the next token of each of these replies."""
        fed = [(reply.branch, reply.tokens[-1:]) for reply in live if reply.branch is not None]
        for reply, logits in zip(live, branches.feed(fed), strict=True):
            reply.draw(logits, self._prompt)
            if reply.over and reply.branch is not None and reply is not self._replies[0]:
                branches.drop(reply.branch)  # its pages are others' now
                reply.branch = None

    def _advance(self, live: Sequence[_Reply]) -> None:
        """Draws a stretch of each of these replies."""
        self._reply_rows = self._prompt
        drawn = sum(len(reply.tokens) - 1 for reply in live)
        size = min(self._stretch, (self._backend.cache.capacity - self._prompt - drawn) // len(live))
        self._stretch = min(2 * self._stretch, _LONGEST)
        if len(live) > 1 and size > 1:
            self._guess(live, size)
        for reply in live:
            self._confirm(reply, size)

    def _guess(self, live: Sequence[_Reply], size: int) -> None:
        """Draws tokens of these replies side by side, none of them for certain."""
        self._backend.cache.trim(self._prompt)
        branches = branches_of(self._passes)
        going = [(branches.begin(rows=reply.rows), reply) for reply in live]
        for _ in range(size):
            rows = branches.feed([(branch, [*reply.tokens, *reply.guessed][-1:]) for branch, reply in going])
            for (_, reply), row in zip(going, rows, strict=True):
                place = self._prompt + len(reply.tokens) + len(reply.guessed)
                reply.guessed.append(reply.sampler.sample(row, place, reply.guessed))
            going = [(branch, reply) for branch, reply in going if self._guesses_on(reply)]
            if not going:
                break
        branches.end()

    def _guesses_on(self, reply: _Reply) -> bool:
        ended = reply.guessed[-1] in self._parts.stop_ids
        return not ended and len(reply.tokens) + len(reply.guessed) < reply.most

    def _confirm(self, reply: _Reply, size: int) -> None:
        """Draws a stretch of one reply as it is drawn alone, in passes over what was guessed."""
        self._load(reply)
        start = self._backend.cache.length
        if reply.guessed:
            fed = [reply.tokens[-1], *reply.guessed[:-1]]
            for row, guess in zip(self._passes.chain(fed), reply.guessed, strict=True):
                if reply.draw(row, self._prompt) != guess or reply.over:
                    break
            reply.guessed.clear()
        else:
            for _ in range(size):
                reply.draw(self._passes.feed(reply.tokens[-1]), self._prompt)
                if reply.over:
                    break
        self._backend.cache.trim(self._prompt + len(reply.tokens) - 1)
        reply.rows.append(self._backend.cache.snapshot(start))

    def _load(self, reply: _Reply) -> None:
        """Puts a reply's rows behind the prompt's."""
        self._backend.cache.trim(self._prompt)
        for piece in reply.rows:
            self._backend.cache.append(piece)

    def _restore(self, rows: int) -> None:
        """Leaves so many rows of reply 0 behind the prompt's."""
        self._load(self._replies[0])
        self._backend.cache.trim(self._prompt + rows)
        self._reply_rows = None
