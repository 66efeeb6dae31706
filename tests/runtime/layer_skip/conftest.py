"""A large and a small model of random weights, and the large one's engine, with an empty cache before and after."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.engine import Engine
from tests.runtime.speculation.drafters.models import export, make_backend


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
