"""Text of tokens as they arrive, whole characters only, up to the first stop string."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from edgeinfer.runtime.text.streaming import CallMark, CallStops, ReplyText, StopMatcher, StreamDecoder
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.marked_tokenizers import tokenizer
from tests.tables import each_row

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
    matcher = CallStops(
        StopMatcher((*stops, "\n", "<", "b>", "<a b>")), CallMark(("<a b>",)) if anywhere else CallMark((), ("<a b>",))
    )
    before = oracle(text[: text.index("<a b>")].rstrip(), (*stops, "\n", "<", "b>", "<a b>"))
    assert shown(matcher, [*pieces, rest]) == (text if before is None else before)


def test_text_that_only_looks_like_calls_is_looked_through() -> None:
    for stop, text, expected in (("<a", "x <a", "x "), ("\n", "x\n", "x"), ("\n", "x\ny", "x"), (" b", "<a b", "<a")):
        matcher = CallStops(StopMatcher((stop,)), CallMark(("<a b>",)))
        assert shown(matcher, list(text)) == expected and matcher.found == stop
    at_first = CallStops(StopMatcher(("b",)), CallMark((), ("<a b>",)))
    assert shown(at_first, list("x <a b> b")) == "x <a "


def test_calls_that_begin_with_a_special_token() -> None:
    vocabulary = tokenizer("byte-level")
    mark = vocabulary.control_texts["<|end|>"]
    ids = vocabulary.encode("ab \n<|end|>a\nb", add_special_tokens=False)
    reply = ReplyText(vocabulary, ("\n",), frozenset(), calls=CallMark((), (), mark))
    pieces = [reply.push(id_) for id_ in ids]
    assert "".join(pieces) + reply.finish() == "ab \na\nb" and reply.stop_string is None


CORPUS = [
    "the quick brown fox jumps over the lazy dog. héllo wörld, ça va? 漢字 かな 한국어 👩‍👩‍👧 e\u0301 \n\n tabs\t"
] * 20
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"])
    | st.sampled_from(" aé漢字😀\u0301\u200d👩👧\n")
    | st.sampled_from("\u2581\ufffd"),
    max_size=40,
)


@cache
def byte_level() -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool é>"])
    return Tokenizer(backend)


@cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    """As Llama 2's tokenizer, or Gemma's without stripping."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁▁", "▁the", "▁world", "t", "h", "e", "a", "th", "é", "漢", ".", "\n", "o"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=[("▁", "▁"), ("t", "h")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    prepend = [normalizers.Prepend("▁")] if strip else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend)


def words(decoder: Any, pieces: list[str]) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(["<s>", *pieces])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab=vocab, unk_token="<s>"))
    backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


OTHERS = {
    "metaspace": lambda: words(decoders.Metaspace(), ["▁", "▁the", "fox", "▁▁", "é"]),
    "wordpiece": lambda: words(decoders.WordPiece(cleanup=False), ["the", "##re", "fox", ".", "##s"]),
    "none": lambda: words(None, ["the", "fox", ".", "é"]),
    "bytes in a sequence": lambda: words(decoders.Sequence([decoders.ByteLevel()]), ["Ġa", "Ã", "©", "ðŁ", "ĺĢ"]),
    "byte level and more": lambda: words(
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip("_", 1, 0)]), ["Ġa", "b", "Ã©", "__"]
    ),
}
MAKERS: dict[str, Any] = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece,
    "no strip": lambda: sentencepiece(strip=False),
}


def pieces_of(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> list[str]:
    decoder = StreamDecoder(tokenizer, context or [])
    return [*(decoder.push(token) for token in ids), decoder.flush()]


@settings(max_examples=100, deadline=None)
@given(TEXTS)
@pytest.mark.parametrize("kind", MAKERS)
def test_text_round_trips_and_no_piece_splits_a_character(kind: str, text: str) -> None:
    tokenizer = MAKERS[kind]()
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)
    assert pieces[-1] == ""  # valid text leaves nothing to flush


BYTES = st.sampled_from("ÃÂ©æ¼¢ðŁĺĢaĠíłĢïâ").map(lambda character: byte_level().token_to_id(character) or 0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 450), max_size=60) | st.lists(BYTES, max_size=30))
def test_any_ids_of_a_byte_level_tokenizer(ids: list[int]) -> None:
    """Also those that make no valid UTF-8."""
    assert "".join(pieces_of(byte_level(), ids)) == byte_level().decode(ids)


def by_runs(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The library's decoding with valid characters of broken byte runs kept: each run re-spelled before decoding."""
    out, run = "", b""
    for token in [*ids, None]:
        spelled = tokenizer.id_to_token(token) if token is not None else ""
        if token in tokenizer.special_ids:
            continue
        match = re.fullmatch("<0x(..)>", spelled or "")
        if match:
            run += bytes([int(match[1], 16)])
            continue
        # surrogateescape keeps one code unit per invalid byte
        out += re.sub("[\udc80-\udcff]", "\ufffd", run.decode("utf-8", "surrogateescape")) + (spelled or "")
        run = b""
    return out.replace("▁", " ")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 272) | st.sampled_from([3 + 0xE6, 3 + 0xBC, 3 + 0xA2, 3 + 0xC3, 3 + 0xA9]), max_size=30))
@pytest.mark.parametrize("strip", [True, False])
def test_any_ids_of_a_sentencepiece_tokenizer(strip: bool, ids: list[int]) -> None:
    tokenizer = sentencepiece(strip)
    ids = [tokenizer.token_to_id("a") or 0, *ids]
    assert "".join(pieces_of(tokenizer, ids)) == by_runs(tokenizer, ids)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), max_size=20))
@pytest.mark.parametrize("kind", OTHERS)
def test_any_ids_of_other_decoders(kind: str, ids: list[int]) -> None:
    tokenizer = OTHERS[kind]()
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.integers(0, 60))
@pytest.mark.parametrize("kind", MAKERS)
def test_continues_a_context(kind: str, text: str, cut: int) -> None:
    tokenizer = MAKERS[kind]()
    ids = tokenizer.encode("the the " + text)
    start = min(4 + cut, len(ids))
    context, rest = ids[:start], ids[start:]
    before = StreamDecoder(tokenizer)
    shown = "".join(before.push(token) for token in context)
    assert shown + "".join(pieces_of(tokenizer, rest, context)) == tokenizer.decode(ids)


def test_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentencepiece()
    the, world, special = (tokenizer.token_to_id(t) or 0 for t in ("▁the", "▁world", "</s>"))
    assert pieces_of(tokenizer, [world])[0] == "world"
    assert pieces_of(tokenizer, [world], [the])[0] == " world"
    assert pieces_of(tokenizer, [special, world], [the, special]) == ["", " world", ""]
    assert pieces_of(tokenizer, [special, the, special, world]) == ["", "the", "", " world", ""]


def test_incomplete_characters_wait() -> None:
    tokenizer = sentencepiece()
    assert pieces_of(tokenizer, [3 + byte for byte in "漢😀".encode()]) == ["", "", "漢", "", "", "", "😀", ""]
    assert pieces_of(tokenizer, [3 + 0xF0, 3 + 0x9F]) == ["", "", "\ufffd\ufffd"]
    tokenizer = byte_level()
    ids = tokenizer.encode("😀")
    assert pieces_of(tokenizer, ids[:-1])[-1] == "\ufffd"
    assert len(ids) > 1 and "".join(pieces_of(tokenizer, ids[-1:], ids[:-1])) == "😀"


@each_row("model", ["tales", "stories260K", "mico_llama_1m"])
def test_public_tokenizers(shared: Path, model: str) -> None:
    tokenizer = Tokenizer.from_file(shared / "models" / model / "tokenizer.json")

    @settings(max_examples=60, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)
        story = tokenizer.encode("Once upon a time")
        continued = story + tokenizer.encode(text, add_special_tokens=False)
        pieces = pieces_of(tokenizer, continued[len(story) :], story)
        assert "Once upon a time" + "".join(pieces) == tokenizer.decode(continued)

    check()
