"""A large and a small model of random weights, and replies that note what they were drawn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.layer_skip.strategy import ReducedDecoding, StrategyArguments, feed
from edgeinfer.runtime.sampling.distributions import Logits
from edgeinfer.runtime.sampling.sampler import Sampler
from tests.alone import Alone
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


def given(text: Text, sampler: Greedy, *, chunk: int = 16, **options: Any) -> StrategyArguments:
    text.chunk = chunk
    return StrategyArguments(text, sampler, ReplyOptions(**options), 16, 2.0)


def read(backend: Alone[Any], tokens: Sequence[int], wanted: Sequence[int] = ()) -> dict[int, Floats]:
    """Have the whole model read tokens from the beginning; copies of the logits (V,) behind these."""
    found: dict[int, Floats] = {}
    keep = lambda index, logits: found.update({index: logits.copy()})  # noqa: E731
    backend.cache.trim(0)
    run_alone(feed(backend.model, backend.cache, tokens, 0, wanted, 4, keep))
    return found


def reply(engine: Text, steps: ReducedDecoding | None, sampler: Greedy, most: int = MOST) -> list[int]:
    """Tokens of a reply; afterwards the cache holds whole rows of the first tokens, as the engine believes."""
    made = [
        step.token for step in engine.generate(PROMPT, sampler, max_tokens=most, stop_ids=frozenset(), strategy=steps)
    ]
    text = [*PROMPT, *made]
    if steps is not None:
        steps.finish()
    cache = engine.cache
    assert cache.length == len(engine.cached_tokens)
    assert list(engine.cached_tokens) == text[: len(engine.cached_tokens)]
    held = cache.snapshot()
    cache.trim(0)
    run_alone(feed(engine.backend, cache, text[: held.length], 0, [], 4, lambda index, logits: None))
    whole = cache.snapshot()
    assert all(map(np.array_equal, (*held.keys, *held.values), (*whole.keys, *whole.values)))
    return made


def plain(engine: Text, most: int = MOST) -> tuple[list[int], list[Floats]]:
    sampler = Greedy()
    made = reply(engine, None, sampler, most)
    engine.forget()
    return made, sampler.logits


@pytest.fixture(scope="module")
def backend() -> Alone[Any]:
    return make_backend("portable", export("portable"))


@pytest.fixture(scope="module")
def other() -> Alone[Any]:
    return make_backend("portable", export("portable", num_hidden_layers=2, seed=9))


@pytest.fixture
def engine(backend: Alone[Any]) -> Iterator[Text]:
    backend.cache.trim(0)
    yield Text(backend.model, backend.cache, 4)
    backend.cache.trim(0)
