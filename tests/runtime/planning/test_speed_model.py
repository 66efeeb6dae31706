"""How fast a configuration is taken to be: by costs of passes, caches, disks and tokens, measured or guessed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from edgeinfer.config import LoadConfig
from edgeinfer.drafting import drafters_in
from edgeinfer.runtime.planning import planner as planner_module
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.plan_input import Configuration, PlanInput
from edgeinfer.runtime.planning.planner import make_plan, speed_model
from edgeinfer.runtime.planning.speed_model import REPLY_TOKENS, SpeedModel, cache_ms, guessed_passes, token_beside_ms
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from tests.runtime.planning.conftest import PACE, PROCESS, Measured, pace_of, plan_input_of
from tests.tables import each_row


@pytest.mark.parametrize("timed", [("",), ("int4",), ("", "int4")])
def test_rows_of_four_bits_take_longer_whichever_type_was_timed(plan_input: PlanInput, timed: tuple[str, ...]) -> None:
    """Also where those of the usual type were timed in a slower moment."""
    moments = {"": 1.3, "int4": 0.8}

    def profiles(variant: str, *, draft_model: bool) -> DeviceProfile:
        return Measured(moments[variant]) if variant in timed and not draft_model else DeviceProfile(None)

    speed = speed_model(plan_input, profiles)
    token_ms = {
        kv: 1e3 / speed.speed(_configuration(kv=kv, draft_max=0)).tokens_per_second for kv in plan_input.kv_types
    }
    geometry = plan_input.manifest.geometry
    more = cache_ms(geometry, "int4") - cache_ms(geometry, "float32")
    assert more > 0
    assert token_ms["int4"] - token_ms["float32"] == pytest.approx(more)
    assert token_ms["int8"] < token_ms["int4"]


def test_speed_follows_measured_costs_and_the_draft_that_pays() -> None:
    steep = dataclasses.replace(PACE, passes=PassCosts(((1, 10.0), (2, 40.0), (64, 900.0))))
    c = _configuration(draft_max=15)
    # Two rows cost four times one: no draft pays, so drafters are asked in vain, which does not decide who drafts.
    asked, plain = map(SpeedModel(lambda configuration: steep).speed, (c, dataclasses.replace(c, draft_max=0)))
    assert plain.tokens_per_second == pytest.approx(100)
    assert 99 < asked.tokens_per_second < 100 and asked.turn_ms == plain.turn_ms
    # Asking takes more than 0.4 of a pass: "auto" asks none.
    small = SpeedModel(lambda configuration: dataclasses.replace(PACE, passes=PassCosts(((1, 0.7), (2, 2.8)))))
    assert small.speed(c) == small.speed(dataclasses.replace(c, draft_max=0))
    # Copies pay for three tokens (0.8 + 0.64 + 0.512) where four rows cost what one does, and cover 0.3 of the rounds.
    copying = dataclasses.replace(c, drafters=("copy",), draft_max=3)
    ms = 10 + 0.3 + 0.01 + 0.3 * (0.5 + 3 * 0.01)
    assert SpeedModel(pace_of).speed(copying).tokens_per_second == pytest.approx(1e3 * (1 + 0.3 * 1.952) / ms)
    streamed = dataclasses.replace(c, weights="streamed", window_layers=1)
    assert SpeedModel(pace_of).speed(streamed).tokens_per_second < 30
    assert guessed_passes(240_000_000).ms(1) == pytest.approx(20)


def _configuration(**changes: Any) -> Configuration:
    base = Configuration(2048, 64, "float32", "mapped", 0, drafters_in("auto"), 15, "kept")
    return dataclasses.replace(base, **changes)


@each_row("known", [True, False])
def test_weights_that_do_not_stay_come_at_the_rate_of_the_disk(
    plan_input: PlanInput, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """In part where the system keeps a part, all of them where it keeps little; as an SSD's while it is not known."""
    weights = plan_input.manifest.weight_bytes
    rate = weights / 2 if known else None

    def profiles(variant: str, *, draft_model: bool) -> DeviceProfile:
        return DeviceProfile(None) if variant else Measured(1.0)

    monkeypatch.setattr(planner_module, "kept_rate", lambda path: rate)
    speed = speed_model(plan_input, profiles)

    def planned(free: int) -> MemoryPlan:
        monkeypatch.setattr(planner_module, "free_memory", lambda mapped=0: free)
        config = LoadConfig(speculation="off", weights="mapped", context=2048)
        return make_plan(plan_input, config, speed, process=PROCESS)

    whole = planned(10**9)
    beside = whole.footprint.beside_weights
    assert whole.disk is None and beside + weights < 10**9
    part, none = planned(beside + round(0.9 * weights) + 4_000_000), planned(0)
    assert part.disk is not None and none.disk is not None
    assert part.disk.room < part.disk.weights and none.disk.room == 0
    assert none.to_dict()["speed"]["disk_bytes_per_second"] == rate
    token_ms = [1e3 / plan.speed.tokens_per_second for plan in (whole, part, none)]
    # Passes that were timed may have read from the disk already, so the disk alone bounds them.
    disk_ms = 1e3 * none.disk.weights / none.disk.taken_rate
    assert token_ms[0] <= token_ms[1] <= token_ms[2]
    assert token_ms[2] >= disk_ms
    if rate is not None:
        assert token_ms[0] < token_ms[1] and token_ms[2] == pytest.approx(disk_ms, rel=0.1)


def test_caches_make_room_for_weights_where_the_system_is_short_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget that holds a larger cache is no reason to take it, if the file would then come from the disk again."""
    plan_input = dataclasses.replace(plan_input_of(65_536))
    monkeypatch.setattr(planner_module, "kept_rate", lambda path: plan_input.manifest.weight_bytes)
    speed = speed_model(plan_input, lambda variant, *, draft_model: Measured(1.0))

    def planned(free: int, **options: Any) -> MemoryPlan:
        monkeypatch.setattr(planner_module, "free_memory", lambda mapped=0: free)
        config = LoadConfig(speculation="off", context=65_536, weights="mapped", **options)
        return make_plan(plan_input, config, speed, process=PROCESS)

    modest = planned(10**9, kv="int8").footprint.beside_weights
    budget = planned(10**9).planned_bytes - 1
    roomy, short = (
        planned(free, memory=budget) for free in (10**9, modest + plan_input.manifest.weight_bytes + 4_000_000)
    )
    assert (roomy.configuration.kv, short.configuration.kv) == ("float32", "int8")
    assert roomy.disk is None and short.disk is None


def test_tokens_take_time_besides_their_rounds() -> None:
    pace = dataclasses.replace(PACE, prospects=(), beside_ms=0.5)
    configuration = _configuration(draft_max=0, drafters=())
    without = SpeedModel(lambda _: dataclasses.replace(pace, beside_ms=0.0)).speed(configuration)
    found = SpeedModel(lambda _: pace).speed(configuration)
    assert 1e3 / found.tokens_per_second == pytest.approx(1e3 / without.tokens_per_second + 0.5)
    assert found.turn_ms == pytest.approx(without.turn_ms + REPLY_TOKENS * 0.5)
    assert token_beside_ms(150_000) > 2 * token_beside_ms(4_000)


@pytest.mark.parametrize(
    ("usual", "own", "expected"),
    [(0.05, 0.5, 0.05), (0.05, None, 0.05), (None, 0.5, 0.5), (None, None, None)],
    ids=["both told", "the usual variant told", "the variant itself told", "none told"],
)
def test_tokens_take_what_replies_told(
    plan_input: PlanInput, usual: float | None, own: float | None, expected: float | None
) -> None:
    """A variant's own replies tell only where those of the usual one do not; where none do, a guess is left."""
    told = {"": usual, "int8": own}

    def token_ms(kv: str, pace: Callable[[float | None], DeviceProfile]) -> float:
        speed = speed_model(plan_input, lambda variant, **_: pace(told[variant]))
        return 1e3 / speed.speed(_configuration(kv=kv, draft_max=0, drafters=())).tokens_per_second

    passes = token_ms("int8", lambda _: Measured(1.0, 0.0))
    guess = token_beside_ms(plan_input.manifest.geometry.vocab_size)
    found = token_ms("int8", functools.partial(Measured, 1.0)) - passes
    assert found == pytest.approx(guess if expected is None else expected)
