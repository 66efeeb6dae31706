"""Streamed text joined is the library's decoding, for every kind of decoder, and no piece splits a character."""

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

from edgeinfer.runtime.text.streaming import StreamDecoder
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.tables import each_row

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


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 450), max_size=60))
def test_any_ids_of_a_byte_level_tokenizer(ids: list[int]) -> None:
    assert "".join(pieces_of(byte_level(), ids)) == byte_level().decode(ids)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from("ÃÂ©æ¼¢ðŁĺĢaĠíłĢïâ"), max_size=30))
def test_broken_utf8_of_a_byte_level_tokenizer(spelled: list[str]) -> None:
    ids = [byte_level().token_to_id(character) or 0 for character in spelled]
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


class Counted:
    """A tokenizer that notes how many tokens it is asked to decode each time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.asked: list[int] = []
        self._tokenizer = tokenizer
        self.special_ids, self.decoder_types = tokenizer.special_ids, tokenizer.decoder_types
        self.id_to_token = tokenizer.id_to_token

    def decode(self, ids: list[int]) -> str:
        self.asked.append(len(ids))
        return self._tokenizer.decode(ids)


@each_row("token", ["<0xF0>", "<0x80>", "<0xFF>", "<0x41>", "▁", "▁▁", "</s>"])
def test_long_runs_cost_constant_work_per_token(token: str) -> None:
    tokenizer, count = sentencepiece(), 2000
    ids = [tokenizer.token_to_id(token) or 0] * count
    counted: Any = Counted(tokenizer)
    text = "".join(pieces_of(counted, ids))
    broken = token in ("<0xF0>", "<0x80>", "<0xFF>")
    assert text == ("\ufffd" * count if broken else tokenizer.decode(ids))
    assert len(counted.asked) <= 3 * count
    assert max(counted.asked, default=0) <= 100


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
