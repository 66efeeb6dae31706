"""The decoding loop over real models: transformers' greedy text, however a prompt is cut, and passes that are ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.decoding.engine import Engine
from tests.runtime.interrupts import within_runs
from tests.runtime.models import make_graph_backend
from tests.runtime.test_engine import generate
from tests.tables import each_row

if TYPE_CHECKING:
    from tests.runtime.conftest import Family


@pytest.fixture(params=[make_graph_backend, ReferenceBackend], ids=["onnx", "reference"])
def real(request: pytest.FixtureRequest, make_family: Callable[..., Family]) -> Iterator[tuple[Family, Backend]]:
    family = make_family("llama", max_position_embeddings=1024)
    backend: Backend = request.param(family.bundle, 64)
    yield family, backend
    backend.close()


def greedy_by_transformers(family: Family, prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(family.expected(text)[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_greedy_text_equals_transformers(real: tuple[Family, Backend], chunk: int) -> None:
    family, backend = real
    engine = Engine(backend, chunk)
    prompt = [0, 17, 300, 5, 42, 99, 7]
    assert generate(engine, prompt, 10) == greedy_by_transformers(family, prompt, 10)
    # A new turn, then a prompt that shares only its beginning.
    for other in ([*prompt, 8, 9], [*prompt[:3], 77, 78, 79]):
        assert generate(engine, other, 6) == greedy_by_transformers(family, other, 6)
        assert engine.prefill.cached == (7 if len(other) == 9 else 3)


def test_a_full_context_on_a_real_backend(real: tuple[Family, Backend]) -> None:
    family, backend = real
    prompt = [int(t) for t in np.random.default_rng(5).integers(0, 320, 60)]
    assert generate(Engine(backend, 16), prompt, None) == greedy_by_transformers(family, prompt, 5)


@each_row("length", [0, 296, 514])
def test_cancelling_a_real_pass(make_family: Callable[..., Family], length: int) -> None:
    """The pass that begins when the cache has this length ends in its midst, and so does the reply."""
    family = make_family("llama", max_position_embeddings=1024)
    backend = make_graph_backend(family.bundle, 1024)
    engine = Engine(backend, 8)
    prompt = [int(t) for t in np.random.default_rng(6).integers(0, 320, 512)]

    def cancel() -> None:
        if backend.cache.length == length:
            engine.cancel()

    with within_runs(cancel):
        reply = generate(engine, prompt, 500)
    assert engine.cancelled
    assert backend.cache.length == length
    assert len(reply) == max(0, length - 511)
    assert generate(engine, prompt[:20], 4) == greedy_by_transformers(family, prompt[:20], 4)
    backend.close()
