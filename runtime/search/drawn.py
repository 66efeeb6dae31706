"""Several replies drawn side by side, and the one that answers: the first to end, or the one most agree with."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence

from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.forked_branches import branches_of
from edgeinfer.runtime.search.strategy import SearchStrategy, logprob
from edgeinfer.runtime.text import ReplyText

__all__ = ["FirstFinish", "Vote", "answer_of", "elect"]

_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


@dataclass
class Drawn:
    """A reply that is drawn.

    Attributes:
        score: sum of its tokens' log-probabilities.
    """

    sampler: Sampler
    text: ReplyText
    score: float = 0.0

    @property
    def mean(self) -> float:
        """Mean log-probability of its tokens."""
        return self.score / len(self.text.tokens)

    def draw(self, logits: Floats, place: int) -> None:  # (V,)
        """Draws its next token."""
        token = self.sampler.sample(logits, place)
        self.sampler.accept(token, logits)
        self.score += logprob(logits, token)
        self.text.push(token)


class DrawnSearch(SearchStrategy):
    """Draws replies until enough is known, and answers with one of them.

    Replies are drawn in passes that feed all of them, and the one that is chosen is then fed once more, alone.
    """

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """The whole reply."""
        limit = self._share(self._config.samples, room)
        first_logits, replies = logits.copy(), self._begin(prompt)
        self._reply_rows = self._backend.cache.length
        branches = branches_of(self._passes)
        live: list[tuple[Branch, Drawn]] = []
        for reply in replies:
            reply.draw(first_logits, len(prompt))
            live.append((branches.begin(), reply))
        for length in range(1, limit):
            live = [(branch, reply) for branch, reply in live if self._goes_on(branches, branch, reply)]
            if not live or self._enough(replies):
                break
            rows = branches.feed([(branch, reply.text.tokens[-1:]) for branch, reply in live])
            for (_, reply), row in zip(live, rows, strict=True):
                reply.draw(row, len(prompt) + length)
        branches.end()
        self._reply_rows = None
        self._texts = tuple(self._searched_text(reply.text, reply.score) for reply in replies)
        self._statistics.trials = len(replies)
        self._chosen = self._choose(replies)
        return self._take(replies[self._chosen].text.tokens, first_logits)

    def next(self, room: int, lost: int) -> tuple[int]:
        """Where the context had no room for as much of all of them: the reply goes on alone."""
        return self._plain_step()

    def _begin(self, prompt: Sequence[int]) -> list[Drawn]:
        # The reply's own sampler is told only of the one that is chosen.
        count = range(self._config.samples)
        return [Drawn(self._parts.another_sampler(prompt, index), self._parts.reply_text(prompt)) for index in count]

    @staticmethod
    def _goes_on(branches: Branches, branch: Branch, reply: Drawn) -> bool:
        if reply.text.ended:
            branches.drop(branch)
        return not reply.text.ended

    @abstractmethod
    def _enough(self, replies: Sequence[Drawn]) -> bool:
        """Whether no more needs to be drawn."""

    @abstractmethod
    def _choose(self, replies: Sequence[Drawn]) -> int:
        """Index of the reply to answer with."""


class FirstFinish(DrawnSearch):
    """The first to end; of several that end together, and where none does, that of the likeliest tokens."""

    def _enough(self, replies: Sequence[Drawn]) -> bool:
        return any(reply.text.ended for reply in replies)

    def _choose(self, replies: Sequence[Drawn]) -> int:
        return max(range(len(replies)), key=lambda index: (replies[index].text.ended, replies[index].mean))


def answer_of(text: str, kind: str) -> str:
    """What of a text is counted: white space, capitals and punctuation at the end make no difference.

    Args:
        kind: one of `searching.ANSWERS`. A text without a number has its last line for an answer.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if kind == "number" and (numbers := _NUMBER.findall(text)):
        return str(numbers[-1]).replace(",", "")
    chosen = text if kind == "text" else lines[-1] if lines else ""
    return " ".join(chosen.split()).casefold().rstrip(".,;:!?…\"')]} ")


def elect(answers: Sequence[str], means: Sequence[float]) -> int:
    """Index of the likeliest reply among those with the commonest answer; of answers as common, the likelier in mean.

    Args:
        means: mean log-probability of each reply's tokens.
    """
    voters: defaultdict[str, list[int]] = defaultdict(list)
    for index, answer in enumerate(answers):
        voters[answer].append(index)
    won = max(voters.values(), key=lambda group: (len(group), sum(means[index] for index in group) / len(group)))
    return max(won, key=lambda index: means[index])


class Vote(DrawnSearch):
    """All replies are drawn to their ends, and their answers counted."""

    def _enough(self, replies: Sequence[Drawn]) -> bool:
        return False

    def _choose(self, replies: Sequence[Drawn]) -> int:
        answers = [answer_of(text.text, self._config.answer) for text in self._texts]
        return elect(answers, [reply.mean for reply in replies])
