"""What the controller drafts, given costs and drafters whose quality is known."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.speculation.batch import BatchController
from edgeinfer.runtime.speculation.controller import DraftController
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.stochastic_controller import StochasticController
from tests.runtime.speculation.prices import FLAT, LINEAR, STAIRS, Prices
from tests.runtime.speculation.prophets import Coin, Follower, Prophet, decode, learning, text_of


def test_drafts_as_long_as_it_may_where_rows_are_free_and_guesses_right() -> None:
    text = text_of(400)
    run = decode([Prophet("copy", text, 1.0)], text, Prices(FLAT))
    assert max(run.sizes) == 16
    assert run.plain_ms / run.ms > 10


def test_drafts_nothing_where_every_row_costs_a_pass() -> None:
    text = text_of(200)
    run = decode([Prophet("copy", text, 0.9)], text, Prices(LINEAR))
    assert run.ms <= 1.001 * run.plain_ms
    assert sum(len(draft) for draft in run.drafts) == 0


@pytest.mark.slow
def test_beside_many_texts_no_drafter_is_asked_before_some_of_them_have_ended() -> None:
    text, sharing = text_of(100), 8
    drafter = Prophet("copy", text, 1.0)
    steep = Prices({rows: 10.0 + 4.0 * max(0, rows - 4) for rows in range(1, 65)})  # a row costs more than an eighth
    controller = BatchController([drafter], steep, learning([drafter]), 15, 1, lambda: sharing)
    for _ in range(50):
        assert not controller.asks
        steps = controller.rest
        assert steps > 0
        controller.rested(steps)
    sharing = 2
    controller.rested(controller.rest)
    assert controller.asks and controller.rest == 0


def test_a_row_that_padding_pays_for_is_drafted_whatever_its_chance() -> None:
    text = text_of(300)
    run = decode([Prophet("copy", text, 0.3)], text, Prices(STAIRS))
    assert min(len(draft) for draft in run.drafts[50:-2]) >= 1
    assert run.plain_ms / run.ms > 1.25


def test_takes_the_better_drafter_and_pays_for_it_only_where_it_must() -> None:
    text = text_of(600)
    cheap, costly = Prophet("copy", text, 0.1), Prophet("model", text, 0.95, seed=1)
    run = decode([cheap, costly], text, Prices(STAIRS, {"model": 1.0}))
    assert run.plain_ms / run.ms > 2
    sure, costly = Prophet("copy", text, 0.99), Prophet("model", text, 0.95, seed=1)
    decode([sure, costly], text, Prices(STAIRS, {"model": 1.0}))
    assert costly.asked < 60


def test_a_costly_drafter_that_is_always_wrong_is_given_up_and_tried_again_now_and_then() -> None:
    text = text_of(2000)
    wrong = Prophet("model", text, 0.0)
    wrong.priors = (0.8, 0.8)
    run = decode([wrong], text, Prices(STAIRS, {"model": 4.0}))
    assert run.ms <= 1.03 * run.plain_ms
    assert wrong.asked > 2


def test_drafts_keep_to_the_room_there_is() -> None:
    text = text_of(100)
    context = DraftContext(text[:10], lambda logits, drafted: (0, None), lambda drafted: ())
    drafter = Prophet("copy", text, 1.0)
    controller = DraftController([drafter], Prices(FLAT), learning([drafter]), 15)
    assert [len(controller.draft(context, rows, 50)) for rows in (0, 1, 5)] == [0, 1, 5]
    assert [len(controller.draft(context, 50, depth)) for depth in (0, 1, 5)] == [0, 1, 5]
    assert 5 < len(controller.draft(context, 50, 50)) <= 15


def test_trees_hedge_where_rows_are_free() -> None:
    text = text_of(400)
    chain = decode([Prophet("copy", text, 0.0)], text, Prices(FLAT))
    hedged = Prophet("copy", [t - 1 for t in text], 1.0)  # its second guess is right
    tree = decode([hedged], text, Prices(FLAT), width=2)
    assert not all(draft.is_chain for draft in tree.drafts)
    assert tree.ms < 0.6 * chain.ms
    # Behind each of two first tokens that are as likely a costly drafter goes on.
    drafters = [Coin("copy", text, 0.0), Follower("model", text, 0.95)]
    hedged_twice = decode(drafters, text, Prices(FLAT, {"model": 1.0}), width=2)
    twice = 0
    for draft in hedged_twice.drafts:
        asked = {parent for parent, by in zip(draft.parents, draft.sources, strict=True) if by == "model"}
        twice += sum(draft.sources[node] == "copy" for node in asked) == 2
    assert twice > len(hedged_twice.drafts) / 3


def test_wide_drafts_are_as_fast_as_chains_where_no_second_guess_is_right() -> None:
    text = text_of(500)
    for kind, passes, guess_ms in product((DraftController, StochasticController), (FLAT, STAIRS), (0.0, 1.0)):
        prices = Prices(passes, {"model": guess_ms})
        chain, *wide = (
            decode([Prophet("model", text, 0.8)], text, prices, width=width, kind=kind).ms for width in (1, 2, 3)
        )
        assert max(wide) <= 1.02 * chain, (kind, passes is FLAT, guess_ms)


@settings(max_examples=25, deadline=None)
@given(
    right=st.floats(0, 1),
    steps=st.lists(st.floats(0, 5), min_size=16, max_size=16),
    width=st.integers(1, 3),
    price=st.floats(0, 3),
)
def test_whatever_the_costs_drafts_are_trees_within_bounds(
    right: float, steps: list[float], width: int, price: float
) -> None:
    passes = {rows + 1: 10.0 + sum(steps[:rows]) for rows in range(16)}
    text = text_of(60)
    run = decode([Prophet("copy", text, right)], text, Prices(passes, {"copy": price}), width=width)
    for draft in run.drafts:
        assert len(draft) <= 15
        assert all(parent < node for node, parent in enumerate(draft.parents))
    assert run.ms <= 1.1 * run.plain_ms + 16 * price
