"""Replies of which a small model writes parts: whose turn it is, what each catches up with, what floors do."""

from __future__ import annotations

import numpy as np
import pytest

from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.layer_skip.entropy import ModelSwitchDecoding
from edgeinfer.runtime.layer_skip.strategy import DivergenceLimit, feed, whole_pass
from edgeinfer.runtime.speculation.drafters.model import ModelDrafter
from tests.runtime.layer_skip.conftest import MOST, PROMPT, Greedy, Script, given, reply
from tests.runtime.speculation.drafters.models import export, make_backend


def test_two_models_take_turns(engine: Engine, other: Backend) -> None:
    """Whoever's turn it is says what it would say of the text that there is."""
    backend, sampler = engine.backend, Greedy()
    turns = [True, False, False, False, True, True, *[False] * 6, True, False, False, True, False, False, False]
    policy = Script(turns)
    steps = ModelSwitchDecoding(given(backend, sampler, chunk=4), ModelDrafter(other, 4), policy, 0.25)
    made = reply(engine, steps, sampler)
    text = [*PROMPT, *made]
    said = {}
    for name, model in ((True, backend), (False, other)):
        model.cache.trim(0)
        rows = range(len(PROMPT) - 1, len(text) - 1)
        said[name] = {index: row.copy() for index, row in feed(whole_pass(model), text[:-1], 0, list(rows), 4)}
    for place, (turn, logits) in enumerate(zip([True, *turns], sampler.logits, strict=True)):
        np.testing.assert_allclose(said[turn][len(PROMPT) - 1 + place], logits, rtol=1e-4, atol=1e-4)
    use = steps.compute_use()
    assert (use.tokens, use.reduced, use.switches) == (MOST - 1, 14, 7)
    assert use.large_share == pytest.approx(5 / 19)
    assert use.parameter_share == pytest.approx((5 + 14 * 0.25) / 19)
    # The large model fed what it had missed in three turns.
    assert use.caught_up == 3 + 6 + 2
    assert len(policy.entropies) == MOST


def test_a_floor_gives_the_text_to_the_large_model(
    engine: Engine, other: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    promising = DivergenceLimit(1e-3)
    promising.add(np.zeros(4, np.float32), np.zeros(4, np.float32))
    monkeypatch.setattr(ModelSwitchDecoding, "_try", lambda self, share: self._limit.expect(promising))
    sampler = Greedy()
    parts = given(engine.backend, sampler, quality_floor=1e-3)
    steps = ModelSwitchDecoding(parts, ModelDrafter(other, 4), Script([False] * 50), 0.25)
    reply(engine, steps, sampler, 45)
    use = steps.compute_use()
    # It looks after four tokens, and stays.
    assert use.reduced == 4 and use.stopped_at == 4 and use.switches == 2
    assert use.sampled == 4 and use.divergence is not None and use.divergence > 1e-3


def test_what_the_small_model_has_no_room_for_is_the_large_ones(engine: Engine) -> None:
    bundle = export("portable", num_hidden_layers=2, seed=9)
    short = ModelDrafter(make_backend("portable", bundle, 16), 4)
    sampler = Greedy()
    steps = ModelSwitchDecoding(given(engine.backend, sampler), short, Script([False] * 30), 0.25)
    reply(engine, steps, sampler)
    use = steps.compute_use()
    assert use.reduced == 16 - len(PROMPT) and use.tokens == MOST - 1
