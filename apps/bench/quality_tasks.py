"""Questions with one right answer, put to a model; knows nothing of where they come from or what their scores mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.apps.bench.prompts import Message, Prompt
from edgeinfer.errors import TemplateError
from edgeinfer.results import Result

__all__ = ["Answers", "TaskScore", "score_tasks"]

# A reply that says more than the answer is wrong: these many tokens show that it does.
_BEYOND = 4


@dataclass(frozen=True)
class TaskScore:
    """Replies to the questions of one kind.

    Attributes:
        right: replies that are the answer, letter for letter.
        of: questions.
        tokens_right: of the answers' tokens, those that are likeliest after the right ones before them: what a reply
            would have right had each of its mistakes been put right at once.
        tokens: of all answers.
    """

    right: int
    of: int
    tokens_right: int
    tokens: int

    def __add__(self, other: TaskScore) -> TaskScore:
        return TaskScore(
            self.right + other.right,
            self.of + other.of,
            self.tokens_right + other.tokens_right,
            self.tokens + other.tokens,
        )


class Answers(Protocol):
    """The part of a model that answers."""

    @property
    def context(self) -> int:
        """Tokens of prompt plus reply."""

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """Token ids of a text."""

    def tokenize_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation; TemplateError where the model has no chat template."""

    def generate(self, prompt: Sequence[int], *, max_tokens: int) -> Result:
        """The likeliest continuation."""

    def logits(self, tokens: Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """Arrays of a few rows each, which the next may overwrite: (R, V)."""


def score_tasks(model: Answers, prompts: Sequence[Prompt], told: Callable[[], None]) -> dict[str, TaskScore]:
    """Scores by category; none of a model without a chat template, which was not made to answer.

    A question that the context has no room for, answer included, counts as answered wrongly.

    Args:
        prompts: with answers.
        told: called with every reply.
    """
    scores: dict[str, TaskScore] = {}
    for prompt in prompts:
        assert prompt.answer is not None, "only prompts with answers are tasks"
        try:
            ids = model.tokenize_chat(prompt.messages)
        except TemplateError:
            return {}
        score = _score(model, ids, prompt.answer.strip())
        scores[prompt.category] = scores.get(prompt.category, TaskScore(0, 0, 0, 0)) + score
        told()
    return scores


def _score(model: Answers, ids: Sequence[int], answer: str) -> TaskScore:
    wanted = model.tokenize(answer, parse_special=False)
    if len(ids) + len(wanted) + _BEYOND > model.context:
        return TaskScore(0, 1, 0, len(wanted))
    reply = model.generate(ids, max_tokens=len(wanted) + _BEYOND).text
    likeliest = np.concatenate([rows.argmax(axis=1) for rows in model.logits([*ids, *wanted])])
    foreseen = likeliest[len(ids) - 1 : -1] == np.array(wanted)
    return TaskScore(int(reply.strip() == answer), 1, int(foreseen.sum()), len(wanted))
