"""Sampled text over many rounds against plain decoding's distribution: thousands of texts by every stochastic rule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy.special import gammaincc

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.speculation.drafters.contract import Draft, Guess, Probabilities
from edgeinfer.runtime.speculation.verification.rule import find_verification
from tests.runtime.speculation.verification.enumeration import plain_probabilities, random_laws

Path = tuple[int, ...]
Node = tuple[int, int, Probabilities | None]
Drafting = Callable[[np.random.Generator, Path], list[Node]]

LENGTH, SIZE, DRAWS = 2, 4, 5
TARGET, DRAFTER = random_laws(51, SIZE), random_laws(52, SIZE)


class NumberedTarget:
    """A target after some text, with a number for each position and draw."""

    def __init__(self, draft: Draft, text: Path, numbers: list[float]) -> None:
        self._draft, self._text, self._numbers = draft, text, numbers

    def token(self, node: int) -> int:
        raise AssertionError("rules by ratio leave the keyed choice alone")

    def probabilities(self, node: int) -> Probabilities:
        return TARGET((*self._text, *self._draft.path(node)))

    def uniform(self, depth: int, draw: int) -> float:
        return self._numbers[(len(self._text) + depth) * DRAWS + draw]

    def state(self, node: int) -> Floats:
        raise AssertionError("rules by ratio read no states")

    def may_follow(self, node: int) -> bool:
        raise AssertionError("rules by ratio ask for probabilities")


@cache
def cumulative(text: Path) -> list[float]:
    return [float(edge) for edge in DRAFTER(text).cumsum()[:-1]]


def draw(rng: np.random.Generator, text: Path) -> int:
    return bisect_right(cumulative(text), rng.random())


def different(rng: np.random.Generator, probabilities: Probabilities, count: int) -> list[int]:
    """Gumbel top-k: tokens of a distribution without replacement, in order of the perturbed values."""
    perturbed = np.log(probabilities) + rng.gumbel(size=SIZE)
    return [int(token) for token in perturbed.argsort()[: -count - 1 : -1]]


def chain(rng: np.random.Generator, text: Path, length: int = 2, size: int = 0) -> list[Node]:
    nodes: list[Node] = []
    parent = -1
    for _ in range(length):
        probabilities = DRAFTER(text)
        nodes.append((parent, draw(rng, text), probabilities))
        text, parent, size = (*text, nodes[-1][1]), size, size + 1
    return nodes


def tree(rng: np.random.Generator, text: Path, width: int = 2) -> list[Node]:
    probabilities = DRAFTER(text)
    nodes: list[Node] = [(-1, token, probabilities) for token in different(rng, probabilities, width)]
    below = DRAFTER((*text, nodes[0][1]))
    return nodes + [(0, token, below) for token in different(rng, below, 2)]


def mixed(rng: np.random.Generator, text: Path) -> list[Node]:
    """A certain guess between drawn ones, repetitions dropped."""
    probabilities = DRAFTER(text)
    first, second = different(rng, probabilities, 2)
    nodes: list[Node] = [(-1, first, probabilities)]
    if first != 1:
        nodes.append((-1, 1, None))
    if second != 1:
        nodes.append((-1, second, probabilities))
    below = DRAFTER((*text, first))
    return [*nodes, (0, 0, None), (0, draw(rng, (*text, first)), below)]


each_way = pytest.mark.parametrize(
    ("name", "drafting"),
    [
        ("rejection", chain),
        ("rejection", tree),
        ("rejection", lambda rng, text: tree(rng, text, 3)),
        ("rejection", mixed),
    ],
    ids=["chain", "two siblings", "three siblings", "mixed siblings"],
)


def check_distribution(name: str, drafting: Drafting, texts: int) -> None:
    """Chi-square of so many texts; false of one right rule in ten thousand, however many they are."""
    rng = np.random.default_rng(53)
    numbers = rng.random((texts, (LENGTH + 3) * DRAWS))
    verify = find_verification(name).verify
    seen = np.zeros((SIZE,) * LENGTH)
    rounds = 0
    for row in numbers:
        text, mine = Path(), row.tolist()
        while len(text) < LENGTH:
            nodes = drafting(rng, text)
            draft = Draft(
                tuple([Guess(token, 0, probabilities) for _, token, probabilities in nodes]),
                tuple([parent for parent, _, _ in nodes]),
                ("test",) * len(nodes),
            )
            verdict = verify(draft, NumberedTarget(draft, text, mine))
            text = (*text, *(nodes[node][1] for node in verdict.accepted), verdict.token)
            rounds += 1
        seen[text[:LENGTH]] += 1
    expected = texts * plain_probabilities(TARGET, LENGTH)
    chi = float(((seen - expected) ** 2 / expected).sum())
    assert expected.min() > 5
    assert gammaincc((seen.size - 1) / 2, chi / 2) > 1e-4
    assert texts < rounds < 0.9 * texts * LENGTH


@each_way
def test_texts_are_distributed_as_plain_decoding(name: str, drafting: Drafting) -> None:
    check_distribution(name, drafting, 5_000)


@pytest.mark.slow
@each_way
def test_tens_of_thousands_of_texts_are_distributed_as_plain_decoding(name: str, drafting: Drafting) -> None:
    check_distribution(name, drafting, 50_000)
