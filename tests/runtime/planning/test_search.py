"""What is chosen within a budget: the best that fits, nothing the caller fixed changed, and a useful refusal."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.manifest import CacheQuality, QualityRecord
from edgeinfer.core.errors import BudgetError, ContextLengthError, UsageError
from edgeinfer.core.options.decoding import drafters_in
from edgeinfer.core.options.load import COUNTED, CountedPages, KvType, LoadOptions
from edgeinfer.runtime.planning.candidates import configurations
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration
from edgeinfer.runtime.planning.memory_model import MemoryModel
from edgeinfer.runtime.planning.plan import NOTHING_GIVEN_UP, Alternative, MemoryPlan
from edgeinfer.runtime.planning.search import drafting_ways, search
from edgeinfer.runtime.planning.speed_model import Pace, SpeedModel, speed_model
from edgeinfer.runtime.profile.costs import PassCosts, Prospect
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.profile.settings import TunedSettings
from tests.runtime.planning.conftest import PACE, PASSES, PLAIN, PROCESS, Large, Measured, facts_of, pace_of, plan


@pytest.fixture(scope="module")
def free(facts: BundleFacts) -> MemoryPlan:
    """The plan without a budget."""
    return plan(facts)


def test_without_a_budget_nothing_is_given_up(free: MemoryPlan) -> None:
    c = free.configuration
    assert (c.context, c.prefill_chunk, c.kv, c.weights, c.draft_max) == (8192, 64, "float32", "mapped", 15)
    assert (c.drafters, c.tokenizer, free.given_up, free.fits) == (drafters_in("auto"), "kept", (), True)
    assert free.minimum_bytes < free.planned_bytes


def test_a_large_budget_gives_up_nothing_and_a_small_one_says_what(facts: BundleFacts, free: MemoryPlan) -> None:
    assert plan(facts, memory=free.planned_bytes).configuration == free.configuration
    tight = plan(facts, memory=free.minimum_bytes)
    assert tight.fits and len(tight.given_up) >= 4
    assert any("lossy" in text for text in tight.given_up)


@pytest.mark.slow
def test_a_long_context_gives_way_before_anything_else(facts: BundleFacts, free: MemoryPlan) -> None:
    whole = free.configuration
    usual = plan(facts, context=2048)
    for context, budget in ((8192, free.planned_bytes), (4096, free.planned_bytes - 1), (2048, usual.planned_bytes)):
        found = plan(facts, memory=budget)
        assert found.configuration == dataclasses.replace(whole, context=context)
        assert found.given_up == (() if context == 8192 else (f"context {context} instead of 8192",))
    # What fitted with the usual context has it, whatever else was given up.
    for share in (0.2, 0.6, 0.9):
        budget = round(usual.minimum_bytes + share * (usual.planned_bytes - usual.minimum_bytes))
        had, has = plan(facts, memory=budget, context=2048), plan(facts, memory=budget)
        assert not had.fits or (has.context >= 2048 and has.configuration.kv == had.configuration.kv)


def test_a_context_that_was_not_asked_for_is_as_long_as_free_memory_allows(facts: BundleFacts) -> None:
    sizes = {context: plan(facts, context=context).planned_bytes for context in (2048, 4096, 8192)}
    for context, free in ((8192, sizes[8192]), (4096, sizes[8192] - 1), (2048, sizes[4096] - 1), (2048, 0)):
        found = plan(facts, free=free)
        assert found.context == context and found.fits and found.configuration.kv == "float32"
        assert found.given_up == (() if context == 8192 else (f"context {context} instead of 8192",))
    listed = plan(facts, all_ways=True, free=sizes[8192] - 1)
    whole = next(way for way in listed.alternatives if way.name == NOTHING_GIVEN_UP)
    assert listed.context == 4096 and (whole.configuration.context, whole.fits) == (8192, False)
    # What was asked for is not judged.
    assert plan(facts, free=0, context=8192).context == 8192
    assert plan(facts, free=0, memory=sizes[8192]).context == 8192
    short = facts_of(3000)
    assert [plan(short, free=free).context for free in (10**12, 0)] == [3000, 2048]


def test_tables_for_grammars_are_smaller_where_memory_is_short(facts: BundleFacts, free: MemoryPlan) -> None:
    found = plan(facts, structured=True)
    assert found.configuration.grammars == "sliced" and free.configuration.grammars == "none"
    assert found.planned_bytes - free.planned_bytes == found.terms["grammars"]
    tight = plan(facts, structured=True, memory=found.minimum_bytes)
    assert tight.fits and tight.configuration.grammars == "plain"
    assert tight.terms["grammars"] < found.terms["grammars"]
    assert "slower masks in strings of replies by a grammar" in tight.given_up


fixed_options = st.fixed_dictionaries(
    {},
    optional={
        "structured": st.booleans(),
        "context": st.sampled_from([128, 1000, 4096]),
        "kv": st.sampled_from(["float32", "int8", "int4"]),
        "weights": st.sampled_from(["mapped", "streamed"]),
        "prefill_chunk": st.integers(1, 200),
        "speculation": st.sampled_from(["off", "auto", "copy", "copy,recycle"]),
        "draft_max": st.integers(1, 63),
        "prefix_cache": st.integers(0, 30_000_000),
        "counted": st.sampled_from(COUNTED),
    },
)


@settings(deadline=None, max_examples=12)
@given(fixed=fixed_options, share=st.floats(0, 1))
def test_what_is_fixed_stays_and_what_fits_is_found(facts: BundleFacts, fixed: dict[str, Any], share: float) -> None:
    free = plan(facts, **fixed)
    budget = round(free.minimum_bytes + share * (free.planned_bytes - free.minimum_bytes))
    found = plan(facts, memory=budget, **fixed)
    assert found.fits and found.planned_bytes <= budget
    c = found.configuration
    for name, value in fixed.items():
        if name in ("context", "kv", "weights"):
            assert getattr(c, name) == value
    if "prefill_chunk" in fixed:
        assert c.prefill_chunk == min(fixed["prefill_chunk"], c.context)
    if "draft_max" in fixed and fixed.get("speculation") != "off":
        assert c.draft_max == fixed["draft_max"]
    if fixed.get("speculation", "auto") != "auto":
        assert set(c.drafters) == set(drafters_in(fixed["speculation"]))
    config = LoadOptions(**fixed)
    drafts = drafting_ways(facts, config, Large(facts, config, PROCESS), SpeedModel(pace_of))
    assert c in set(configurations(facts, config, drafts))


def test_weights_of_a_context_that_is_fixed_are_streamed_only_where_nothing_else_fits(facts: BundleFacts) -> None:
    resident = plan(facts, weights="mapped", context=2048).minimum_bytes
    assert plan(facts, memory=resident, context=2048).configuration.weights == "mapped"
    streamed = plan(facts, memory=resident - 1, context=2048)
    assert streamed.configuration.weights == "streamed" and streamed.configuration.window_layers
    mapped = plan(facts, memory=resident, context=2048)
    assert streamed.speed.tokens_per_second < mapped.speed.tokens_per_second
    # Pages of files do not count here, so there is no need to drop any.
    anonymous = plan(facts, memory=plan(facts, counted="anonymous").minimum_bytes, counted="anonymous")
    assert anonymous.configuration.weights == "mapped"


def test_the_head_alone_is_streamed_where_a_little_is_missing(facts: BundleFacts) -> None:
    layers = facts.manifest.geometry.num_layers

    def windows(facts: BundleFacts, **options: Any) -> list[int]:
        every = configurations(facts, LoadOptions(context=64, **options), PLAIN)
        return list(dict.fromkeys(each.window_layers for each in every))

    assert windows(facts) == [0, 2, 1, layers]
    assert windows(facts, weights="streamed") == [2, 1, layers]
    assert windows(dataclasses.replace(facts, layout="portable")) == [0, 2, 1]
    resident = plan(facts, weights="mapped", context=2048).minimum_bytes
    tight = plan(facts, memory=resident - 1, context=2048)
    assert "output head streamed instead of mapped" in tight.given_up


def test_drafts_shrink_to_nothing_with_the_budget(facts: BundleFacts) -> None:
    facts = dataclasses.replace(facts)
    fixed: dict[str, Any] = {"context": 64, "kv": "int8", "weights": "mapped", "prefill_chunk": 16}
    most, least = (plan(facts, speculation=who, **fixed).planned_bytes for who in ("auto", "off"))
    plans = [plan(facts, memory=size, **fixed) for size in range(most, least - 1, -(most - least) // 60)]
    assert {0, 1, 3} <= {found.draft_max for found in plans} and plans[-1].terms.get("drafting", 0) >= 0
    taken = [found.terms.get("drafting", 0) for found in plans]
    assert taken[0] == max(taken) and all(found.fits for found in plans)


def test_four_bits_are_only_for_who_asks(facts: BundleFacts) -> None:
    assert {c.kv for c in configurations(facts, LoadOptions(), PLAIN)} == {"float32", "int8"}
    assert plan(facts, kv="int4").configuration.kv == "int4"
    assert plan(facts, kv="int4").planned_bytes < plan(facts, kv="int8").planned_bytes < plan(facts).planned_bytes


@pytest.mark.parametrize(("int8", "int4"), [(0.0004, 0.004), (0.0004, 0.03), (0.02, 0.5), (0.02, 0.004), (None, None)])
def test_caches_are_chosen_by_what_they_were_measured_to_add(
    facts: BundleFacts, int8: float | None, int4: float | None
) -> None:
    kinds: tuple[tuple[KvType, float | None], ...] = (("int8", int8), ("int4", int4))
    caches = tuple(CacheQuality(kv, more) for kv, more in kinds if more is not None)
    added = {str(each.kv_type): each.divergence for each in caches}
    quality = QualityRecord(256, 0.02, 0.9, caches) if caches else None
    manifest = dataclasses.replace(facts.manifest, quality=quality)
    known = dataclasses.replace(facts, bundle=dataclasses.replace(facts.bundle, manifest=manifest))
    least = {kv: plan(known, kv=kv).minimum_bytes for kv in known.kv_types}
    allowed = {kv for kv in known.kv_types if added.get(kv, {"int4": 1.0}.get(kv, 0.0)) <= 0.01}
    smallest = min(allowed, key=lambda kv: least[kv])
    tight = plan(known, memory=least[smallest])
    assert tight.fits and tight.configuration.kv == smallest and not plan(known, memory=least[smallest] - 1).fits
    cost = f"(adds {added[smallest]:.2g} nats a token)" if smallest in added else "(lossy)"
    assert any(cost in lost for lost in tight.given_up) or smallest == "float32"
    assert set(tight.not_chosen) == set(known.kv_types) - allowed
    assert all(("more than 0.01" if caches else "not measured") in why for why in tight.not_chosen.values())
    # Who asks for it gets it.
    assert plan(known, kv="int4").configuration.kv == "int4"


def test_what_the_model_does_not_have_is_refused(facts: BundleFacts) -> None:
    bare = dataclasses.replace(facts, kv_types=("float32",), weights_modes=("packed",))
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kv": "int8"}, "only float32"),
        ({"weights": "streamed"}, "packed"),
    )
    for options, word in cases:
        with pytest.raises(UsageError) as caught:
            plan(bare, **options)
        assert word in str(caught.value)
    with pytest.raises(UsageError, match="in place"):
        plan(facts, weights="packed")
    with pytest.raises(ContextLengthError, match="8192"):
        plan(facts, context=9000)


def test_a_refusal_tells_the_least_and_what_to_change(facts: BundleFacts) -> None:
    fixed: dict[str, Any] = {"context": 4096, "kv": "float32", "speculation": "copy", "prefix_cache": 10_000_000}
    least = plan(facts, **fixed).minimum_bytes
    found = plan(facts, memory=least - 1, **fixed)
    assert not found.fits
    with pytest.raises(BudgetError) as caught:
        found.require_fit()
    error = caught.value
    assert error.minimum_bytes >= least and error.terms["kv"] > 0 and sum(error.terms.values()) == least
    for way in ("smaller context", "KV cache of fewer bits", "no drafting", "prefix cache"):
        assert way in error.hint
    assert plan(facts, memory=error.minimum_bytes, **fixed).fits


def test_alternatives_differ_and_tell_whether_they_fit(facts: BundleFacts) -> None:
    found = plan(facts, all_ways=True)
    ways = {way.name: way for way in found.alternatives}
    assert {"smallest", "no drafting", "int8 KV cache", "streamed weights", "context 512"} <= set(ways)
    assert len({way.configuration for way in ways.values()} | {found.configuration}) == len(ways) + 1
    assert all(way.fits for way in ways.values())
    assert ways["smallest"].planned_bytes == found.minimum_bytes
    tight = plan(facts, all_ways=True, memory=found.minimum_bytes + 1_000_000)
    assert not {way.name: way for way in tight.alternatives}[NOTHING_GIVEN_UP].fits
    data = tight.to_dict()
    assert len(repr(tight)) < 700 and "\n" not in repr(tight) and "MB of" in f"{tight}"
    assert data["alternatives"][0]["choice"]["context"] and data["speed"]["measured"] is True


@pytest.mark.slow
def test_the_curve_tells_what_every_budget_gets(facts: BundleFacts) -> None:
    free = plan(facts, all_ways=True, context=1000)
    curve = free.curve
    assert curve is not None and curve.points[0].budget_bytes == free.minimum_bytes
    for budget in range(free.minimum_bytes, free.planned_bytes, (free.planned_bytes - free.minimum_bytes) // 8):
        found, point = plan(facts, memory=budget, context=1000), curve.at(budget)
        assert point is not None and found.speed.tokens_per_second == pytest.approx(point.tokens_per_second)
    assert curve.at(free.minimum_bytes - 1) is None
    bound, best = curve.speculation_bytes, max(point.tokens_per_second for point in curve.points)
    assert bound is not None and free.minimum_bytes < bound < curve.best_speed_bytes < free.planned_bytes
    fast = plan(facts, memory=curve.best_speed_bytes, context=1000)
    assert fast.speed.tokens_per_second >= 0.95 * best
    # Plain decoding is no slower below the bound, and slower from it on.
    for budget, pays in ((bound - 1, False), (bound, True)):
        auto, off = (plan(facts, memory=budget, context=1000, speculation=who) for who in ("auto", "off"))
        assert (auto.speed.tokens_per_second > off.speed.tokens_per_second) == pays
    data = free.to_dict()
    assert data["speculation_bytes"] == bound and len(data["curve"]) == len(curve.points)
    assert plan(facts, all_ways=True, speculation="off").to_dict()["speculation_bytes"] is None


@settings(deadline=None, max_examples=5)
@given(
    shares=st.lists(st.floats(0, 1.1), min_size=2, max_size=4),
    context=st.sampled_from([None, 1000]),
    times=st.dictionaries(
        st.sampled_from(["", "int8", " streamed 1", " streamed 8", "int8 streamed 4"]), st.floats(0.1, 9), min_size=1
    ),
    rows=st.dictionaries(st.sampled_from(["", "int8", " streamed 1"]), st.floats(0.2, 4)),
    learnt=st.lists(st.floats(0, 1), min_size=2, max_size=2),
)
@example([0.0, 0.1, 0.5, 1.0], None, {"": 1.0, "int8": 0.2}, {}, [0.0, 0.0])
@example([0.1, 0.3, 0.7, 1.0], None, {" streamed 8": 0.5}, {" streamed 1": 0.3}, [1.0, 0.9])
def test_a_larger_budget_never_promises_less(
    facts: BundleFacts,
    shares: list[float],
    context: int | None,
    times: dict[str, float],
    rows: dict[str, float],
    learnt: list[float],
) -> None:
    """Whatever was measured of some variants, of further rows in passes and of drafts."""
    probability, share = learnt
    prospects = tuple(Prospect(name, probability, share, 0.01, tables=True) for name in ("copy", "ngram", "recycle"))

    def paced(configuration: Configuration) -> Pace:
        variant = facts.variant(configuration)
        slope = rows.get(variant, 1.0)
        points = tuple((m, ms * times.get(variant, 1.0) * (1 if m == 1 else slope)) for m, ms in PASSES.points)
        return dataclasses.replace(PACE, passes=PassCosts(points), prospects=prospects)

    subject = dataclasses.replace(facts)
    options: dict[str, Any] = {"prefill_chunk": 32, "context": context}

    def ask(memory: int | None, all_ways: bool = False) -> MemoryPlan:
        config = LoadOptions(memory=memory, **options)
        return search(subject, config, Large(subject, config, PROCESS), SpeedModel(paced), all_ways=all_ways)

    free = ask(None)
    spare = free.planned_bytes - free.minimum_bytes
    plans = [ask(free.minimum_bytes + round(share * spare)) for share in sorted(shares)]
    for less, more in pairwise([*plans, free]):
        assert less.speed.tokens_per_second <= more.speed.tokens_per_second
        assert less.speed.plain_tokens_per_second <= more.speed.plain_tokens_per_second
    listed = ask(plans[0].budget_bytes, all_ways=True)
    assert listed.speed == plans[0].speed
    assert max(way.speed.tokens_per_second for way in listed.alternatives) <= free.speed.tokens_per_second
    assert listed.curve is not None
    rates = [point.tokens_per_second for point in listed.curve.points]
    assert rates == sorted(rates)


# How to ask for what an alternative's name says.
ASKED: dict[str, Callable[[Alternative], dict[str, Any]]] = {
    "smallest": lambda way: {"memory": way.planned_bytes},
    NOTHING_GIVEN_UP: lambda way: {"memory": way.planned_bytes},
    "no drafting": lambda way: {"speculation": "off"},
    "cache": lambda way: {"kv": way.configuration.kv},
    "weights": lambda way: {"weights": way.configuration.weights},
    "context": lambda way: {"context": way.configuration.context},
}


@settings(deadline=None, max_examples=4)
@given(
    share=st.floats(-0.3, 1.5),
    counted=st.sampled_from(COUNTED),
    measured=st.dictionaries(
        st.tuples(st.sampled_from(["", "int8", " streamed 1", "int8 streamed 4"]), st.booleans()), st.floats(0.5, 2)
    ),
)
@example(share=-0.1, counted="resident", measured={("", False): 1.0, ("int8", True): 2.0})
@example(share=0.5, counted="resident", measured={("int8", False): 0.5})
@example(share=1.0, counted="resident", measured={})
def test_a_plan_agrees_with_itself(
    facts: BundleFacts, share: float, counted: CountedPages, measured: dict[tuple[str, bool], float]
) -> None:
    """Whatever the budget, and whichever variants were measured: one least budget, one speed of each way to run."""
    drafter = dataclasses.replace(facts, option_bytes=None)
    nested = dataclasses.replace(facts, drafter=drafter)

    def profiles(variant: str, *, draft_model: bool) -> DeviceProfile:
        key = variant, draft_model
        return Measured(measured[key]) if key in measured else DeviceProfile(None)

    def ask(all_ways: bool = False, **options: Any) -> MemoryPlan:
        subject = dataclasses.replace(nested, drafter=None) if options.get("speculation") == "off" else nested
        config = LoadOptions(counted=counted, prefill_chunk=32, **options)
        memory, speed = Large(subject, config, PROCESS), speed_model(nested, profiles)
        return search(subject, config, memory, speed, all_ways=all_ways)

    free = ask()
    budget = max(1, round(free.minimum_bytes + share * (free.planned_bytes - free.minimum_bytes)))
    found = ask(all_ways=True, memory=budget)
    assert found.minimum_bytes == free.minimum_bytes
    assert found.fits == (budget >= found.minimum_bytes) == (found.planned_bytes <= budget)
    assert found.fits or found.planned_bytes == found.minimum_bytes
    ways = {way.name: way for way in found.alternatives}
    whole = free.speed.tokens_per_second, free.speed.plain_tokens_per_second
    rates = [way.speed.tokens_per_second for way in found.alternatives]
    assert rates == sorted(rates, reverse=True) and max(rates) <= whole[0]
    assert "smallest" not in ways or ways["smallest"].planned_bytes == found.minimum_bytes
    assert NOTHING_GIVEN_UP not in ways or ways[NOTHING_GIVEN_UP].planned_bytes == free.planned_bytes
    for way in ways.values() if found.fits else ():
        kind = next((name for name in ASKED if name in way.name), None)
        if kind is not None:
            asked = ask(**{"memory": budget} | ASKED[kind](way))
            # Of ways that are equally fast it may be another that takes other bytes. No way is promised to be faster
            # than giving up nothing.
            paces = [(speed.tokens_per_second, speed.plain_tokens_per_second) for speed in (asked.speed, way.speed)]
            expected = tuple(map(min, paces[0], whole))
            # Larger budgets than the smallest bound what is promised of that. With other weights drafters are given up
            # in another order, by which what was asked for may be faster than promised.
            bound = (kind == "smallest" and paces[1] >= expected) or (kind == "weights" and paces[1] <= expected)
            assert paces[1] == expected or bound, way.name
    # Measurements of different days are brought to one scale, so ways that differ in bytes alone run at one speed, but
    # for what rows of another type of cache take, of this one or of a larger budget's.
    both = [(found.configuration, found.speed), *((way.configuration, way.speed) for way in ways.values())]
    plain = [speed.tokens_per_second for c, speed in both if not c.draft_max | c.window_layers]
    assert not plain or max(plain) < 1.01 * min(plain)


def test_drafters_go_by_the_speed_they_lose_for_their_bytes(facts: BundleFacts) -> None:
    """A draft model that promises nothing goes first, one that promises much stays longer than tables do."""
    nested = dataclasses.replace(facts, drafter=dataclasses.replace(facts, option_bytes=None))
    free, alone = (plan(each, context=2048) for each in (nested, facts))
    assert free.configuration.draft_model and free.terms["draft_model"] > 0
    assert free.minimum_bytes == alone.minimum_bytes < alone.planned_bytes
    found = plan(nested, memory=free.planned_bytes - 1, context=2048)
    assert found.given_up == ("no draft model",) and found.planned_bytes == alone.planned_bytes
    config = LoadOptions()
    memory = MemoryModel(nested, config, PROCESS)
    for model, first in ((0.0, "model"), (0.9, "recycle")):
        pace = dataclasses.replace(PACE, prospects=(*PACE.prospects, Prospect("model", 1.0, model, 0.01, model=True)))
        speed = SpeedModel(functools.partial(_paced, pace))
        ways = [way for way in drafting_ways(nested, config, memory, speed) if way.most == 15]
        gone = [set(more.drafters) - set(fewer.drafters) or {"model"} for more, fewer in pairwise(ways)]
        order = [name for names in gone for name in names]
        assert order[0] == first and set(order) == {"copy", "ngram", "recycle", "model"}


def _paced(pace: Pace, configuration: Configuration) -> Pace:
    return pace


def test_tuned_settings_come_first_and_give_way_to_the_budget(facts: BundleFacts) -> None:
    tuned = dataclasses.replace(facts, settings=TunedSettings(prefill_chunk=1024))
    free, roomy = (plan(each, context=2048) for each in (facts, tuned))
    assert (roomy.prefill_chunk, roomy.tuned, roomy.given_up) == (1024, ("prefill_chunk",), ())
    assert roomy.planned_bytes > free.planned_bytes and roomy.minimum_bytes == free.minimum_bytes
    for budget in (free.planned_bytes, free.minimum_bytes):
        found = plan(tuned, memory=budget, context=2048)
        assert found.fits and found.prefill_chunk < 1024 and found.tuned == ()
        assert any("instead of 1024" in text for text in found.given_up)
    assert plan(tuned, prefill_chunk=16).prefill_chunk == 16


def test_tuned_weights_come_first_and_stay_the_callers_choice(facts: BundleFacts) -> None:
    both = dataclasses.replace(facts, weights_modes=("packed", "mapped", "streamed"))
    tuned = dataclasses.replace(both, settings=TunedSettings(weights="mapped"))
    assert plan(both).configuration.weights == "packed"
    found = plan(tuned)
    assert (found.configuration.weights, found.tuned, found.given_up) == ("mapped", ("weights",), ())
    own = plan(tuned, weights="packed")
    assert own.configuration.weights == "packed" and own.tuned == ()
    # A mode that this backend does not have is not taken.
    other = dataclasses.replace(facts, settings=TunedSettings(weights="packed"))
    assert plan(other).configuration.weights == "mapped" and plan(other).tuned == ()
