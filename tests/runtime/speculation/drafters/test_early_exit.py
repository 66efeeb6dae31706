"""Early exit: a pass in two parts is the whole pass, to the bit, wherever rows lie and whoever proposed them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.store import Bundle
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.speculation.drafters.self_drafters import EarlyExitDrafter
from tests.runtime.speculation.drafters.models import assert_same_cache, context, export, make_backend, take_in

EXIT = 2
TEXT = np.random.default_rng(9).integers(0, 320, 320).tolist()
# Buffers of the cache first hold this many rows.
FIRST_ROWS = 256


# Windows of attention take another way through the graph.
@pytest.fixture(
    scope="module",
    params=[("native", "qwen2"), ("portable", "qwen2"), ("native", "mistral")],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def model(request: pytest.FixtureRequest) -> tuple[str, Bundle]:
    kind, arch = request.param
    return kind, export(kind, arch)


@pytest.fixture(scope="module")
def target(model: tuple[str, Bundle]) -> Iterator[Backend]:
    backend = make_backend(*model, 64)
    yield backend
    backend.close()


def check(target: Backend, prompt: int, drafted: int, own: int) -> None:
    """Draft behind a prompt, `own` of the tokens here, and compare verification with a whole pass."""
    tokens, chain = TEXT[:prompt], TEXT[300 : 300 + drafted]
    target.cache.trim(0)
    if prompt > 1:
        take_in(target, tokens[:-1])
    before = target.cache.snapshot()
    drafter, now = EarlyExitDrafter(target, EXIT), context(tokens)
    drafter.begin(tokens)
    for length in range(own):
        drafter.guesses(now, chain[:length], 1)
    resumption = drafter.resume(now, chain)
    assert target.cache.length == prompt - 1
    assert (resumption is None) == (own == 0)
    if resumption is None:
        return
    assert resumption.hidden.shape == (1 + drafted, target.geometry.hidden_size)
    assert resumption.layer_mask.tolist() == [i >= 2 * EXIT for i in range(2 * target.geometry.num_layers)]
    fed = [tokens[-1], *chain]
    logits = take_in(target, fed, layer_mask=resumption.layer_mask, hidden=resumption.hidden)
    cache = target.cache.snapshot()
    target.cache.trim(0)
    target.cache.restore(before)
    np.testing.assert_array_equal(logits, take_in(target, fed))
    assert_same_cache("onnx", cache, target.cache.snapshot())


@given(prompt=st.integers(2, 40), drafted=st.integers(1, 20), own=st.integers(0, 20))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pass_in_two_parts_is_the_whole_pass(target: Backend, prompt: int, drafted: int, own: int) -> None:
    check(target, prompt, drafted, min(own, drafted))


@pytest.mark.parametrize("prompt", range(FIRST_ROWS - 4, FIRST_ROWS + 1))
def test_rows_survive_when_the_cache_grows_between_the_parts(model: tuple[str, Bundle], prompt: int) -> None:
    for drafted, own in ((1, 1), (2, 1), (5, 2)):
        target = make_backend(*model, 300)  # buffers that have grown once do not again
        check(target, prompt, drafted, own)
        target.close()
