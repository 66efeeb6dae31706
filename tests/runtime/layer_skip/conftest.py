"""A large and a small model of random weights, and replies that note what they were drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.options.reply import GenerationConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.layer_skip.strategy import ReducedDecoding, StrategyArguments, feed, whole_pass
from edgeinfer.runtime.sampling.distributions import Logits
from edgeinfer.runtime.sampling.sampler import Sampler
from tests.runtime.speculation.drafters.models import export, make_backend

PROMPT = [5, 17, 80, 3, 44, 210, 9, 9, 101, 33]
MOST = 20


class Greedy(Sampler):
    """Takes the likeliest token and notes the logits it was taken from."""

    def __init__(self) -> None:
        self.logits: list[Floats] = []

    def sample(self, logits: Logits, position: int, path: Sequence[int] = ()) -> int:
        assert position == len(PROMPT) + len(self.logits)
        return int(logits.argmax())

    def accept(self, token: int, logits: Logits) -> None:
        self.logits.append(logits.copy())


class Script:
    """A policy that says whose turn it is, and notes the entropies."""

    def __init__(self, turns: Sequence[bool]) -> None:
        self._turns = list(turns)
        self.entropies: list[float] = []

    def seen(self, entropy: float) -> None:
        self.entropies.append(entropy)

    def large(self) -> bool:
        return self._turns.pop(0)


def given(backend: Backend, sampler: Greedy, *, chunk: int = 16, **options: Any) -> StrategyArguments:
    return StrategyArguments(backend, sampler, GenerationConfig(**options), chunk, 16, 2.0)


def reply(engine: Engine, steps: ReducedDecoding | None, sampler: Greedy, most: int = MOST) -> list[int]:
    """Tokens of a reply; afterwards the cache holds whole rows of the first tokens, as the engine believes."""
    made = [
        step.token for step in engine.generate(PROMPT, sampler, max_tokens=most, stop_ids=frozenset(), strategy=steps)
    ]
    text = [*PROMPT, *made]
    assert engine.backend.cache.length == len(engine.cached_tokens)
    assert list(engine.cached_tokens) == text[: len(engine.cached_tokens)]
    held = engine.backend.cache.snapshot()
    engine.backend.cache.trim(0)
    again = list(feed(whole_pass(engine.backend), text[: held.length], 0, [], 4))
    assert again == []
    whole = engine.backend.cache.snapshot()
    assert all(map(np.array_equal, (*held.keys, *held.values), (*whole.keys, *whole.values)))
    return made


def plain(engine: Engine, most: int = MOST) -> tuple[list[int], list[Floats]]:
    sampler = Greedy()
    made = reply(engine, None, sampler, most)
    engine.forget()
    return made, sampler.logits


@pytest.fixture(scope="module")
def backend() -> Backend:
    return make_backend("portable", export("portable"))


@pytest.fixture(scope="module")
def other() -> Backend:
    return make_backend("portable", export("portable", num_hidden_layers=2, seed=9))


@pytest.fixture
def engine(backend: Backend) -> Iterator[Engine]:
    backend.cache.trim(0)
    yield Engine(backend, 4)
    backend.cache.trim(0)
