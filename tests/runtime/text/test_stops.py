"""Stop strings against a naive search, for any cutting into pieces, and those that spell special tokens."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.text.streaming import CallMark, CallStops, ReplyText, StopMatcher
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.marked_tokenizers import tokenizer

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


MARKS = ("<|im_end|>", "<|user|>", "</s>")
UNITS = st.lists(st.sampled_from([*"abé|>", *MARKS, "user", "<|"]), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", ["byte-level", "pieces, first"])
@settings(max_examples=150, deadline=None)
@given(
    units=st.lists(st.sampled_from([*"abé|>", *MARKS, "<unk>"]), max_size=12), given_stops=st.lists(UNITS, max_size=3)
)
def test_stops_that_spell_special_tokens(kind: str, units: list[str], given_stops: list[list[str]]) -> None:
    """Special tokens of a reply are found as a whole where a stop string spells them, and are never text."""
    used = tokenizer(kind)
    stops = tuple(map("".join, given_stops))
    ids = [id_ for unit in units for id_ in _ids(used, unit)]
    reply, shown = ReplyText(used, stops, frozenset()), ""
    for id_ in ids:
        shown += reply.push(id_)
        if reply.ended:
            break
    shown += reply.finish()
    # One character for each special token: those that no stop string spells are nothing at all.
    spelled = [mark for mark in MARKS if any(mark in stop for stop in stops)]
    stand = {mark: chr(0xE000 + place) for place, mark in enumerate(spelled)}
    said = "".join(stand.get(unit, "") if unit in (*MARKS, "<unk>") else unit for unit in units)
    searched = {stop: stop for stop in stops} | {_stood(stop, stand): stop for stop in stops}
    before = oracle(said, tuple(searched))
    assert shown == reply.text == "".join(c for c in (said if before is None else before) if c not in stand.values())
    assert (reply.stop_string is None) == (before is None) and reply.stop_string in (None, *stops)


def _ids(used: Tokenizer, unit: str) -> list[int]:
    if unit in (*MARKS, "<unk>"):
        return [used.token_to_id(unit) or 0]
    # Without the space that some put before a text.
    return used.encode("a" + unit, False, False)[len(used.encode("a", False, False)) :]


def _stood(stop: str, stand: dict[str, str]) -> str:
    for mark, character in stand.items():
        stop = stop.replace(mark, character)
    return stop


def test_an_end_that_is_a_stop_string_is_named() -> None:
    used = tokenizer("byte-level")
    end = used.token_to_id("<|im_end|>") or 0
    for stops, name in ((("b<|im_end|>", "x"), "b<|im_end|>"), (("<|im_end|>",), "<|im_end|>"), (("z",), None)):
        reply = ReplyText(used, stops, frozenset({end}))
        shown = "".join(map(reply.push, [*used.encode("a b", False), end])) + reply.finish()
        assert (shown, reply.stop_string, reply.ended) == ("a " if name == "b<|im_end|>" else "a b", name, True)


def shown(matcher: StopMatcher | CallStops, pieces: list[str]) -> str:
    """All that is shown of a text that comes in pieces."""
    found = ""
    for piece in pieces:
        text, matched = matcher.push(piece)
        found += text
        if matched:
            return found
    return found + matcher.flush()


@settings(max_examples=200, deadline=None)
@given(STOPS, st.text("abé😀 \n"), st.text("ab <{"), st.booleans(), st.lists(st.integers(0, 5), max_size=9))
def test_nothing_is_looked_for_in_calls(
    stops: tuple[str, ...], content: str, call: str, anywhere: bool, sizes: list[int]
) -> None:
    text = (content if anywhere else "") + "<a b>" + call
    pieces, rest = [], text
    for size in sizes:
        pieces.append(rest[:size])
        rest = rest[size:]
    matcher = CallStops(StopMatcher((*stops, "\n", "<", "b>", "<a b>")), CallMark("<a b>", None, anywhere))
    before = oracle(text[: text.index("<a b>")].rstrip(), (*stops, "\n", "<", "b>", "<a b>"))
    assert shown(matcher, [*pieces, rest]) == (text if before is None else before)


def test_text_that_only_looks_like_calls_is_looked_through() -> None:
    for stop, text, expected in (("<a", "x <a", "x "), ("\n", "x\n", "x"), ("\n", "x\ny", "x"), (" b", "<a b", "<a")):
        matcher = CallStops(StopMatcher((stop,)), CallMark("<a b>", None, True))
        assert shown(matcher, list(text)) == expected and matcher.found == stop
    at_first = CallStops(StopMatcher(("b",)), CallMark("<a b>", None, False))
    assert shown(at_first, list("x <a b> b")) == "x <a "


def test_calls_that_begin_with_a_special_token() -> None:
    vocabulary = tokenizer("byte-level")
    mark = vocabulary.control_texts["<|end|>"]
    ids = vocabulary.encode("ab \n<|end|>a\nb", add_special_tokens=False)
    reply = ReplyText(vocabulary, ("\n",), frozenset(), calls=CallMark("<|end|>", mark, True))
    pieces = [reply.push(id_) for id_ in ids]
    assert "".join(pieces) + reply.finish() == "ab \na\nb" and reply.stop_string is None
