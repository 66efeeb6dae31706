"""Stop strings against a naive search, for any cutting into pieces."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.text import StopMatcher

ALPHABET = st.sampled_from("abé😀")
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4).map(tuple)


def oracle(text: str, stops: tuple[str, ...]) -> str | None:
    """The text before the match that ends first, the longest of those; None without one."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return None


@settings(max_examples=200, deadline=None)
@given(STOPS, st.lists(st.text(ALPHABET, max_size=6), max_size=8))
def test_equals_naive_search(stops: tuple[str, ...], pieces: list[str]) -> None:
    matcher, shown, arrived, matched = StopMatcher(stops), "", "", False
    for piece in pieces:
        arrived += piece
        text, matched = matcher.push(piece)
        shown += text
        before = oracle(arrived, stops)
        assert matched == (before is not None)
        if before is not None:
            assert shown == before
            break
        held = arrived[len(shown) :]
        assert arrived.startswith(shown)
        # Holds back exactly the longest suffix that may begin a stop string.
        suffixes = [len(s[:n]) for s in stops for n in range(1, len(s)) if arrived.endswith(s[:n])]
        assert len(held) == max(suffixes, default=0)
    if not matched:
        assert shown + matcher.flush() == arrived
    else:
        assert matcher.push("abab") == ("", True) and matcher.flush() == ""


def test_overlapping_prefixes() -> None:
    matcher = StopMatcher(("aab",))
    assert matcher.push("aa") == ("", False)
    assert matcher.push("a") == ("a", False)
    assert matcher.push("bc") == ("", True)
    assert matcher.matched


def test_without_stops_text_passes_at_once() -> None:
    matcher = StopMatcher(())
    assert matcher.push("abc") == ("abc", False)
    assert matcher.flush() == ""


class Counted(list[Any]):
    """A list that knows how often it was looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)


def test_is_linear_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, pieces = StopMatcher(("a" * 1000 + "b",)), ["a" * 500] * 20
    (search,) = matcher._searches
    counted = Counted(search._shorter)
    monkeypatch.setattr(search, "_shorter", counted)
    for piece in pieces:
        matcher.push(piece)
    # Of each character: the states that are fallen back to, which are never more than came before.
    assert counted.looks <= sum(map(len, pieces))


def test_takes_little_memory() -> None:
    """The server's limit of 16 strings of 1,000 characters, and strings far beyond it."""
    for count, length, most in ((16, 1_000, 200_000), (4, 100_000, 2_000_000)):
        stops = tuple(chr(ord("a") + place) * length for place in range(count))
        tracemalloc.start()
        try:
            matcher = StopMatcher(stops)
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert size < most
        assert matcher.push("xyz") == ("xyz", False)
