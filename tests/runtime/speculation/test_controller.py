"""What the controller drafts, given costs and drafters whose quality is known, and what it may risk in a reply."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.speculation.batch import BatchController
from edgeinfer.runtime.speculation.controller import DraftController, StochasticController
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from tests.runtime.speculation.prices import FLAT, LINEAR, STAIRS, Prices
from tests.runtime.speculation.prophets import (
    Boaster,
    Coin,
    Follower,
    Late,
    Prophet,
    Reader,
    Run,
    decode,
    learning,
    text_of,
)


def test_drafts_as_long_as_it_may_where_rows_are_free_and_guesses_right() -> None:
    text = text_of(400)
    run = decode([Prophet("copy", text, 1.0)], text, Prices(FLAT))
    assert max(run.sizes) == 16
    assert run.plain_ms / run.ms > 10


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


def test_drafts_keep_to_the_room_there_is() -> None:
    text = text_of(100)
    context = DraftContext(text[:10], lambda logits, drafted: (0, None), lambda drafted: ())
    drafter = Prophet("copy", text, 1.0)
    controller = DraftController([drafter], Prices(FLAT), learning([drafter]), 15)
    assert [len(run_alone(controller.draft(context, rows, 50))) for rows in (0, 1, 5)] == [0, 1, 5]
    assert [len(run_alone(controller.draft(context, 50, depth))) for depth in (0, 1, 5)] == [0, 1, 5]
    assert 5 < len(run_alone(controller.draft(context, 50, 50))) <= 15


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
    assert twice > len(hedged_twice.drafts) / 4


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


def loses_little(run: Run) -> bool:
    """Whether a reply is slower than plain decoding by no more than a hundredth and a quarter of a pass."""
    return run.ms <= 1.01 * run.plain_ms + 2.5 + 1e-9


# More rows cost a third of a pass, and asking a little more than what a token may be slower.
STEEP = Prices({rows: 10.0 if rows == 1 else 13.0 + rows / 10 for rows in range(1, 17)}, round_ms=0.13)


@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("passes", [FLAT, STAIRS, LINEAR], ids=["flat", "stairs", "linear"])
def test_is_never_slower_than_plain_decoding(right: float, passes: Mapping[int, float]) -> None:
    text = text_of(500)
    run = decode(
        [Prophet("copy", text, right), Prophet("model", text, right, seed=1)], text, Prices(passes, {"model": 3.0})
    )
    assert run.ms <= 1.03 * run.plain_ms


def test_guesses_leave_enough_for_the_draft_that_they_are_for() -> None:
    # What is saved by then pays for a guess or two with a pass over two rows, and longer drafts are out of reach.
    passes = {1: 10.0} | {rows: 10.7 + 0.3 * (rows - 1) for rows in range(2, 65)}
    text = text_of(60)
    model = Boaster("model", text, 0.0)
    run = decode([model], text, Prices(passes, {"model": 0.3}, 0.2), rests=True)
    assert any(len(draft) for draft in run.drafts)
    assert model.asked <= 2 * len(run.drafts)


def test_certain_tokens_are_drafted_at_once_and_likely_ones_once_something_was_saved() -> None:
    text = text_of(60)
    certain, likely = Prophet("forced", text, 1.0), Prophet("copy", text, 1.0)
    certain.priors, likely.priors = (0.3, 0.999), (0.3, 0.95)
    assert len(decode([certain], text, Prices(STAIRS)).drafts[0]) > 5
    assert len(decode([likely], text, Prices(STAIRS)).drafts[0]) == 1  # the row that padding pays for


def test_what_a_good_draft_risks_is_saved_up_for_and_not_spent_on_asking() -> None:
    text = text_of(160)
    sure = Prophet("copy", text, 0.9)
    sure.priors = (0.9, 0.9)
    run = decode([sure], text, STEEP, rests=True)
    assert run.ms < 0.5 * run.plain_ms
    wrong = Prophet("copy", text, 0.0)
    wrong.priors = (0.9, 0.9)
    assert loses_little(decode([wrong], text, STEEP, rests=True))


def test_tables_that_are_right_draft_early_and_those_that_are_not_lose_little() -> None:
    text = text_of(40)
    passes = {rows: 10.0 if rows == 1 else 10.8 + rows / 10 for rows in range(1, 17)}
    prices = Prices(passes, {"copy": 0.01, "model": 0.3}, 0.3)
    # Of the last, no more than the first tokens.
    for said, early in ((text, True), (text_of(40, 1), False), ([*text[:4], *text_of(36, 1)], True)):
        table, model = Prophet("copy", said, 1.0), Prophet("model", text, 0.0, seed=1)
        table.priors = model.priors = (0.9, 0.9)
        run = decode([table, model], text, prices, rests=True)
        assert (max(run.sizes[:4]) > 2) == early
        assert loses_little(run)


def test_asking_a_drafter_that_knows_nothing_leaves_what_its_first_draft_will_risk() -> None:
    text = text_of(60)
    late = Late("copy", text, 1.0)
    late.priors = (0.9, 0.9)
    run = decode([late], text, STEEP, rests=True)
    assert run.sizes[: Late.place - 1] == [1] * (Late.place - 1)
    assert max(run.sizes[Late.place - 1 : Late.place + 2]) > 5


def test_no_reply_however_short_loses_more_than_trying_may() -> None:
    for right, seed in product((0.0, 0.3, 0.6), range(20)):
        text = text_of(8, seed)
        prophet = Prophet("copy", text, right, seed=seed)
        prophet.priors = (0.9, 0.9)
        run = decode([prophet], text, Prices(STAIRS))
        assert loses_little(run)


def test_a_prompt_that_a_drafter_has_to_read_first_makes_no_short_reply_much_slower() -> None:
    """Rows are free, so a draft risks no more than its guess; reading the prompt takes a fifth of a pass."""
    prices = Prices(FLAT, {"model": 0.4}, 0.1, reading={"model": 0.01})
    for kind, length in product((DraftController, StochasticController), (4, 6, 12)):
        model = Reader("model", text_of(length), 0.0)
        model.priors = (0.9, 0.9)
        run = decode([model], text_of(length), prices, rests=True, kind=kind)
        assert loses_little(run), (kind, length)


def test_a_prompt_is_read_once_that_is_paid_for_or_so_short_that_little_is_lost() -> None:
    text = text_of(160)
    prices = Prices(FLAT, {"model": 0.4}, 0.1, reading={"model": 0.01})
    for kind in (DraftController, StochasticController):
        long, short = Reader("model", text, 0.9), Reader("model", text, 0.9)
        short.behind = 16
        gained = decode([long], text, prices, rests=True, kind=kind)
        assert gained.ms < 0.6 * gained.plain_ms and long.behind == 0
        assert sum(map(len, decode([short], text, prices, rests=True, kind=kind).drafts[:2])) > 0


def test_nothing_is_read_for_the_last_tokens_of_a_reply() -> None:
    """Tables have saved enough to pay for it, but nothing that it could gain is left."""
    text = text_of(60)
    table, model = Late("copy", text, 1.0), Reader("model", text, 0.9)
    table.place, table.priors = 1, (0.3, 0.9)
    model.behind = 2000
    decode([table, model], text, Prices(FLAT, {"copy": 0.01, "model": 0.4}, 0.1, reading={"model": 0.01}), rests=True)
    assert model.behind == 2000
    assert len(model.lengths) == len(set(model.lengths))  # a text may have to be copied to tell
