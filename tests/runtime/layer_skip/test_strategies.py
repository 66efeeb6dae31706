"""Replies that take less compute: what is fed when, what stays in the cache, turns of two models, what floors do.

On random models, whose every layer matters, against the same thing done in the obvious way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest

from edgeinfer.core.errors import CapabilityError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.backends.contract import KVCache, Pass, PassResult
from edgeinfer.runtime.decoding.sequence import Passes, run_alone
from edgeinfer.runtime.decoding.sequence import Sequence as Text
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.calibrated import LayerSkipDecoding, PromptStates
from edgeinfer.runtime.layer_skip.entropy import ModelSwitchDecoding
from edgeinfer.runtime.layer_skip.exiting import EarlyExitDecoding
from edgeinfer.runtime.layer_skip.strategy import (
    DivergenceLimit,
    EvaluatedPrompt,
    Mask,
    ReducedDecoding,
    SpeedTarget,
)
from edgeinfer.runtime.research.layers import ImportancePolicy, importance
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from tests.alone import Alone
from tests.runtime.layer_skip.conftest import MOST, PROMPT, Greedy, Script, given, plain, read, reply
from tests.runtime.speculation.drafters.models import export, make_backend, pair
from tests.tables import each_row

LAYERS = 4
COSTS = BlockCosts(1.0, (1.0,) * (2 * LAYERS), (1.0 + 2 * LAYERS, 1.1 + 2 * LAYERS))
SKIPS = np.array([1, 1, 0, 1, 1, 0, 1, 1], np.bool_)


class Fixed:
    """A policy that knows what it wants."""

    reads_states: ClassVar[bool] = False

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Passes[Mask]:
        yield from ()
        return self._mask


def test_skipped_blocks_do_not_run(engine: Text, backend: Alone[Any]) -> None:
    """As if every token after the prompt were fed with the mask, one by one."""
    sampler = Greedy()
    steps = LayerSkipDecoding(given(engine, sampler), Fixed(SKIPS), COSTS)
    made = reply(engine, steps, sampler)
    assert made != plain(engine)[0]
    read(backend, PROMPT)
    for token, said in zip(made, sampler.logits[1:], strict=False):
        place = np.array([backend.cache.length])
        output = backend.forward(Pass(np.array([token]), place, np.zeros(1, np.int64), layer_mask=SKIPS))
        assert np.array_equal(output.logits[0], said)
    use = steps.compute
    assert not use.lossless and use.reduced == MOST - 1
    assert use.skipped_share == pytest.approx(2 / 8) and use.layer_mask == tuple(SKIPS.tolist())
    assert use.predicted_ms == COSTS.ms(SKIPS) and use.divergence is None


def test_a_generous_floor_measures_and_lets_pass(engine: Text) -> None:
    sampler = Greedy()
    steps = LayerSkipDecoding(given(engine, sampler, quality_floor=1e3), Fixed(SKIPS), COSTS)
    made = reply(engine, steps, sampler, 40)
    use = steps.compute
    assert use.reduced == 39 and use.stopped_at is None and use.sampled >= 16 and use.caught_up >= 24
    # What it measured is how far those tokens' predictions were from the whole model's.
    assert use.divergence is not None and 0 < use.divergence < 1e3
    assert len(made) == 40


def test_a_tight_floor_skips_nothing(engine: Text) -> None:
    """The prompt shows already that these blocks matter."""
    sampler = Greedy()
    steps = LayerSkipDecoding(given(engine, sampler, quality_floor=1e-4), Fixed(SKIPS), COSTS)
    assert reply(engine, steps, sampler) == plain(engine)[0]
    assert steps.compute.stopped_at == 0 and steps.compute.lossless


def test_a_floor_ends_skipping_within_the_reply(
    engine: Text, backend: Alone[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayerSkipDecoding, "_try", lambda self, text, share: iter(()))
    sampler = Greedy()
    steps = LayerSkipDecoding(given(engine, sampler, quality_floor=1e-4), Fixed(SKIPS), COSTS)
    made = reply(engine, steps, sampler)
    use = steps.compute
    assert (use.stopped_at, use.reduced) == (8, 8)
    # From there on it is the whole model's reply to what there is.
    engine.forget()
    text = [*PROMPT, *made]
    after = range(len(PROMPT) + 8, len(text) - 1)
    for index, logits in read(backend, text[:-1], list(after)).items():
        assert int(logits.argmax()) == text[index + 1]


def test_a_full_cache_ends_a_reply(engine: Text) -> None:
    sampler = Greedy()
    steps = LayerSkipDecoding(given(engine, sampler), Fixed(SKIPS), COSTS)
    made = [s.token for s in engine.generate(PROMPT, sampler, max_tokens=None, stop_ids=frozenset(), strategy=steps)]
    assert len(made) == engine.cache.capacity - len(PROMPT) + 1


def test_exits_follow_their_confidence(engine: Text, backend: Alone[Any]) -> None:
    """Token by token, the first layers where they are sure, else the whole model, both with whole rows before them."""
    sampler, first = Greedy(), np.arange(2 * LAYERS) < 4
    steps = EarlyExitDecoding(given(engine, sampler, exit_confidence=0.05), 2, COSTS)
    made = reply(engine, steps, sampler, 40)
    left = waiting = 0
    engine.forget()
    read(backend, PROMPT)
    one = np.zeros(1, np.int64)
    for token, said in zip(made, sampler.logits[1:], strict=False):
        start = backend.cache.length
        early = backend.forward(Pass(np.array([token]), np.array([start]), one, layer_mask=first)).logits[0].copy()
        backend.cache.trim(start)
        whole = backend.forward(Pass(np.array([token]), np.array([start]), one)).logits[0]
        sure = 1 / np.exp(early - early.max()).sum() >= 0.05
        waiting = waiting + 1 if sure else 0
        if waiting == 8:
            sure, waiting = False, 0
        left += sure
        assert np.array_equal(early if sure else whole, said)
    use = steps.compute
    assert 5 < left < 39 and use.reduced == left
    assert 0 < use.caught_up <= left


def test_below_fills_deeper_layers_from_the_last_that_ran(engine: Text, backend: Alone[Any]) -> None:
    sampler = Greedy()
    steps = EarlyExitDecoding(given(engine, sampler, exit_confidence=0.0, compute="exit", skip_cache="below"), 2, COSTS)
    seen: list[Any] = []
    forward = backend.model.forward

    def watched(passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        batch = passes[0][1]
        if batch.hidden is not None:
            seen.append((len(batch.tokens), backend.cache.snapshot(len(PROMPT))))
        found: list[PassResult] = forward(passes)
        return found

    backend.model.forward = watched
    try:
        reply(engine, steps, sampler, 10)
    finally:
        del backend.model.forward
    # Eight tokens wait at most: the last of them alone goes deeper, behind seven filled rows.
    assert [size for size, _ in seen] == [1]
    held = seen[0][1]
    assert held.length == 7
    for layer in (2, 3):
        assert np.array_equal(held.keys[layer], held.keys[1]) and np.array_equal(held.values[layer], held.values[1])
    assert not np.array_equal(held.keys[0], held.keys[1])
    assert backend.cache.length == len(PROMPT)  # nothing that rests on filled rows stays
    assert steps.compute.caught_up == 0
    with pytest.raises(UsageError):  # nothing is caught up with that a floor could measure
        ReplyOptions(compute="exit", skip_cache="below", quality_floor=0.1)


def test_exits_are_measured_by_the_passes_that_catch_up(engine: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlyExitDecoding, "_try", lambda self, text, share: iter(()))
    sampler = Greedy()
    steps = EarlyExitDecoding(given(engine, sampler, exit_confidence=0.0, quality_floor=1e-4), 2, COSTS)
    reply(engine, steps, sampler)
    use = steps.compute
    assert use.reduced == use.sampled == use.stopped_at == 7
    assert use.divergence is not None and use.divergence * use.tokens / 7 > 1e-4


def test_there_is_no_such_exit(engine: Text) -> None:
    for layer in (0, LAYERS, LAYERS + 3):
        with pytest.raises(UsageError, match="no exit"):
            EarlyExitDecoding(given(engine, Greedy()), layer, COSTS)
            pytest.fail(f"an exit after layer {layer}")


def test_states_are_those_between_the_layers(engine: Text, backend: Alone[Any]) -> None:
    read(backend, PROMPT)
    before = backend.cache.snapshot()
    states = run_alone(PromptStates(*pair(backend), PROMPT, 4).states())
    assert states.shape == (LAYERS + 1, len(PROMPT), backend.geometry.hidden_size)
    after = backend.cache.snapshot()
    assert all(map(np.array_equal, (*before.keys, *before.values), (*after.keys, *after.values)))
    for layer in range(LAYERS + 1):
        backend.cache.trim(0)
        mask = np.arange(2 * LAYERS) < 2 * layer
        output = backend.forward(Pass(np.array(PROMPT), np.arange(len(PROMPT)), np.zeros(0, np.int64), layer_mask=mask))
        assert output.hidden is not None
        np.testing.assert_allclose(states[layer], output.hidden, rtol=1e-4, atol=1e-4)
    assert (importance(states) > 0).all()


def test_states_come_of_the_passes_that_evaluate_the_prompt(
    engine: Text, backend: Alone[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal states, rows and reply as by reading the prompt once more, without a row that a block sees twice."""
    sampler, policy = Greedy(), ImportancePolicy()
    blocks = [0]

    def counted(passes: Sequence[tuple[KVCache, Pass]], forward: Any = backend.model.forward) -> Any:
        batch = passes[0][1]
        mask = np.ones(2 * LAYERS) if batch.layer_mask is None else batch.layer_mask
        blocks[0] += len(batch.tokens) * int(mask.sum())
        return forward(passes)

    monkeypatch.setattr(backend.model, "forward", counted)
    steps = LayerSkipDecoding(given(engine, sampler, chunk=4), policy, COSTS)
    made = reply(engine, steps, sampler, 1)
    # `reply` reads the prompt once more, to compare the cache.
    assert blocks[0] == 2 * 2 * LAYERS * len(PROMPT)
    engine.forget()
    assert plain(engine, 1)[0] == made
    kept = PromptStates(*pair(backend), PROMPT, 4)
    for start in range(0, len(PROMPT), 4):
        part = np.array(PROMPT[start : start + 4])
        run_alone(kept.read(Pass(part, start + np.arange(len(part)), np.zeros(0, np.int64))))
    seen, before = run_alone(kept.states()), blocks[0]
    again = run_alone(PromptStates(*pair(backend), PROMPT, 4).states())
    assert np.array_equal(seen, again) and blocks[0] > before
    # Where a beginning was in the cache already, the last tokens are read once more.
    backend.cache.trim(5)
    rest = PromptStates(*pair(backend), PROMPT, 4)
    run_alone(rest.read(Pass(np.array(PROMPT[5:]), np.arange(5, len(PROMPT)), np.zeros(0, np.int64))))
    assert np.array_equal(run_alone(rest.states()), again)


def test_a_backend_that_cannot_skip_refuses(engine: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    can = dataclasses.replace(engine.backend.capabilities, layer_skip=False)
    monkeypatch.setattr(engine.backend, "capabilities", can)
    for make in (
        lambda: LayerSkipDecoding(given(engine, Greedy()), Fixed(SKIPS), COSTS),
        lambda: EarlyExitDecoding(given(engine, Greedy()), 2, COSTS),
    ):
        with pytest.raises(CapabilityError, match="cannot"):
            make()


def ways(engine: Text, other: Alone[Any], sampler: Greedy, **options: Any) -> dict[str, ReducedDecoding]:
    """One that leaves out blocks, layers or whole passes, where options and policy let it."""
    alone = options.get("exit_confidence", 0.0) > 0
    parts, mask = given(engine, sampler, **options), np.ones_like(SKIPS) if alone else SKIPS
    return {
        "skip": LayerSkipDecoding(parts, Fixed(mask), COSTS),
        "exit": EarlyExitDecoding(parts, 2, COSTS),
        "entropy": ModelSwitchDecoding(parts, ModelDrafter(*pair(other), 4), Script([alone] * 50), 0.25),
    }


FLOOR = {"exit_confidence": 0.0, "quality_floor": 1e-4}


@each_row(("way", "options"), product(("skip", "exit", "entropy"), ({"exit_confidence": 1.0}, FLOOR)))
def test_what_leaves_nothing_out_is_plain(engine: Text, other: Alone[Any], way: str, options: dict[str, float]) -> None:
    """Where the policy wants it so, and where a prompt diverges too far for the floor."""
    for most in (MOST,) if options is FLOOR else (1, 2, 9, MOST):
        engine.forget()
        expected, logits = plain(engine, most)
        sampler = Greedy()
        steps = ways(engine, other, sampler, **options)[way]
        assert reply(engine, steps, sampler, most) == expected
        assert all(map(np.array_equal, sampler.logits, logits))
        use = steps.compute
        assert use.lossless and use.reduced == 0 and use.tokens == most - 1
        assert use.stopped_at == (0 if options is FLOOR else None)


def test_two_models_take_turns(engine: Text, backend: Alone[Any], other: Alone[Any]) -> None:
    """Whoever's turn it is says what it would say of the text that there is."""
    sampler = Greedy()
    turns = [True, False, False, False, True, True, *[False] * 6, True, False, False, True, False, False, False]
    policy = Script(turns)
    steps = ModelSwitchDecoding(given(engine, sampler, chunk=4), ModelDrafter(*pair(other), 4), policy, 0.25)
    made = reply(engine, steps, sampler)
    text = [*PROMPT, *made]
    said = {}
    for name, model in ((True, backend), (False, other)):
        said[name] = read(model, text[:-1], list(range(len(PROMPT) - 1, len(text) - 1)))
    for place, (turn, logits) in enumerate(zip([True, *turns], sampler.logits, strict=True)):
        np.testing.assert_allclose(said[turn][len(PROMPT) - 1 + place], logits, rtol=1e-4, atol=1e-4)
    use = steps.compute
    assert (use.tokens, use.reduced, use.switches) == (MOST - 1, 14, 7)
    assert use.large_share == pytest.approx(5 / 19)
    assert use.parameter_share == pytest.approx((5 + 14 * 0.25) / 19)
    # The large model fed what it had missed in three turns.
    assert use.caught_up == 3 + 6 + 2
    assert len(policy.entropies) == MOST


def test_a_floor_gives_the_text_to_the_large_model(
    engine: Text, other: Alone[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    promising = DivergenceLimit(1e-3)
    promising.add(np.zeros(4, np.float32), np.zeros(4, np.float32))
    monkeypatch.setattr(
        ModelSwitchDecoding, "_try", lambda self, text, share: iter(self._limit.expect(promising) or ())
    )
    sampler = Greedy()
    parts = given(engine, sampler, quality_floor=1e-3)
    steps = ModelSwitchDecoding(parts, ModelDrafter(*pair(other), 4), Script([False] * 50), 0.25)
    reply(engine, steps, sampler, 45)
    use = steps.compute
    # It looks after four tokens, and stays.
    assert use.reduced == 4 and use.stopped_at == 4 and use.switches == 2
    assert use.sampled == 4 and use.divergence is not None and use.divergence > 1e-3


def test_what_the_small_model_has_no_room_for_is_the_large_ones(engine: Text) -> None:
    bundle = export("portable", num_hidden_layers=2, seed=9)
    short = ModelDrafter(*pair(make_backend("portable", bundle, 16)), 4)
    sampler = Greedy()
    steps = ModelSwitchDecoding(given(engine, sampler), short, Script([False] * 30), 0.25)
    reply(engine, steps, sampler)
    use = steps.compute
    assert use.reduced == 16 - len(PROMPT) and use.tokens == MOST - 1
