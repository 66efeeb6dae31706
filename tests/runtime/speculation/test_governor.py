"""What the governor drafts, given costs and drafters whose quality is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.decoding.strategy import SpeculationStatistics
from edgeinfer.runtime.profile.costs import Costs, DraftCosts, PassCosts
from edgeinfer.runtime.speculation.acceptance import Acceptance
from edgeinfer.runtime.speculation.company import CompanyGovernor
from edgeinfer.runtime.speculation.device import DeviceCosts
from edgeinfer.runtime.speculation.drafters.contract import (
    Draft,
    DraftContext,
    Drafter,
    Guess,
    Resumption,
    Round,
    State,
    Verdict,
)
from edgeinfer.runtime.speculation.governor import Governor, RoundCosts
from edgeinfer.runtime.speculation.stochastic_governor import StochasticGovernor
from edgeinfer.runtime.speculation.verification import verify_keyed
from tests.recorded import check_recorded
from tests.runtime.speculation.prices import FLAT, LINEAR, STAIRS, Prices


class Prophet(Drafter):
    """Knows the text and says the right token with a given probability; sign 1 where it is surer."""

    branches = True
    uses_target = False
    draws = False
    priors = (0.3, 0.7)

    def __init__(self, name: str, text: Sequence[int], right: float, *, seed: int = 0) -> None:
        self.name = name
        self.asked = 0
        self._text = text
        self._right = right
        self._seed = seed

    def begin(self, tokens: Sequence[int]) -> None:
        pass

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        self.asked += 1
        place = len(context.tokens) + len(drafted)
        if place >= len(self._text):
            return ()
        fortune = random.Random(f"{self._seed}-{place}")
        right = fortune.random() < self._right
        first = self._text[place] if right else self._text[place] + 1
        return [Guess((first + other) % 100, int(self._right > 0.5)) for other in range(width)]

    def resume(self, context: DraftContext, drafted: Sequence[int]) -> Resumption | None:
        return None

    def observe(self, round: Round) -> None:
        pass

    def nbytes(self) -> int:
        return 0

    def state(self) -> State:
        return {}

    def restore(self, state: State) -> None:
        pass

    def close(self) -> None:
        pass


class Coin(Prophet):
    """Knows two tokens for the first place of a draft, of which one is right, and does not know which."""

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        if drafted:
            return ()
        right, wrong = (Guess(self._text[len(context.tokens)] + other, 0) for other in (0, 1))
        return (right, wrong) if random.Random(len(context.tokens)).random() < 0.5 else (wrong, right)


class Late(Prophet):
    """Has nothing to say before a place of the text."""

    place = 40

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        return super().guesses(context, drafted, width) if len(context.tokens) >= self.place else ()


class Follower(Prophet):
    """Knows how a draft goes on that another began."""

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        return super().guesses(context, drafted, width) if drafted else ()


class Boaster(Prophet):
    """Is sure of a token that never comes."""

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Sequence[Guess]:
        self.asked += 1
        return [Guess(200, 1)]


@dataclass
class Truth:
    """The target's view where the target says the text."""

    text: Sequence[int]
    start: int
    draft: Draft

    def token(self, node: int) -> int:
        return self.text[self.start + len(self.draft.path(node))]


@dataclass
class Run:
    """What decoding a text came to."""

    governor: Governor
    sizes: list[int]
    ms: float
    drafts: list[Draft]
    passes: list[tuple[int, float]]

    @property
    def plain_ms(self) -> float:
        return 10.0 * sum(self.sizes)


def learning(drafters: Sequence[Prophet]) -> Acceptance:
    acceptance = Acceptance()
    for drafter in drafters:
        acceptance.add(drafter.name, drafter.priors)
    return acceptance


def decode(
    drafters: Sequence[Prophet],
    text: Sequence[int],
    prices: Prices,
    most: int = 15,
    width: int = 1,
    rests: bool = False,
    kind: type[Governor] = Governor,
    believed: RoundCosts | None = None,
) -> Run:
    """Decodes a text with perfect verification; times by the prices, which the governor knows if it believes no others.
    Plain steps are taken where it rests, if `rests`."""
    governor = kind(drafters, believed or prices, learning(drafters), most, width)
    context = DraftContext(list(text[:1]), lambda logits, drafted: (0, None), lambda drafted: ())
    run = Run(governor, [], 0.0, [], [])
    while len(context.tokens) < len(text):
        steps = min(governor.rest, len(text) - len(context.tokens)) if rests else 0
        if steps and governor.watches:
            steps = 1
            governor.watch(context)
            governor.watched(text[len(context.tokens)])
        if steps:
            governor.rested(steps)
            run.ms += steps * prices.pass_ms(1) + governor.watched_ms
            context.tokens.extend(text[len(context.tokens) : len(context.tokens) + steps])
            run.sizes += [1] * steps
            run.passes += [(1, prices.pass_ms(1))] * steps
            continue
        room = len(text) - len(context.tokens) - 1
        before = [d.asked for d in drafters]
        draft = governor.draft(context, room, room)
        asked = sum((d.asked - b) * prices.guess_ms(d.name) for d, b in zip(drafters, before, strict=True))
        run.passes.append((1 + len(draft), prices.pass_ms(1 + len(draft))))
        run.ms += run.passes[-1][1] + asked + prices.round_ms
        verdict: Verdict = verify_keyed(draft, Truth(text, len(context.tokens), draft))  # type: ignore[arg-type]
        committed = (*(draft.guesses[n].token for n in verdict.accepted), verdict.token)
        fed = np.array([context.tokens[-1], *draft.tokens])
        context.tokens.extend(committed)
        governor.observe(Round(draft, verdict, committed, fed, np.zeros((len(fed), 1), np.float32)))
        run.sizes.append(len(committed))
        run.drafts.append(draft)
    return run


def text_of(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}/{i}").randrange(90) for i in range(length)]


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
    governor = CompanyGovernor([drafter], steep, learning([drafter]), 15, 1, lambda: sharing)
    for _ in range(50):
        assert not governor.asks
        steps = governor.rest
        assert steps > 0
        governor.rested(steps)
    sharing = 2
    governor.rested(governor.rest)
    assert governor.asks and governor.rest == 0


@pytest.mark.parametrize("right", [0.0, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("passes", [FLAT, STAIRS, LINEAR], ids=["flat", "stairs", "linear"])
def test_is_never_slower_than_plain_decoding(right: float, passes: Mapping[int, float]) -> None:
    text = text_of(500)
    run = decode(
        [Prophet("copy", text, right), Prophet("model", text, right, seed=1)], text, Prices(passes, {"model": 3.0})
    )
    assert run.ms <= 1.03 * run.plain_ms


def test_a_row_that_padding_pays_for_is_drafted_whatever_its_chance() -> None:
    text = text_of(300)
    run = decode([Prophet("copy", text, 0.3)], text, Prices(STAIRS))
    assert min(len(draft) for draft in run.drafts[50:-2]) >= 1
    assert run.plain_ms / run.ms > 1.25


def test_takes_the_better_drafter_and_pays_for_it_only_where_it_must() -> None:
    text = text_of(600)
    cheap, dear = Prophet("copy", text, 0.1), Prophet("model", text, 0.95, seed=1)
    run = decode([cheap, dear], text, Prices(STAIRS, {"model": 1.0}))
    assert run.plain_ms / run.ms > 2
    sure, dear = Prophet("copy", text, 0.99), Prophet("model", text, 0.95, seed=1)
    decode([sure, dear], text, Prices(STAIRS, {"model": 1.0}))
    assert dear.asked < 60


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
    governor = Governor([drafter], Prices(FLAT), learning([drafter]), 15)
    assert [len(governor.draft(context, rows, 50)) for rows in (0, 1, 5)] == [0, 1, 5]
    assert [len(governor.draft(context, 50, depth)) for depth in (0, 1, 5)] == [0, 1, 5]
    assert 5 < len(governor.draft(context, 50, 50)) <= 15


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
    for kind, passes, guess_ms in product((Governor, StochasticGovernor), (FLAT, STAIRS), (0.0, 1.0)):
        prices = Prices(passes, {"model": guess_ms})
        chain, *wide = (
            decode([Prophet("model", text, 0.8)], text, prices, width=width, kind=kind).ms for width in (1, 2, 3)
        )
        assert max(wide) <= 1.02 * chain, (kind, passes is FLAT, guess_ms)


def test_guesses_leave_enough_for_the_draft_that_they_are_for() -> None:
    # What is saved by then pays for a guess or two beside a pass over two rows, and longer drafts are out of reach.
    passes = {1: 10.0} | {rows: 10.7 + 0.3 * (rows - 1) for rows in range(2, 65)}
    text = text_of(60)
    model = Boaster("model", text, 0.0)
    run = decode([model], text, Prices(passes, {"model": 0.3}, 0.2), rests=True)
    assert any(len(draft) for draft in run.drafts)
    assert model.asked <= 2 * len(run.drafts)


def test_the_same_costs_and_texts_give_the_same_decisions() -> None:
    text = text_of(150)
    found = {}
    for passes, right, width, rests in ((STAIRS, 0.6, 1, False), (LINEAR, 0.9, 2, True), (FLAT, 0.3, 3, False)):
        drafters = [Prophet("copy", text, right), Prophet("model", text, 0.8, seed=1)]
        prices = Prices(passes, {"copy": 0.01, "model": 1.5}, 0.2)
        run = decode(drafters, text, prices, most=7, width=width, rests=rests)
        drafts = [" ".join(map(str, [*draft.parents, *draft.sources])) for draft in run.drafts]
        found[f"{right} {width}"] = {"ms": run.ms, "sizes": run.sizes, "drafts": drafts}
    check_recorded("governed", found)


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


def test_certain_tokens_are_drafted_at_once_and_likely_ones_once_something_was_saved() -> None:
    text = text_of(60)
    certain, likely = Prophet("forced", text, 1.0), Prophet("copy", text, 1.0)
    certain.priors, likely.priors = (0.3, 0.999), (0.3, 0.95)
    assert len(decode([certain], text, Prices(STAIRS)).drafts[0]) > 5
    assert len(decode([likely], text, Prices(STAIRS)).drafts[0]) == 1  # the row that padding pays for


def test_what_a_good_draft_risks_is_saved_up_for_and_not_spent_on_asking() -> None:
    """More rows cost a third of a pass, and asking a little more than what a token may be slower."""
    text = text_of(160)
    steep = Prices({rows: 10.0 if rows == 1 else 13.0 + rows / 10 for rows in range(1, 17)}, round_ms=0.13)
    sure = Prophet("copy", text, 0.9)
    sure.priors = (0.9, 0.9)
    run = decode([sure], text, steep, rests=True)
    assert run.ms < 0.5 * run.plain_ms
    wrong = Prophet("copy", text, 0.0)
    wrong.priors = (0.9, 0.9)
    assert decode([wrong], text, steep, rests=True).ms <= 1.0101 * 10.0 * (len(text) - 1)


def test_tables_that_were_right_about_plain_steps_draft_early_and_lose_little() -> None:
    text = text_of(40)
    passes = {rows: 10.0 if rows == 1 else 10.8 + rows / 10 for rows in range(1, 17)}
    prices = Prices(passes, {"copy": 0.01, "model": 0.3}, 0.3)
    for right, early in ((1.0, True), (0.0, False)):
        table, model = Prophet("copy", text, right), Prophet("model", text, 0.0, seed=1)
        table.priors = model.priors = (0.9, 0.9)
        run = decode([table, model], text, prices, rests=True)
        assert (max(run.sizes[:4]) > 2) == early
        assert run.ms <= 1.0151 * run.plain_ms
    # A reply that goes on otherwise than two right guesses promised loses what they were lent, and not much more.
    turning = Prophet("copy", [*text[:4], *text_of(36, 1)], 1.0)
    turning.priors = (0.9, 0.9)
    run = decode([turning], text, prices, rests=True)
    assert len(run.drafts[0]) > 2
    assert run.ms <= run.plain_ms + 0.25 * 10.0


def test_asking_a_drafter_that_knows_nothing_leaves_what_its_first_draft_will_risk() -> None:
    text = text_of(60)
    steep = Prices({rows: 10.0 if rows == 1 else 13.0 + rows / 10 for rows in range(1, 17)}, round_ms=0.13)
    late = Late("copy", text, 1.0)
    late.priors = (0.9, 0.9)
    run = decode([late], text, steep, rests=True)
    assert run.sizes[: Late.place - 1] == [1] * (Late.place - 1)
    assert max(run.sizes[Late.place - 1 : Late.place + 2]) > 5


def test_no_reply_however_short_ends_up_slower() -> None:
    for right, seed in product((0.0, 0.3, 0.6), range(20)):
        text = text_of(8, seed)
        prophet = Prophet("copy", text, right, seed=seed)
        prophet.priors = (0.9, 0.9)
        run = decode([prophet], text, Prices(STAIRS))
        assert run.ms <= 1.0101 * run.plain_ms


class Kept:
    """Costs that an earlier session measured, of a model with room for any pass."""

    def __init__(self, passes: PassCosts) -> None:
        self.kept = Costs(passes, DraftCosts({"copy": 0.0}, 0.0), "", "")
        self.cache, self.capacity = self, 4096

    def costs(self) -> Costs:
        return self.kept

    def arrays(self, name: str) -> None:
        return None


def test_what_guesses_cost_follows_the_rounds_of_replies() -> None:
    kept = Kept(PassCosts(((1, 10.0), (2, 11.0))))
    kept.kept = Costs(kept.kept.passes, DraftCosts({"model": 4.0}, 0.0), "", "")
    costs = DeviceCosts(kept, kept, False, 1, lambda name: Prophet(name, (), 0.0))  # type: ignore[arg-type]
    costs.prepare()
    text = text_of(60)
    run = decode([Prophet("model", text, 1.0)], text, Prices(FLAT, {"model": 0.5}))
    assert {name for name, _ in run.governor.timed_guesses} == {"model"}
    statistics = SpeculationStatistics()
    for ms in (0.4, 0.5, 30.0, 0.6, 0.5) * 8:
        statistics.add_guesses([("model", ms - 0.1), ("model", ms + 0.1), ("gone", 1.0)])
    costs.learn(statistics)
    assert costs.of([]).guess_ms("model") == pytest.approx(0.5, abs=0.2)
    costs.learn(SpeculationStatistics(timed_guesses={"model": [9.0, 9.0]}))
    assert costs.of([]).guess_ms("model") < 1.0


def test_what_tokens_take_besides_their_passes_follows_replies() -> None:
    kept = Kept(PassCosts(((1, 10.0), (2, 11.0))))
    saved: list[Costs] = []
    kept.save_costs = saved.append  # type: ignore[attr-defined]
    costs = DeviceCosts(kept, kept, False, 1, lambda name: Prophet(name, (), 0.0))  # type: ignore[arg-type]
    costs.prepare()
    costs.learn_beside([0.1] * 4)
    costs.save()
    assert not saved, "so few tokens tell nothing"
    costs.learn_beside([0.1, 0.1, 30.0, 0.1, 0.1])
    costs.save()
    assert saved[-1].drafts.token_ms == 0.1
    costs.learn_beside([0.2] * 9)
    costs.save()
    assert 0.1 < (saved[-1].drafts.token_ms or 0.0) < 0.2
    kept.kept = saved[-1]
    again = DeviceCosts(kept, kept, False, 1, lambda name: Prophet(name, (), 0.0))  # type: ignore[arg-type]
    again.prepare()
    again.save()
    assert len(saved) == 2, "what was kept is known again"


@pytest.mark.slow
def test_costs_measured_in_a_busy_moment_follow_what_the_session_measures() -> None:
    """By what was kept every row costs a pass, and no draft pays; in truth few rows cost hardly more than one."""
    quiet = Prices({rows: 10.0 + 0.3 * (rows - 1) + 1.2 * max(0, rows - 4) for rows in range(1, 65)})
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
    for share, right in product((1.0, 3.0), (0.6, 0.95)):
        busy = Kept(PassCosts(tuple((rows, 5.0 + 10.0 * share * rows) for rows in sizes)))
        costs = DeviceCosts(busy, busy, False, 16, lambda name: Prophet(name, (), 0.0))  # type: ignore[arg-type]
        costs.prepare()
        taken, best = 0.0, 0.0
        for reply in range(12):
            text = text_of(150, reply)
            prophets = [Prophet("copy", text, right, seed=reply) for _ in range(2)]
            run = decode(prophets[:1], text, quiet, rests=True, believed=costs.of([]))
            costs.learn(SpeculationStatistics(timed_passes=run.passes))
            # What is not known yet may cost little.
            assert run.ms <= 1.03 * run.plain_ms
            if reply >= 6:
                taken += run.ms
                best += decode(prophets[1:], text, quiet, rests=True).ms
        assert taken <= 1.06 * best, (share, right)
        known = costs.of([])
        for rows in range(1, 1 + known.confirmed):
            assert known.pass_ms(rows) == pytest.approx(quiet.pass_ms(rows), rel=0.1), (share, right, rows)
