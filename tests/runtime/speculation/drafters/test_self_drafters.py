"""Drafters that run the target: what their cheaper pass chooses, passes in two parts, fewer experts, no trace left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.runtime.backends.contract import ExpertChoice
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.speculation.drafters.contract import Drafter
from edgeinfer.runtime.speculation.drafters.self_drafters import (
    BitsAndExpertsDrafter,
    BitsDrafter,
    CachedExpertsDrafter,
    EarlyExitDrafter,
    ExpertsDrafter,
    fewer_experts,
)
from tests.alone import Alone, restore
from tests.runtime.models import feed
from tests.runtime.speculation.drafters.models import (
    BACKENDS,
    Plain,
    assert_same_cache,
    context,
    export,
    make_backend,
    pair,
    speculate,
)
from tests.runtime.speculation.drafters.rounds import guesses_of
from tests.windowed import cache_experts

LAYERS, EXIT = 4, 2
PROMPT = np.random.default_rng(5).integers(0, 320, 12).tolist()
DRAFTERS: dict[str, Callable[[Alone[Any]], Drafter]] = {
    "exit": lambda target: EarlyExitDrafter(*pair(target), EXIT),
    "bits": lambda target: BitsDrafter(*pair(target)),
}
# How each one's pass differs from a whole one.
PASSES: dict[str, dict[str, Any]] = {
    "exit": {"layer_mask": np.arange(2 * LAYERS) < 2 * EXIT},
    "bits": {"planes": 1},
}
# One plane is for the native layout and its reference.
CASES = [(kind, name) for kind in BACKENDS for name in DRAFTERS if (kind, name) != ("portable", "bits")]


@pytest.fixture(scope="module")
def target(kind: str) -> Iterator[Alone[Any]]:
    backend = make_backend(kind, export(kind))
    yield backend
    backend.close()


each_drafter = pytest.mark.parametrize(("kind", "name"), CASES, scope="module")


def begin(target: Alone[Any], drafter: Drafter, tokens: Sequence[int]) -> None:
    """The target holds all of the tokens but the root, as it does when a round begins."""
    target.cache.trim(0)
    feed(target, tokens[:-1])
    drafter.begin(tokens)


def cheap_logits(
    target: Alone[Any], how: dict[str, Any], tokens: Sequence[int], drafted: Sequence[int]
) -> NDArray[np.float32]:
    """What a drafter's pass gives behind a cache of whole passes: its logits after the drafted tokens. (V,)"""
    target.cache.trim(0)
    feed(target, tokens[:-1])
    row: NDArray[np.float32] = feed(target, [tokens[-1], *drafted], **how)[-1]
    return row


@each_drafter
@pytest.mark.parametrize("width", [1, 3])
def test_paths_may_be_asked_for_in_any_order(target: Alone[Any], name: str, width: int) -> None:
    paths: list[list[int]] = [[5, 6], [5, 7, 8], [], [5, 6, 9], [5], [4, 4, 4, 4], [5, 7]]
    drafter = DRAFTERS[name](target)
    begin(target, drafter, PROMPT)
    found = [[guess.token for guess in guesses_of(drafter, context(PROMPT), path, width)] for path in paths]
    for path, tokens in zip(paths, found, strict=True):
        expected = np.argsort(-cheap_logits(target, PASSES[name], PROMPT, path))[:width]
        assert tokens == expected.tolist()


@pytest.mark.parametrize("kind", BACKENDS, scope="module")
def test_drafters_may_take_turns_at_the_targets_cache(kind: str, target: Alone[Any]) -> None:
    """Rows of one are none of another's, though they are as many; and what an exit hands over is still exact."""
    early, other = DRAFTERS["exit"](target), EarlyExitDrafter(*pair(target), EXIT + 1)
    begin(target, early, PROMPT)
    other.begin(PROMPT)
    now, drafted = context(PROMPT), [5, 6]
    first = guesses_of(early, now, drafted, 1)
    guesses_of(other, now, drafted, 1)
    assert run_alone(early.resume(now, drafted)) is None
    target.cache.trim(len(PROMPT) - 1)
    deeper = {"layer_mask": np.arange(2 * LAYERS) < 2 * (EXIT + 1)}
    wanted = cheap_logits(target, deeper, PROMPT, [5, 7]).argmax()
    target.cache.trim(len(PROMPT) - 1)
    assert guesses_of(other, now, [5, 7], 1)[0].token == wanted
    early.begin(PROMPT)
    assert guesses_of(early, now, drafted, 1) == first
    resumption = run_alone(early.resume(now, drafted))
    assert resumption is not None
    whole = feed(target, [PROMPT[-1], *drafted], layer_mask=resumption.layer_mask, hidden=resumption.hidden)
    cache = target.cache.snapshot()
    target.cache.trim(0)
    np.testing.assert_allclose(
        whole, feed(target, [*PROMPT, *drafted])[-3:], rtol=0, atol=1e-3 if kind == "reference" else 0
    )
    assert_same_cache(kind, cache, target.cache.snapshot())


@each_drafter
def test_nothing_is_guessed_beyond_the_cache(target: Alone[Any], name: str) -> None:
    drafter = DRAFTERS[name](target)
    tokens = (PROMPT * 6)[: target.cache.capacity - 1]
    begin(target, drafter, tokens)
    assert guesses_of(drafter, context(tokens), [5], 1)
    assert not guesses_of(drafter, context(tokens), [5, 6], 1)


@each_drafter
def test_nothing_is_kept(target: Alone[Any], name: str) -> None:
    drafter = DRAFTERS[name](target)
    assert (drafter.name, drafter.uses_target, drafter.state()) == (name, True, {})
    assert drafter.nbytes() < 100_000
    begin(target, drafter, PROMPT)
    guess = guesses_of(drafter, context(PROMPT), [], 1)[0]
    assert 0 <= guess.sign < len(drafter.priors)
    drafter.close()
    feed(target, [1])  # the target is not closed with it


def test_exits_and_masks_that_fit_no_model_are_refused() -> None:
    target = make_backend("reference", export("reference"))
    for number in (0, LAYERS):
        with pytest.raises(UsageError, match=rf"no exit after layer {number}\. Choose one from 1 to 3"):
            EarlyExitDrafter(*pair(target), number)


def test_a_backend_that_only_decodes_is_refused() -> None:
    target = make_backend("reference", export("reference"))
    target.model.capabilities = Capabilities(layer_skip=False, hidden=False, tree=False)
    for name, make in DRAFTERS.items():
        with pytest.raises(CapabilityError, match=r"reference backend cannot .* another drafter"):
            make(target)
            pytest.fail(f"{name} was made")


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
def parted(model: tuple[str, Bundle]) -> Iterator[Alone[Any]]:
    backend = make_backend(*model, 64)
    yield backend
    backend.close()


def check(parted: Alone[Any], prompt: int, drafted: int, own: int) -> None:
    """Draft behind a prompt, `own` of the tokens here, and compare verification with a whole pass."""
    tokens, chain = TEXT[:prompt], TEXT[300 : 300 + drafted]
    parted.cache.trim(0)
    if prompt > 1:
        feed(parted, tokens[:-1])
    before = parted.cache.snapshot()
    drafter, now = EarlyExitDrafter(*pair(parted), EXIT), context(tokens)
    drafter.begin(tokens)
    for length in range(own):
        guesses_of(drafter, now, chain[:length], 1)
    resumption = run_alone(drafter.resume(now, chain))
    assert parted.cache.length == prompt - 1
    assert (resumption is None) == (own == 0)
    if resumption is None:
        return
    assert resumption.hidden.shape == (1 + drafted, parted.geometry.hidden_size)
    assert resumption.layer_mask.tolist() == [i >= 2 * EXIT for i in range(2 * parted.geometry.num_layers)]
    fed = [tokens[-1], *chain]
    logits = feed(parted, fed, layer_mask=resumption.layer_mask, hidden=resumption.hidden)
    cache = parted.cache.snapshot()
    parted.cache.trim(0)
    restore(parted.cache, before)
    np.testing.assert_array_equal(logits, feed(parted, fed))
    assert_same_cache("onnx", cache, parted.cache.snapshot())


@given(prompt=st.integers(2, 40), drafted=st.integers(1, 20), own=st.integers(0, 20))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_pass_in_two_parts_is_the_whole_pass(parted: Alone[Any], prompt: int, drafted: int, own: int) -> None:
    check(parted, prompt, drafted, min(own, drafted))


@pytest.mark.parametrize("prompt", range(FIRST_ROWS - 4, FIRST_ROWS + 1))
def test_rows_survive_when_the_cache_grows_between_the_parts(model: tuple[str, Bundle], prompt: int) -> None:
    for drafted, own in ((1, 1), (2, 1), (5, 2)):
        parted = make_backend(*model, 300)  # buffers that have grown once do not again
        check(parted, prompt, drafted, own)
        parted.close()


START = np.random.default_rng(5).integers(0, 320, 12).tolist()
SIZES: dict[str, Any] = {"num_hidden_layers": 3, "moe_intermediate_size": 64, "num_experts": 8}
TOP_K = 3


def bundle_of(mixture_kind: str) -> Bundle:
    """A model with experts for a backend."""
    return export(mixture_kind, "qwen3-moe", **SIZES)


@pytest.fixture(scope="module", params=["reference", "native", "portable"])
def mixture_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def mixture(mixture_kind: str) -> Iterator[Alone[Any]]:
    backend = make_backend(mixture_kind, bundle_of(mixture_kind))
    yield backend
    backend.close()


def guesses(mixture: Alone[Any], drafter: ExpertsDrafter, count: int) -> list[int]:
    mixture.cache.trim(0)
    feed(mixture, START[:-1])
    drafter.begin(START)
    drafted: list[int] = []
    for _ in range(count):
        drafted.append(guesses_of(drafter, context(START), drafted, 1)[0].token)
    return drafted


def test_guesses_are_what_fewer_experts_choose(mixture: Alone[Any]) -> None:
    count = fewer_experts(mixture.model)
    assert count == TOP_K // 2
    drafted = guesses(mixture, ExpertsDrafter(*pair(mixture)), 6)
    mixture.cache.trim(0)
    feed(mixture, START[:-1])
    tokens = [START[-1], *drafted]
    for at, token in enumerate(drafted):
        logits = feed(mixture, tokens[at : at + 1], experts=ExpertChoice(count))
        assert token == logits[0].argmax()
    # All experts would choose otherwise.
    mixture.cache.trim(0)
    assert feed(mixture, [*START, *drafted])[len(START) - 1 : -1].argmax(axis=1).tolist() != drafted


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("count", [None, 1])
def test_drafting_leaves_no_trace(mixture_kind: str, mixture: Alone[Any], seed: int, count: int | None) -> None:
    if not mixture.capabilities.exact:
        pytest.skip("rows of this backend depend on each other's experts")
    plain = Plain.decode(mixture, START, 25)
    assert speculate(mixture, ExpertsDrafter(*pair(mixture), count), plain, seed) == list(plain.reply)
    assert_same_cache(mixture_kind, mixture.cache.snapshot(), plain.cache)


@pytest.mark.slow
def test_one_plane_and_fewer_experts_draft_in_one_pass(mixture_kind: str, mixture: Alone[Any]) -> None:
    if not mixture.capabilities.high_planes:
        with pytest.raises(CapabilityError, match="one plane"):
            BitsAndExpertsDrafter(*pair(mixture))
        return
    drafted = guesses(mixture, BitsAndExpertsDrafter(*pair(mixture)), 6)
    mixture.cache.trim(0)
    feed(mixture, START[:-1])
    tokens = [START[-1], *drafted]
    for at, token in enumerate(drafted):
        logits = feed(mixture, tokens[at : at + 1], planes=1, experts=ExpertChoice(fewer_experts(mixture.model)))
        assert token == logits[0].argmax()
    plain = Plain.decode(mixture, START, 25)
    assert speculate(mixture, BitsAndExpertsDrafter(*pair(mixture)), plain, 0) == list(plain.reply)
    assert_same_cache(mixture_kind, mixture.cache.snapshot(), plain.cache)


def test_numbers_of_experts_that_are_not_there_are_refused(mixture: Alone[Any]) -> None:
    for count in (TOP_K + 1, 0):
        with pytest.raises(UsageError, match=r"cannot draft with \d experts .*Choose one of 1, .* for draft_experts"):
            ExpertsDrafter(*pair(mixture), count)


def test_a_model_without_experts_cannot_draft_by_them() -> None:
    mixture = make_backend("reference", export("reference"))
    with pytest.raises(CapabilityError, match=r"cannot use fewer experts .*another drafter"):
        ExpertsDrafter(*pair(mixture))
    with pytest.raises(CapabilityError, match="choose experts"):
        feed(mixture, START, experts=ExpertChoice(1))


def test_only_experts_in_memory_draft() -> None:
    bundle = bundle_of("native")
    inner = make_backend("native", bundle)
    decoder = bundle.manifest.decoder
    assert decoder is not None
    mixture = cache_experts(inner, decoder, 10_000_000)
    cache = mixture.expert_cache
    drafter = CachedExpertsDrafter(*pair(mixture), cache.bias)
    plain = Plain.decode(mixture, START, 12)
    assert speculate(mixture, drafter, plain, 0) == list(plain.reply)
    assert_same_cache("native", mixture.cache.snapshot(), plain.cache)
    # One token's experts are there, so drafts use no others.
    cache.forget()
    mixture.cache.trim(0)
    feed(mixture, START[:1])
    held = cache.cached.copy()
    drafter.begin(START[:2])
    now, drafted = context(START[:2]), [7, 8, 9]
    assert guesses_of(drafter, now, drafted, 1)
    assert held.any(axis=1).all()
    np.testing.assert_array_equal(cache.cached, held)
    mixture.close()
