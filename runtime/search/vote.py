"""Self-consistency: of several replies drawn side by side, one that gives the answer that most of them give."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from edgeinfer.runtime.search.drawn import Drawn, DrawnWay

__all__ = ["Vote", "answer_of", "elect"]

_NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


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


class Vote(DrawnWay):
    """All replies are drawn to their ends, and their answers counted."""

    def _enough(self, replies: Sequence[Drawn]) -> bool:
        return False

    def _choose(self, replies: Sequence[Drawn]) -> int:
        answers = [answer_of(text.text, self._config.answer) for text in self._texts]
        return elect(answers, [reply.mean for reply in replies])
