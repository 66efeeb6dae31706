"""Small targets whose outcomes can all be listed: every draft that may be drawn, every verdict on it, by exact mass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.drafters.contract import Deciding, Draft, Guess, Probabilities, Verdict, Verifier

Path = tuple[int, ...]
Laws = Callable[[Path], Probabilities]
Siblings = Callable[
    [Path], Sequence[Probabilities | int]
]  # what the children of a path are: drawn from a distribution, or certain
Key = tuple[int, int]
Asked = tuple[Key, Path | None]  # the number asked for, and the place whose distribution was looked at last
_KEYED = -1  # the draw that stands for the one behind `token`
_FINE = 2.0**-20  # of the bisection


class _NumberNeededError(Exception):
    def __init__(self, key: Key) -> None:
        super().__init__(key)
        self.key = key


class TableTarget:
    """A target that knows its distributions by path and its numbers by depth and draw."""

    def __init__(self, draft: Draft, distributions: Laws, numbers: Callable[[int, int], float]) -> None:
        self._draft, self._laws, self._numbers = draft, distributions, numbers
        self.at: Path | None = None

    def token(self, node: int) -> int:
        depth = 0 if node < 0 else self._draft.depth(node) + 1
        cumulative = np.cumsum(self.probabilities(node))
        drawn = int(np.searchsorted(cumulative, self._numbers(depth, _KEYED), side="right"))
        return min(drawn, int(np.searchsorted(cumulative, cumulative[-1])))

    def probabilities(self, node: int) -> Probabilities:
        self.at = tuple(self._draft.path(node))
        return self._laws(self.at)

    def uniform(self, depth: int, draw: int) -> float:
        assert draw >= 0
        return self._numbers(depth, draw)

    def state(self, node: int) -> Floats:
        raise AssertionError("a table has no states")

    def may_follow(self, node: int) -> bool:
        return True


def random_laws(seed: int, size: int, sharpness: float = 1.0, zeros: int = 0) -> Laws:
    """A distribution for every path, some tokens impossible; always the same array, and not writeable."""

    @cache
    def probabilities(path: Path) -> Probabilities:
        rng = np.random.default_rng([seed, len(path), *path])
        weights = np.exp(sharpness * rng.normal(size=size))
        weights[rng.permutation(size)[:zeros]] = 0
        weights /= weights.sum()
        weights.flags.writeable = False
        return np.asarray(weights, np.float64)

    return probabilities


def make_draft(*nodes: tuple[int, int, Probabilities | None]) -> Draft:
    """A draft of (parent, token, distribution) nodes."""
    guesses = tuple(Guess(token, 0, probabilities) for _, token, probabilities in nodes)
    return Draft(guesses, tuple(parent for parent, _, _ in nodes), ("test",) * len(nodes))


def drafts(
    siblings: Siblings, depth: int, *, replacement: bool = False, repeats: bool = True
) -> Iterator[tuple[float, Draft]]:
    """Every draft of a depth that may be drawn, with its probability.

    Args:
        replacement: whether a token that an elder sibling has may be drawn again.
        repeats: whether it then stays in the draft.
    """

    def grow(
        weight: float, nodes: tuple[tuple[int, int, Probabilities | None], ...], waiting: tuple[tuple[int, int], ...]
    ) -> Iterator[tuple[float, Draft]]:
        draft = make_draft(*nodes)
        if not waiting:
            yield weight, draft
            return
        (parent, place), rest = waiting[0], waiting[1:]
        elders = [draft.guesses[node].token for node in draft.children(parent)]
        path = draft.path(parent)
        for uniform, token, probabilities in _options(siblings(tuple(path))[place], [] if replacement else elders):
            if token in elders and not repeats:
                yield from grow(weight * uniform, nodes, rest)
                continue
            deeper = siblings((*path, token)) if len(path) + 1 < depth else ()
            below = tuple((len(nodes), child) for child in range(len(deeper)))
            yield from grow(weight * uniform, (*nodes, (parent, token, probabilities)), rest + below)

    yield from grow(1.0, (), tuple((-1, place) for place in range(len(siblings(())))))


def _options(what: Probabilities | int, taken: list[int]) -> Iterator[tuple[float, int, Probabilities | None]]:
    if isinstance(what, int):
        yield 1.0, what, None
        return
    left = what.copy()
    left[taken] = 0
    for token in np.flatnonzero(left):
        yield float(left[token] / left.sum()), int(token), what


def settle(deciding: Deciding) -> Verdict:
    """What is decided, where the logits of every node are there."""
    while True:
        try:
            next(deciding)
        except StopIteration as done:
            verdict: Verdict = done.value
            return verdict


def verdicts(verify: Verifier, draft: Draft, distributions: Laws) -> dict[Verdict, float]:
    """Probability of every verdict. Each number's steps are found by bisection; each outcome must be one interval."""

    def run(numbers: Mapping[Key, float]) -> Verdict | Asked:
        def number(depth: int, draw: int) -> float:
            if (depth, draw) not in numbers:
                raise _NumberNeededError((depth, draw))
            return numbers[depth, draw]

        target = TableTarget(draft, distributions, number)
        try:
            return settle(verify(draft, target))
        except _NumberNeededError as need:
            return need.key, target.at

    def explore(numbers: dict[Key, float], outcome: Verdict | Asked, weight: float) -> None:
        if isinstance(outcome, Verdict):
            found[outcome] = found.get(outcome, 0.0) + weight
            return
        key, _ = outcome
        for next_outcome, (mass, place) in _steps(lambda u: run({**numbers, key: u})).items():
            explore({**numbers, key: place}, next_outcome, weight * mass)

    found: dict[Verdict, float] = {}
    explore({}, run({}), 1.0)
    return found


def _steps(outcome: Callable[[float], Verdict | Asked]) -> dict[Verdict | Asked, tuple[float, float]]:
    """Length of the interval of [0, 1) in which each outcome comes, and a number in it."""
    found: dict[Verdict | Asked, tuple[float, float]] = {}

    def split(low: float, at_low: Verdict | Asked, high: float, at_high: Verdict | Asked) -> None:
        if at_low == at_high or high - low < _FINE:
            found[at_low] = found.get(at_low, (0.0, low))[0] + high - low, low
            return
        middle = (low + high) / 2
        at_middle = outcome(middle)
        split(low, at_low, middle, at_middle)
        split(middle, at_middle, high, at_high)

    split(0.0, outcome(0.0), 1.0, outcome(1 - 2.0**-53))
    return found


def output_probabilities(
    verify: Verifier, drawn: Iterator[tuple[float, Draft]], distributions: Laws, length: int
) -> NDArray[np.float64]:
    """Distribution of the next `length` tokens, plain decoding going on where a verdict ends. (V,) * length"""
    size = len(distributions(()))
    probabilities = np.zeros((size,) * length)
    total = 0.0
    for weight, draft in drawn:
        total += weight
        for verdict, uniform in verdicts(verify, draft, distributions).items():
            end = verdict.accepted[-1] if verdict.accepted else -1
            text = (*draft.path(end), verdict.token)
            probabilities[text] += weight * uniform * plain_probabilities(distributions, length - len(text), text)
    assert abs(total - 1) < 1e-9, "drafts that do not add up"
    return probabilities


def plain_probabilities(distributions: Laws, length: int, path: Path = ()) -> NDArray[np.float64]:
    """Distribution of the next `length` tokens of plain decoding. (V,) * length"""
    if length == 0:
        return np.ones(())
    probabilities = distributions(path)
    further = [plain_probabilities(distributions, length - 1, (*path, token)) for token in range(len(probabilities))]
    return np.stack([p * rest for p, rest in zip(probabilities, further, strict=True)])


def lossless_error(verify: Verifier, drawn: Iterator[tuple[float, Draft]], distributions: Laws, depth: int) -> float:
    """By how much the probability of any text of depth + 1 tokens is off."""
    got = output_probabilities(verify, drawn, distributions, depth + 1)
    return float(np.abs(got - plain_probabilities(distributions, depth + 1)).max())


def check_lossless(verify: Verifier, drawn: Iterator[tuple[float, Draft]], distributions: Laws, depth: int) -> None:
    """The distribution of texts of depth + 1 tokens is that of plain decoding, to the precision of the bisection."""
    assert lossless_error(verify, drawn, distributions, depth) < 3e-5
