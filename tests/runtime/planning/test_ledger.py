"""The ledger keeps a budget: gives up in order, takes back, refuses only when nothing is left; plans again per turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from edgeinfer.drafting import drafters_in
from edgeinfer.errors import BudgetError
from edgeinfer.runtime.planning import ledger as ledgers
from edgeinfer.runtime.planning.ledger import Ledger, MemoryRelief
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.plan_input import Configuration, Footprint
from edgeinfer.runtime.planning.speed_model import Speed
from edgeinfer.runtime.system.memory import ProcessMemory

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
