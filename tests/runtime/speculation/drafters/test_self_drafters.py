"""Drafters that run the target: they propose what their cheaper pass chooses, and leave nothing of it behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.errors import CapabilityError, UsageError
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.speculation.drafters.contract import Drafter
from edgeinfer.runtime.speculation.drafters.self_drafters import (
    BitsDrafter,
    EarlyExitDrafter,
    SkipDrafter,
    every_second,
)
from tests.runtime.speculation.drafters.models import (
    BACKENDS,
    assert_same_cache,
    context,
    export,
    make_backend,
    take_in,
)

LAYERS, EXIT = 4, 2
PROMPT = np.random.default_rng(5).integers(0, 320, 12).tolist()
DRAFTERS: dict[str, Callable[[Backend], Drafter]] = {
    "exit": lambda target: EarlyExitDrafter(target, EXIT),
    "skip": SkipDrafter,
    "bits": BitsDrafter,
}
# How each one's pass differs from a whole one.
PASSES: dict[str, dict[str, Any]] = {
    "exit": {"layer_mask": np.arange(2 * LAYERS) < 2 * EXIT},
    "skip": {"layer_mask": every_second(LAYERS)},
    "bits": {"planes": 1},
}


# One plane is for the native layout and its reference.
CASES = [(kind, name) for kind in BACKENDS for name in DRAFTERS if (kind, name) != ("portable", "bits")]


@pytest.fixture(scope="module")
def target(kind: str) -> Iterator[Backend]:
    backend = make_backend(kind, export(kind))
    yield backend
    backend.close()


each_drafter = pytest.mark.parametrize(("kind", "name"), CASES, scope="module")


def begin(target: Backend, drafter: Drafter, tokens: Sequence[int]) -> None:
    """The target holds all of the tokens but the root, as it does when a round begins."""
    target.cache.trim(0)
    take_in(target, tokens[:-1])
    drafter.begin(tokens)


def cheap_logits(target: Backend, name: str, tokens: Sequence[int], drafted: Sequence[int]) -> NDArray[np.float32]:
    """What a drafter's pass gives behind a cache of whole passes: its logits after the drafted tokens. (V,)"""
    target.cache.trim(0)
    take_in(target, tokens[:-1])
    row: NDArray[np.float32] = take_in(target, [tokens[-1], *drafted], **PASSES[name])[-1]
    return row


@each_drafter
@pytest.mark.parametrize("width", [1, 3])
def test_paths_may_be_asked_for_in_any_order(target: Backend, name: str, width: int) -> None:
    paths: list[list[int]] = [[5, 6], [5, 7, 8], [], [5, 6, 9], [5], [4, 4, 4, 4], [5, 7]]
    drafter = DRAFTERS[name](target)
    begin(target, drafter, PROMPT)
    found = [[guess.token for guess in drafter.guesses(context(PROMPT), path, width)] for path in paths]
    for path, tokens in zip(paths, found, strict=True):
        expected = np.argsort(-cheap_logits(target, name, PROMPT, path))[:width]
        assert tokens == expected.tolist()


@pytest.mark.parametrize("kind", BACKENDS, scope="module")
def test_drafters_may_take_turns_at_the_targets_cache(kind: str, target: Backend) -> None:
    """Rows of one are none of another's, though they are as many; and what an exit hands over is still exact."""
    early, skip = DRAFTERS["exit"](target), DRAFTERS["skip"](target)
    begin(target, early, PROMPT)
    skip.begin(PROMPT)
    now, drafted = context(PROMPT), [5, 6]
    first = early.guesses(now, drafted, 1)
    skip.guesses(now, drafted, 1)
    assert early.resume(now, drafted) is None
    target.cache.trim(len(PROMPT) - 1)
    assert skip.guesses(now, [5, 7], 1)[0].token == cheap_logits(target, "skip", PROMPT, [5, 7]).argmax()
    early.begin(PROMPT)
    assert early.guesses(now, drafted, 1) == first
    resumption = early.resume(now, drafted)
    assert resumption is not None
    whole = take_in(target, [PROMPT[-1], *drafted], layer_mask=resumption.layer_mask, hidden=resumption.hidden)
    cache = target.cache.snapshot()
    target.cache.trim(0)
    np.testing.assert_allclose(
        whole, take_in(target, [*PROMPT, *drafted])[-3:], rtol=0, atol=1e-3 if kind == "reference" else 0
    )
    assert_same_cache(kind, cache, target.cache.snapshot())


@each_drafter
def test_a_known_guess_costs_no_pass(target: Backend, name: str) -> None:
    drafter = DRAFTERS[name](target)
    begin(target, drafter, PROMPT)
    guess = drafter.guesses(context(PROMPT), [], 2)
    target.cache.trim(len(PROMPT) - 1)
    assert drafter.guesses(context(PROMPT), [], 2) == guess
    assert drafter.guesses(context(PROMPT), [], 1) == guess[:1]
    assert target.cache.length == len(PROMPT) - 1


@each_drafter
def test_nothing_is_guessed_beyond_the_cache(target: Backend, name: str) -> None:
    drafter = DRAFTERS[name](target)
    tokens = (PROMPT * 6)[: target.cache.capacity - 1]
    begin(target, drafter, tokens)
    assert drafter.guesses(context(tokens), [5], 1)
    assert not drafter.guesses(context(tokens), [5, 6], 1)


@each_drafter
def test_nothing_is_kept(target: Backend, name: str) -> None:
    drafter = DRAFTERS[name](target)
    assert (drafter.name, drafter.uses_target, drafter.state()) == (name, True, {})
    assert drafter.nbytes() < 100_000
    begin(target, drafter, PROMPT)
    guess = drafter.guesses(context(PROMPT), [], 1)[0]
    assert 0 <= guess.sign < len(drafter.priors)
    drafter.close()
    take_in(target, [1])  # the target is not closed with it


def test_exits_and_masks_that_fit_no_model_are_refused() -> None:
    target = ReferenceBackend(export("reference"), 64)
    for number in (0, LAYERS):
        with pytest.raises(UsageError, match=rf"no exit after layer {number}\. Choose one from 1 to 3"):
            EarlyExitDrafter(target, number)
    for mask in (np.ones(2 * LAYERS, np.bool_), np.zeros(LAYERS, np.bool_)):
        with pytest.raises(UsageError, match="drafts nothing"):
            SkipDrafter(target, mask)


def test_every_second_layer_is_skipped_up_to_a_share() -> None:
    expected = {3: [1], 4: [1], 6: [1, 3], 24: [*range(1, 20, 2)], 32: [*range(1, 28, 2)]}
    for layers, skipped in expected.items():
        mask = every_second(layers)
        assert sorted({*np.flatnonzero(~mask)}) == sorted(block for i in skipped for block in (2 * i, 2 * i + 1))


def test_two_layers_are_too_few_to_skip_one() -> None:
    with pytest.raises(UsageError, match="2 layers has none to skip"):
        every_second(2)


def test_a_backend_that_only_decodes_is_refused() -> None:
    target = ReferenceBackend(export("reference"), 64)
    target.capabilities = Capabilities(layer_skip=False, hidden=False, tree=False)
    for name, make in DRAFTERS.items():
        with pytest.raises(CapabilityError, match=r"reference backend cannot .* another drafter"):
            make(target)
            pytest.fail(f"{name} was made")
