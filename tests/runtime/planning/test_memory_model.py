"""Bytes and speeds of configurations, and the ledger that keeps to a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BudgetError
from edgeinfer.core.options.decoding import drafters_in
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.contract import HEAD_ROWS
from edgeinfer.runtime.backends.onnx.memory import OnnxMemory
from edgeinfer.runtime.backends.registry import facts_of, make_backend
from edgeinfer.runtime.planning import ledger as ledgers
from edgeinfer.runtime.planning import planner as planner_module
from edgeinfer.runtime.planning import speed_model as speed_module
from edgeinfer.runtime.planning.candidates import Drafting, configurations
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration, Footprint
from edgeinfer.runtime.planning.ledger import Ledger, MemoryRelief
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.planner import make_plan
from edgeinfer.runtime.planning.speed_model import (
    REPLY_TOKENS,
    Speed,
    SpeedModel,
    cache_ms,
    guessed_passes,
    guessed_token_ms,
    speed_model,
)
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from edgeinfer.runtime.speculation.assembly import OPTION_BYTES
from edgeinfer.runtime.system.memory import ProcessMemory
from tests.runtime.models import bundle_of
from tests.runtime.planning.conftest import PACE, PROCESS, Measured, pace_of
from tests.runtime.planning.conftest import facts_of as made_facts
from tests.tables import each_row


def export(layout: Layout, *, bits: int = 4, keep_small: bool = False) -> Bundle:
    return bundle_of("llama-tied", ExportConfig(bits=bits, keep_small=keep_small, layout=layout, calibration="none"))


def planned(bundle: Bundle, layout: Layout | None = None, **options: Any) -> MemoryPlan:
    config = LoadOptions(native=(layout or bundle.manifest.layout) == NATIVE, **options)
    subject = dataclasses.replace(facts_of(bundle, config), option_bytes=OPTION_BYTES)
    return make_plan(subject, config, speed_model(subject, lambda variant, *, draft_model: DeviceProfile(None)))


def weights(plan: MemoryPlan) -> tuple[int, int]:
    return plan.terms["weights_packed"], plan.terms.get("weights_mapped", 0)


def test_weights_are_packed_or_pages_of_their_file() -> None:
    native, wider, portable = export(NATIVE), export(NATIVE, bits=8, keep_small=True), export(PORTABLE)
    # Of the native layout only float32 is packed: the norms, and small layers that stay wider.
    floats = [sum(t.nbytes for t in bundle.manifest.tensors if t.bits == 32) for bundle in (native, wider)]
    assert weights(planned(native)) == (floats[0], native.manifest.weight_bytes)
    assert weights(planned(wider)) == (floats[1], wider.manifest.weight_bytes) and floats[1] > 100_000
    packed, mapped = weights(planned(portable))
    embed = portable.manifest.tensor("embed").nbytes
    # Rows of the embedding that were looked up are dropped before they become more than some megabytes.
    assert packed > portable.manifest.weight_bytes - embed > 0 and mapped == min(embed, 8 << 20)
    packed, mapped = weights(planned(native, backend="reference"))
    assert packed > 4 * sum(int(np.prod(t.shape)) for t in native.manifest.tensors) and mapped == 0


@each_row("other", [NATIVE, PORTABLE])
def test_a_plan_follows_the_layout_that_runs(other: Layout) -> None:
    native, portable = (export(layout) for layout in (NATIVE, PORTABLE))
    plans = [planned(bundle, other) for bundle in (native, portable)]
    assert [plan.layout for plan in plans] == [other, other]
    assert weights(plans[0]) == weights(plans[1])
    assert plans[0].to_dict()["choice"]["layout"] == other


def test_a_draft_takes_a_few_rows_of_logits_where_the_head_runs_apart() -> None:
    bundle = export(NATIVE)
    vocabulary, width = bundle.manifest.geometry.vocab_size, bundle.manifest.geometry.hidden_size

    def drafting(most: int, layout: Layout = NATIVE, **options: Any) -> int:
        return planned(bundle, layout, speculation="copy", draft_max=most, **options).terms["drafting"]

    # Of longer drafts the states are three times there: twice in the pass, and for the head.
    assert drafting(15) - drafting(HEAD_ROWS - 1) == 4 * 3 * 12 * width
    whole = 4 * 12 * (2 * width + vocabulary)
    assert drafting(15, PORTABLE) - drafting(HEAD_ROWS - 1, PORTABLE) == whole
    for options in ({"weights": "streamed"}, {"parallel": 2}):
        assert drafting(15, **options) - drafting(HEAD_ROWS - 1, **options) == whole


def test_the_largest_pass_may_be_that_over_a_draft() -> None:
    """A further reply takes a row of it."""
    bundle = export(NATIVE)

    def terms(chunk: int, most: int) -> dict[str, int]:
        return dict(planned(bundle, speculation="copy", prefill_chunk=chunk, draft_max=most, parallel=2).terms)

    for term in ("activations", "sequences"):
        assert terms(8, 15)[term] == terms(16, 15)[term]
    assert terms(8, 7)["activations"] < terms(16, 7)["activations"]


def test_a_graph_of_onnxruntimes_operators_holds_the_scores_of_all_heads() -> None:
    bundle = export(PORTABLE)
    decoder = bundle.manifest.decoder
    assert decoder is not None
    memory, rows = OnnxMemory(bundle, PORTABLE, False), 64

    def activations(context: int) -> float:
        configuration = Configuration(context, rows, "float32", "packed", 0, (), 0, "kept")
        return memory.running(configuration).anonymous["activations"]

    assert activations(2048) - activations(1024) >= 4 * (decoder.num_heads + 1) * rows * 1024


@pytest.mark.parametrize("backend", ["onnx", "reference"])
@pytest.mark.parametrize("layout", [NATIVE, PORTABLE])
def test_profiles_go_by_what_multiplies(backend: str, layout: Layout) -> None:
    bundle = export(layout)
    config = LoadOptions(backend=backend, context=16, native=layout == NATIVE)
    facts = facts_of(bundle, config)
    configuration = next(configurations(facts, config, (Drafting((), 0, False),)))
    assert make_backend(facts, config, configuration).kernel == facts.kernel()


@pytest.mark.parametrize("timed", [("",), ("int4",), ("", "int4")])
def test_rows_of_four_bits_take_longer_whichever_type_was_timed(facts: BundleFacts, timed: tuple[str, ...]) -> None:
    """Also where those of the usual type were timed in a slower moment."""
    moments = {"": 1.3, "int4": 0.8}

    def profiles(variant: str, *, draft_model: bool) -> DeviceProfile:
        return Measured(moments[variant]) if variant in timed and not draft_model else DeviceProfile(None)

    speed = speed_model(facts, profiles)
    token_ms = {kv: 1e3 / speed.speed(_configuration(kv=kv, draft_max=0)).tokens_per_second for kv in facts.kv_types}
    geometry = facts.manifest.geometry
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
    facts: BundleFacts, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """In part where the system keeps a part, all of them where it keeps little; as an SSD's while it is not known."""
    weights = facts.manifest.weight_bytes
    rate = weights / 2 if known else None

    def profiles(variant: str, *, draft_model: bool) -> DeviceProfile:
        return DeviceProfile(None) if variant else Measured(1.0)

    monkeypatch.setattr(speed_module, "kept_rate", lambda path: rate)
    speed = speed_model(facts, profiles)

    def planned(free: int) -> MemoryPlan:
        monkeypatch.setattr(planner_module, "free_memory", lambda mapped=0: free)
        config = LoadOptions(speculation="off", weights="mapped", context=2048)
        return make_plan(facts, config, speed, process=PROCESS)

    whole = planned(10**9)
    beside = whole.footprint.without_weights
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


def test_caches_make_room_for_weights_where_the_system_is_short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that holds a larger cache is no reason to take it, if the file would then come from the disk again."""
    facts = dataclasses.replace(made_facts(65_536))
    monkeypatch.setattr(speed_module, "kept_rate", lambda path: facts.manifest.weight_bytes)
    speed = speed_model(facts, lambda variant, *, draft_model: Measured(1.0))

    def planned(free: int, **options: Any) -> MemoryPlan:
        monkeypatch.setattr(planner_module, "free_memory", lambda mapped=0: free)
        config = LoadOptions(speculation="off", context=65_536, weights="mapped", **options)
        return make_plan(facts, config, speed, process=PROCESS)

    modest = planned(10**9, kv="int8").footprint.without_weights
    budget = planned(10**9).planned_bytes - 1
    roomy, short = (planned(free, memory=budget) for free in (10**9, modest + facts.manifest.weight_bytes + 4_000_000))
    assert (roomy.configuration.kv, short.configuration.kv) == ("float32", "int8")
    assert roomy.disk is None and short.disk is None


def test_tokens_take_time_besides_their_rounds() -> None:
    pace = dataclasses.replace(PACE, prospects=(), token_ms=0.5)
    configuration = _configuration(draft_max=0, drafters=())
    without = SpeedModel(lambda _: dataclasses.replace(pace, token_ms=0.0)).speed(configuration)
    found = SpeedModel(lambda _: pace).speed(configuration)
    assert 1e3 / found.tokens_per_second == pytest.approx(1e3 / without.tokens_per_second + 0.5)
    assert found.turn_ms == pytest.approx(without.turn_ms + REPLY_TOKENS * 0.5)
    assert guessed_token_ms(150_000) > 2 * guessed_token_ms(4_000)


@pytest.mark.parametrize(
    ("usual", "own", "expected"),
    [(0.05, 0.5, 0.05), (0.05, None, 0.05), (None, 0.5, 0.5), (None, None, None)],
    ids=["both told", "the usual variant told", "the variant itself told", "none told"],
)
def test_tokens_take_what_replies_told(
    facts: BundleFacts, usual: float | None, own: float | None, expected: float | None
) -> None:
    """A variant's own replies tell only where those of the usual one do not; where none do, a guess is left."""
    told = {"": usual, "int8": own}

    def token_ms(kv: str, pace: Callable[[float | None], DeviceProfile]) -> float:
        speed = speed_model(facts, lambda variant, **_: pace(told[variant]))
        return 1e3 / speed.speed(_configuration(kv=kv, draft_max=0, drafters=())).tokens_per_second

    passes = token_ms("int8", lambda _: Measured(1.0, 0.0))
    guess = guessed_token_ms(facts.manifest.geometry.vocab_size)
    found = token_ms("int8", functools.partial(Measured, 1.0)) - passes
    assert found == pytest.approx(guess if expected is None else expected)


MB = 1_000_000


class Process:
    """A process whose memory the test says, and parts that can give some of it back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, anonymous: int, file: int = 0) -> None:
        self.anonymous, self.file = anonymous, file
        self.parts = {"drafts": 30 * MB, "others": 20 * MB}
        self.taken: list[str] = []
        monkeypatch.setattr(ledgers, "process_memory", self.memory)

    def memory(self) -> ProcessMemory:
        total = self.anonymous + sum(self.parts.values())
        return ProcessMemory(total + self.file, total + self.file, total, self.file)

    def give(self, part: str, step: int) -> bool:
        given = min(step, self.parts[part])
        self.parts[part] -= given
        return given > 0

    def reliefs(self) -> tuple[MemoryRelief, ...]:
        return (
            MemoryRelief("drafts", lambda: self.give("drafts", 10 * MB), lambda: self.taken.append("drafts")),
            MemoryRelief("others", lambda: self.give("others", 20 * MB)),
        )


def plan(budget: int | None, counted: str = "resident", **changes: Any) -> MemoryPlan:
    configuration = Configuration(512, 64, "float32", "mapped", 0, drafters_in("auto"), 15, "kept")
    configuration = dataclasses.replace(configuration, **changes)
    footprint = Footprint({"kv": 10 * MB}, {})
    return MemoryPlan(configuration, "native", "stop", 0, budget, counted, footprint, Speed(1, 1, False, 1), 1)


def make(process: Process, planned: MemoryPlan, replanned: MemoryPlan | None = None) -> tuple[Ledger, list[MemoryPlan]]:
    applied: list[MemoryPlan] = []

    def replan(
        plan: MemoryPlan, process: ProcessMemory, used: Mapping[str, int], *, grammars: bool = False
    ) -> MemoryPlan:
        return replanned or plan

    return Ledger(planned, lambda: {"kv": 7}, process.reliefs(), replan, applied.append), applied


def test_within_the_budget_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MB)
    ledger, _ = make(process, plan(160 * MB))
    ledger.check(now=True)
    assert (process.parts["drafts"], ledger.given_up, ledger.peak) == (30 * MB, [], 150 * MB)
    assert ledger.terms(process.memory()) == {"kv": 7, "process": 150 * MB}


def test_no_more_than_needed_is_given_up_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MB)
    ledger, _ = make(process, plan(135 * MB))
    ledger.check(now=True)
    assert process.parts == {"drafts": 10 * MB, "others": 20 * MB}
    assert ledger.given_up == ["drafts"]
    process.anonymous += 25 * MB
    ledger.check(now=True)
    assert process.parts == {"drafts": 0, "others": 0}
    assert ledger.given_up == ["drafts", "others"]


def test_it_refuses_when_nothing_is_left_and_goes_on_when_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 200 * MB)
    ledger, _ = make(process, plan(150 * MB))
    with pytest.raises(BudgetError, match=r"200\.0 MB") as caught:
        ledger.check(now=True)
    assert caught.value.terms["process"] == 200 * MB and caught.value.minimum_bytes == 200 * MB
    process.anonymous = 100 * MB
    ledger.begin_turn()
    assert (process.taken, ledger.given_up) == (["drafts"], [])


def test_what_was_given_up_is_not_taken_back_without_ample_room(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MB)
    ledger, _ = make(process, plan(125 * MB))
    ledger.check(now=True)
    ledger.begin_turn()
    assert (process.taken, ledger.given_up) == ([], ["drafts"])


def test_looks_are_rare_and_none_without_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 500 * MB)
    looks: list[int] = []

    def look() -> ProcessMemory:
        looks.append(1)
        return process.memory()

    monkeypatch.setattr(ledgers, "process_memory", look)
    ledger, _ = make(process, plan(None))
    ledger.check(now=True)
    ledger.begin_turn()
    assert not looks
    ledger, _ = make(process, plan(10_000 * MB))
    for _ in range(1000):
        ledger.check()
    assert 0 < len(looks) < 100


def test_pages_of_files_count_only_where_they_are_to(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 50 * MB, file=300 * MB)
    make(process, plan(110 * MB, "anonymous"))[0].check(now=True)
    with pytest.raises(BudgetError):
        make(process, plan(110 * MB))[0].check(now=True)


def test_a_turn_begins_with_another_plan_where_the_program_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 100 * MB)
    shorter = plan(200 * MB, draft_max=3)
    ledger, applied = make(process, plan(200 * MB), shorter)
    ledger.begin_turn()
    assert ledger.plan is shorter and applied == [shorter]
    ledger.begin_turn()
    assert applied == [shorter]
