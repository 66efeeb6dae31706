"""Several replies drawn side by side: all of them, or one: the first to end, the likeliest, or most agreed with."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchMethod, SearchParts, SearchStrategy, logprob
from edgeinfer.runtime.text.streaming import ReplyText

_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


@dataclass
class Drawn:
    sampler: Sampler
    text: ReplyText
    most: int  # tokens it may have
    branch: Branch | None = None  # that it is drawn in, until it is over
    score: float = 0.0  # sum of its tokens' log-probabilities

    @property
    def mean(self) -> float:
        """Mean log-probability of its tokens."""
        return self.score / len(self.text.tokens)

    @property
    def over(self) -> bool:
        """Whether it has ended, or all of its tokens."""
        return self.text.ended or len(self.text.tokens) >= self.most

    def draw(self, logits: Floats, prompt: int) -> None:  # (V,)
        """Draw its next token behind a prompt of so many."""
        token = self.sampler.sample(logits, prompt + len(self.text.tokens))
        self.sampler.accept(token, logits)
        self.score += logprob(logits, token)
        self.text.push(token)

    def leave(self, branches: Branches) -> None:
        """Its branch's rows make room."""
        if self.branch is not None:
            branches.drop(self.branch)
            self.branch = None


def draw_next(replies: Sequence[Drawn], branches: Branches, prompt: int) -> Passes[list[Drawn]]:
    """Draw the next token of each reply that is not over, and give these."""
    live = [reply for reply in replies if not reply.over]
    fed = [(reply.branch, reply.text.tokens[-1:]) for reply in live if reply.branch is not None]
    for reply, row in zip(live, (yield from branches.feed(fed)), strict=True):
        reply.draw(row, prompt)
    return live


class ParallelSamples(SearchStrategy):
    """Answers with reply 0; the others stand in the result."""

    lossless = True

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._replies: list[Drawn] = []
        self._prompt = 0  # its tokens
        self._given = 0  # tokens of reply 0
        self._branches: Branches | None = None

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        count, parts = self._config.samples, self._parts
        share = self._share(count, room)
        self._prompt = self._cache.length
        samplers = [parts.sampler, *(parts.another_sampler(prompt, index) for index in range(1, count))]
        self._replies = [Drawn(sampler, parts.reply_text(prompt), share) for sampler in samplers]
        self.search.trials = count
        self._branches = Branches(self._feeder)
        for reply in self._replies:
            reply.draw(logits, self._prompt)
        for reply in self._replies[1:]:
            reply.branch = self._branches.begin()
        # Last, as the others begin where the prompt ends.
        self._replies[0].branch = self._branches.begin_trunk()
        return (yield from self._give(self._branches, room))

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        assert self._branches is not None, "first comes before"
        return (yield from self._give(self._branches, self._given + room))

    def leave(self) -> None:
        self._branches = None
        for reply in self._replies:
            reply.branch = None

    def finish(self) -> None:
        """Tell of all replies; of those that were cut off, as far as they came."""
        self.search.texts = tuple(self._searched_text(reply.text, reply.score) for reply in self._replies)

    def _give(self, branches: Branches, most: int) -> Passes[Sequence[int]]:
        """What is certain of reply 0, of which its caller ends: its last token waits for the other replies."""
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
            for drawn in (yield from draw_next(self._replies, branches, self._prompt)):
                if drawn.over and drawn is not reply:
                    drawn.leave(branches)  # its pages are others' now


class DrawnSearch(SearchStrategy):
    """Draws replies until enough is known, and answers with one of them. Replies are drawn side by side, and the one
    that is chosen is then fed once more, alone."""

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        count, parts = self._config.samples, self._parts
        limit, first_logits = self._share(count, room), logits.copy()
        # The reply's own sampler follows only the one that is chosen.
        samplers = (parts.another_sampler(prompt, index) for index in range(count))
        replies = [Drawn(sampler, parts.reply_text(prompt), limit) for sampler in samplers]
        branches = Branches(self._feeder)
        for reply in replies:
            reply.draw(first_logits, len(prompt))
            reply.branch = branches.begin()
        while not all(reply.over for reply in replies) and not self._enough(replies):
            for reply in (yield from draw_next(replies, branches, len(prompt))):
                if reply.over:
                    reply.leave(branches)
        branches.end()
        self.search.texts = tuple(self._searched_text(reply.text, reply.score) for reply in replies)
        self.search.trials = count
        self.search.chosen = self._choose(replies)
        return (yield from self._take(replies[self.search.chosen].text.tokens, first_logits))

    def _enough(self, replies: Sequence[Drawn]) -> bool:
        """Whether no more needs to be drawn before all are over."""
        return False

    @abstractmethod
    def _choose(self, replies: Sequence[Drawn]) -> int:
        """Index of the reply to answer with."""


class FirstFinish(DrawnSearch):
    """The first to end; of several that end together, and where none does, that of the likeliest tokens."""

    def _enough(self, replies: Sequence[Drawn]) -> bool:
        return any(reply.text.ended for reply in replies)

    def _choose(self, replies: Sequence[Drawn]) -> int:
        return max(range(len(replies)), key=lambda index: (replies[index].text.ended, replies[index].mean))


class BestOf(DrawnSearch):
    """The reply of the likeliest tokens: of the highest mean log-probability."""

    def _choose(self, replies: Sequence[Drawn]) -> int:
        return max(range(len(replies)), key=lambda index: replies[index].mean)


def answer_of(text: str, kind: str) -> str:
    """What of a text is counted, by one of `searching.ANSWERS`: white space, capitals and punctuation at the end make
    no difference. A text without a number has its last line for an answer."""
    lines = [line for line in text.splitlines() if line.strip()]
    if kind == "number" and (numbers := _NUMBER.findall(text)):
        return str(numbers[-1]).replace(",", "")
    chosen = text if kind == "text" else lines[-1] if lines else ""
    return " ".join(chosen.split()).casefold().rstrip(".,;:!?…\"')]} ")


def most_steps(texts: Sequence[str], count: int) -> list[int]:
    """Indices of so many texts of the most lines, ascending; of those with as many, the first (arXiv 2210.00720)."""
    steps = [sum(1 for line in text.splitlines() if line.strip()) for text in texts]
    return sorted(sorted(range(len(texts)), key=lambda index: -steps[index])[:count])


def elect(answers: Sequence[str], means: Sequence[float]) -> int:
    """Index of the likeliest reply with the commonest answer; ties go to the answer likelier in mean."""
    voters: defaultdict[str, list[int]] = defaultdict(list)
    for index, answer in enumerate(answers):
        voters[answer].append(index)
    won = max(voters.values(), key=lambda group: (len(group), sum(means[index] for index in group) / len(group)))
    return max(won, key=lambda index: means[index])


class Vote(DrawnSearch):
    """All replies are drawn to their ends, and their answers counted, or those of the replies of the most lines."""

    def _choose(self, replies: Sequence[Drawn]) -> int:
        texts = [text.text for text in self.search.texts]
        voters = most_steps(texts, self._config.voters or len(texts))
        answers = [answer_of(texts[index], self._config.answer) for index in voters]
        return voters[elect(answers, [replies[index].mean for index in voters])]


METHODS = (
    SearchMethod(
        name="samples",
        help="several replies at once, each the text that it has alone",
        make=ParallelSamples,
        draws="always",
        thinks=True,
        order=0,
    ),
    SearchMethod(
        name="first-finish", help="the first of several to end", make=FirstFinish, draws="always", thinks=True, order=10
    ),
    SearchMethod(name="best-of", help="the likeliest of several", make=BestOf, draws="always", thinks=True, order=20),
    SearchMethod(
        name="vote", help="the most common answer of several", make=Vote, draws="always", thinks=True, order=30
    ),
)
