"""Whether an engine's replies are those of the model: a reference reads them token by token; knows no other engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.apps.bench.driver import Worker

__all__ = ["LEAST_AGREEMENT", "Judge", "Verdict"]

# Of the tokens of its replies, what an engine must share with the reference for its speed to count.
LEAST_AGREEMENT = 0.8


@dataclass(frozen=True)
class Verdict:
    """Of one or several replies: how many of their tokens the reference would have chosen."""

    agreeing: int = 0
    tokens: int = 0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(self.agreeing + other.agreeing, self.tokens + other.tokens)

    @property
    def share(self) -> float:
        """Of the tokens."""
        return self.agreeing / self.tokens if self.tokens else 0.0

    @property
    def good(self) -> bool:
        """Whether speed counts."""
        return self.share >= LEAST_AGREEMENT


class Judge:
    """The reference in a process of its own, which runs only while it is asked something new.

    At each place of a reply it is given what stands before, so that one other token does not spoil the rest.

    Args:
        kind: of worker.ENGINES; it can `judge`.
        options: of that engine.
        tolerance: how far a token may be from the likeliest and still agree, see `TransformersEngine.judge`.
        python: the interpreter that has it; None is this one.
    """

    def __init__(self, kind: str, options: Mapping[str, Any], tolerance: float, python: str | None) -> None:
        self._kind, self._options, self._python = kind, options, python
        self._tolerance = tolerance
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}

    def verdicts(self, replies: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Verdict]:
        """Of each pair of a prompt and a reply to it.

        Raises:
            BackendError: the reference failed.
        """
        asked = [(tuple(prompt), tuple(reply)) for prompt, reply in replies]
        new = [each for each in dict.fromkeys(asked) if each not in self._known]
        if new:
            with Worker(self._kind, self._options, self._python) as worker:
                for prompt, reply in new:
                    far = worker.ask("judge", prompt=prompt, reply=reply)
                    agreeing = sum(distance <= self._tolerance for distance in far)
                    self._known[prompt, reply] = Verdict(agreeing, len(far))
        return [self._known[each] for each in asked]
