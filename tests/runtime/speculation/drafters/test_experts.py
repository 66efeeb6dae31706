"""Drafting with fewer experts, and with those in memory: what the cheaper pass chooses, and plain decoding's text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import CapabilityError, UsageError
from edgeinfer.runtime.backends.contract import Backend, ExpertChoice
from edgeinfer.runtime.backends.onnx.graph_backend import GraphBackend
from edgeinfer.runtime.backends.onnx.windowed import CachedExpertsBackend
from edgeinfer.runtime.speculation.drafters.self_drafters import (
    BitsAndExpertsDrafter,
    CachedExpertsDrafter,
    ExpertsDrafter,
    fewer_experts,
)
from tests.runtime.speculation.drafters.models import (
    Plain,
    assert_same_cache,
    context,
    export,
    make_backend,
    speculate,
    take_in,
)

PROMPT = np.random.default_rng(5).integers(0, 320, 12).tolist()
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "moe_intermediate_size": 64, "num_experts": 8}
TOP_K = 3


def bundle_of(kind: str) -> Bundle:
    """A model with experts for a backend."""
    return export(kind, "qwen3-moe", **SIZES)


@pytest.fixture(scope="module", params=["reference", "native", "portable"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def target(kind: str) -> Iterator[Backend]:
    backend = make_backend(kind, bundle_of(kind))
    yield backend
    backend.close()


def guesses(target: Backend, drafter: ExpertsDrafter, count: int) -> list[int]:
    target.cache.trim(0)
    take_in(target, PROMPT[:-1])
    drafter.begin(PROMPT)
    drafted: list[int] = []
    for _ in range(count):
        drafted.append(drafter.guesses(context(PROMPT), drafted, 1)[0].token)
    return drafted


def test_guesses_are_what_fewer_experts_choose(target: Backend) -> None:
    count = fewer_experts(target)
    assert count == TOP_K // 2
    drafted = guesses(target, ExpertsDrafter(target), 6)
    target.cache.trim(0)
    take_in(target, PROMPT[:-1])
    tokens = [PROMPT[-1], *drafted]
    for at, token in enumerate(drafted):
        logits = take_in(target, tokens[at : at + 1], experts=ExpertChoice(count))
        assert token == logits[0].argmax()
    # All experts would choose otherwise.
    target.cache.trim(0)
    assert take_in(target, [*PROMPT, *drafted])[len(PROMPT) - 1 : -1].argmax(axis=1).tolist() != drafted


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [None, 1])
def test_drafting_leaves_no_trace(kind: str, target: Backend, seed: int, count: int | None) -> None:
    if not target.capabilities.exact:
        pytest.skip("rows of this backend depend on each other's experts")
    plain = Plain.decode(target, PROMPT, 25)
    assert speculate(target, ExpertsDrafter(target, count), plain, seed) == list(plain.reply)
    assert_same_cache(kind, target.cache.snapshot(), plain.cache)


@pytest.mark.slow
def test_one_plane_and_fewer_experts_draft_in_one_pass(kind: str, target: Backend) -> None:
    if not target.capabilities.high_planes:
        with pytest.raises(CapabilityError, match="one plane"):
            BitsAndExpertsDrafter(target)
        return
    drafted = guesses(target, BitsAndExpertsDrafter(target), 6)
    target.cache.trim(0)
    take_in(target, PROMPT[:-1])
    tokens = [PROMPT[-1], *drafted]
    for at, token in enumerate(drafted):
        logits = take_in(target, tokens[at : at + 1], planes=1, experts=ExpertChoice(fewer_experts(target)))
        assert token == logits[0].argmax()
    plain = Plain.decode(target, PROMPT, 25)
    assert speculate(target, BitsAndExpertsDrafter(target), plain, 0) == list(plain.reply)
    assert_same_cache(kind, target.cache.snapshot(), plain.cache)


def test_numbers_of_experts_that_are_not_there_are_refused(target: Backend) -> None:
    for count in (TOP_K + 1, 0):
        with pytest.raises(UsageError, match=r"cannot draft with \d experts .*Choose one of 1, .* for draft_experts"):
            ExpertsDrafter(target, count)


def test_a_model_without_experts_cannot_draft_by_them() -> None:
    target = make_backend("reference", export("reference"))
    with pytest.raises(CapabilityError, match=r"cannot use fewer experts .*another drafter"):
        ExpertsDrafter(target)
    with pytest.raises(CapabilityError, match="choose experts"):
        take_in(target, PROMPT, experts=ExpertChoice(1))


def test_only_experts_in_memory_draft() -> None:
    bundle = bundle_of("native")
    inner = make_backend("native", bundle)
    assert isinstance(inner, GraphBackend)
    decoder = bundle.manifest.decoder
    assert decoder is not None
    target = CachedExpertsBackend(inner, decoder, 10_000_000)
    cache = target.expert_cache
    drafter = CachedExpertsDrafter(target, cache.bias)
    plain = Plain.decode(target, PROMPT, 12)
    assert speculate(target, drafter, plain, 0) == list(plain.reply)
    assert_same_cache("native", target.cache.snapshot(), plain.cache)
    # One token's experts are there, so drafts use no others.
    cache.forget()
    target.cache.trim(0)
    take_in(target, PROMPT[:1])
    held = cache.cached.copy()
    drafter.begin(PROMPT[:2])
    now, drafted = context(PROMPT[:2]), [7, 8, 9]
    assert drafter.guesses(now, drafted, 1)
    assert held.any(axis=1).all()
    np.testing.assert_array_equal(cache.cached, held)
    target.close()
