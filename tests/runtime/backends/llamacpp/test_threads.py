"""Threads follow what other programs leave of the processors, and the bits of a pass do not follow the threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.runtime.backends.llamacpp import context
from edgeinfer.runtime.backends.llamacpp.context import ProcessorTimes, SpareThreads, processor_times


class Machine:
    """Processors with given times, and a clock that each look moves on."""

    def __init__(self, processors: int) -> None:
        self.now = ProcessorTimes(0.0, 0.0, 0.0, processors)
        self.others = self.ours = 0.0  # processors at work for others and for us

    def __call__(self) -> ProcessorTimes:
        wall, busy, own, processors = self.now
        self.now = ProcessorTimes(wall + 1, busy + self.others + self.ours, own + self.ours, processors)
        return self.now


@pytest.fixture(autouse=True)
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_INTERVAL", 0.0)


@given(processors=st.integers(1, 64), most=st.integers(1, 64), others=st.floats(0, 64), ours=st.floats(0, 64))
def test_there_are_as_many_as_others_leave(processors: int, most: int, others: float, ours: float) -> None:
    machine = Machine(processors)
    spare = SpareThreads(most, machine)
    assert spare.count() in range(1, most + 1)
    machine.others, machine.ours = others, ours
    assert abs(spare.count() - max(1, min(most, processors - others))) <= 0.5 + 1e-6
    machine.others = 0.0
    assert spare.count() == min(most, processors)


def test_two_busy_loops_on_two_processors_leave_one_thread() -> None:
    """Whatever share each program gets of the system: with two threads of ours, and then with one."""
    machine = Machine(2)
    spare = SpareThreads(2, machine)
    for machine.ours, machine.others in ((1.0, 1.0), (0.67, 1.33), (1.0, 1.0)):
        assert spare.count() == 1
    machine.ours, machine.others = 1.0, 0.1
    assert spare.count() == 2


def test_the_system_tells_its_times() -> None:
    before = processor_times()
    sum(range(1_000_000))
    after = processor_times()
    assert after.processors >= 1
    assert all(late >= early for late, early in zip(after, before, strict=True))
    assert after.own > before.own
