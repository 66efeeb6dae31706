"""Shares: whoever asks gets as many turns as everybody else, however many replies they want."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.apps.server.worker import ReplyQueue


def test_owners_take_turns_and_so_do_their_replies() -> None:
    scheduler = ReplyQueue[str](parallel=10)
    for reply in ("a1", "a2", "a3", "b1", "c1"):
        scheduler.add(reply[0], reply)
    turns = [scheduler.next() for _ in range(18)]
    assert Counter(str(turn)[0] for turn in turns) == {"a": 6, "b": 6, "c": 6}
    assert Counter(turns)["a1"] == Counter(turns)["a2"] == Counter(turns)["a3"] == 2


def test_whoever_has_fewest_begins_next() -> None:
    scheduler = ReplyQueue[str](parallel=2)
    for reply in ("a1", "a2", "a3", "b1", "a4", "c1"):
        scheduler.add(reply[0], reply)
    assert (scheduler.running, scheduler.waiting) == (2, 4)
    scheduler.remove("a1")
    assert {scheduler.next() for _ in range(4)} == {"a2", "b1"}
    scheduler.remove("a2")
    # Of a and c, who have none now, a came first.
    assert {scheduler.next() for _ in range(4)} == {"b1", "a3"}
    scheduler.remove("b1")
    assert {scheduler.next() for _ in range(4)} == {"a3", "c1"}


def test_nothing_to_run() -> None:
    scheduler = ReplyQueue[str](parallel=1)
    assert scheduler.next() is None
    scheduler.add("a", "a1")
    scheduler.add("a", "a2")
    scheduler.remove("a2")
    assert scheduler.waiting == 0
    assert scheduler.clear() == ["a1"]
    assert scheduler.next() is None


@given(
    parallel=st.integers(1, 5),
    steps=st.lists(
        st.one_of(st.tuples(st.just("add"), st.integers(0, 3)), st.tuples(st.just("end"), st.integers(0, 9)))
    ),
)
def test_every_reply_gets_its_turn(parallel: int, steps: list[tuple[str, int]]) -> None:
    scheduler, alive = ReplyQueue[tuple[int, int]](parallel), []
    for number, (kind, value) in enumerate(steps):
        if kind == "add":
            alive.append((value, number))
            scheduler.add(str(value), (value, number))
        elif alive:
            gone = alive.pop(value % len(alive))
            scheduler.remove(gone)
        assert scheduler.running == min(parallel, len(alive))
        assert scheduler.running + scheduler.waiting == len(alive)
        # As many turns as owners times the replies of the one with most of them reach everybody.
        seen = {scheduler.next() for _ in range(4 * max(1, len(alive)))}
        assert len(seen - {None}) == scheduler.running
        assert seen - {None} <= set(alive)
