"""Tokenizers of GGUF files: byte pairs and SentencePiece, special tokens, streams, what is no text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import PromptError, TokenizerError
from edgeinfer.runtime.backends.llamacpp.model import LlamaModel
from edgeinfer.runtime.backends.llamacpp.tokenizer import LlamaTokenizer
from edgeinfer.runtime.text.contract import SPECIAL
from edgeinfer.runtime.text.special_tokens import LiteralEncoder
from edgeinfer.runtime.text.streaming import StreamDecoder
from tests.rare_texts import rare_texts
from tests.runtime.backends.llamacpp.conftest import SHAPE

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")
pytestmark = pytest.mark.gguf

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
lasting = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def tokenizer(request: pytest.FixtureRequest, gguf_bundle: Callable[..., Bundle]) -> LlamaTokenizer:
    return LlamaTokenizer(LlamaModel(gguf_bundle(SHAPE, request.param).gguf, weights="mapped"))


def spelled(tokenizer: LlamaTokenizer, text: str, **options: bool) -> list[str | None]:
    return [tokenizer.id_to_token(id_) for id_ in tokenizer.encode(text, **options)]


def test_texts_in_tokens(tokenizer: LlamaTokenizer) -> None:
    bytes_alone = tokenizer.decoder_types == ("ByteLevel",)
    hello = ["<|begin|>", "hello", "\u0120w"] if bytes_alone else ["<s>", "\u2581hello", "\u2581w"]
    assert spelled(tokenizer, "hello w") == hello
    assert spelled(tokenizer, "hello w", add_special_tokens=False) == hello[1:]
    assert spelled(tokenizer, "\u00e9", add_special_tokens=False) == (
        ["\u00c3", "\u00a9"] if bytes_alone else ["\u2581", "\u00e9"]
    )
    assert tokenizer.encode("", add_special_tokens=False) == []
    end = "<|end|>" if bytes_alone else "</s>"
    assert tokenizer.encode(end, False, True) == [tokenizer.token_to_id(end)]
    assert len(tokenizer.encode(end, False, False)) > 2
    assert tokenizer.token_to_id("no such token") is None and tokenizer.token_to_id("[PAD1]") is None


def test_ids_and_their_number(tokenizer: LlamaTokenizer) -> None:
    size = tokenizer.vocab_size
    assert size < SHAPE.vocab and tokenizer.id_to_token(size - 1) is not None
    assert [tokenizer.id_to_token(id_) for id_ in (-1, size, SHAPE.vocab, 10**9)] == [None] * 4
    bytes_alone = tokenizer.decoder_types == ("ByteLevel",)
    assert tokenizer.special_ids == ({0, 1} if bytes_alone else {0, 1, 2})
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([*ids, size, -5]) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False).startswith("<")


@lasting
@given(text=texts)
def test_texts_come_back(tokenizer: LlamaTokenizer, text: str) -> None:
    if "\0" in text or "\u2581" in text:
        return  # neither is text to SentencePiece
    ids = tokenizer.encode(text, parse_special=False)
    assert tokenizer.decode(ids) == text
    stream = StreamDecoder(tokenizer)
    assert "".join([*map(stream.push, ids), stream.flush()]) == text


@lasting
@given(ids=st.lists(st.integers(0, SHAPE.vocab - 1), max_size=12))
def test_streams_of_any_tokens(tokenizer: LlamaTokenizer, ids: list[int]) -> None:
    stream = StreamDecoder(tokenizer)
    streamed = "".join([*map(stream.push, ids), stream.flush()])
    whole = tokenizer.decode(ids)
    # Of bytes that are no characters, the two replace different runs.
    if "\N{REPLACEMENT CHARACTER}" not in whole:
        assert streamed == whole


@lasting
@given(parts=st.lists(texts | st.sampled_from(["<|end|>", " </s>", "hello w", "<s", ">"]), max_size=5))
def test_special_tokens_are_where_they_are_said_to_be(tokenizer: LlamaTokenizer, parts: list[str]) -> None:
    encoder = LiteralEncoder(tokenizer)
    marks = sorted(encoder.special_tokens.ids)
    parted = [part for place, text in enumerate(parts) for part in (text, marks[place % len(marks)])][:-1] or [""]
    ids = encoder.encode_parts(parted)
    meant = [encoder.special_tokens.ids[mark] for mark in parted[1::2]]
    unknown = {id_ for id_ in tokenizer.special_ids if tokenizer.id_to_token(id_) == "<unk>"}
    controls = tokenizer.special_ids - unknown
    assert [id_ for id_ in ids if id_ in controls] == [id_ for id_ in meant if id_ in controls]
    if encoder.special_tokens.split("".join(parted)) == parted:
        whole = tokenizer.encode("".join(parted), add_special_tokens=False)
        found = iter(meant)
        assert ids == whole == [next(found) if id_ == SPECIAL else id_ for id_ in tokenizer.encode_between(parted)]
    assert not controls & set(encoder.literal("".join(parted)))


@pytest.mark.parametrize("name", ["SmolLM2", "Qwen2.5"])
def test_rare_texts_have_the_ids_of_the_published_tokenizer(name: str) -> None:
    """A published GGUF file, whose tokenizer.json lies in the folder that is named next to it."""
    variable = f"EDGEINFER_TEST_{name.upper().replace('.', '_')}"
    named = os.environ.get(variable)
    if named is None:
        pytest.skip(f"{variable} names no GGUF file of {name} and, behind a colon, its tokenizer.json")
    path, _, reference = named.partition(":")
    tokenizer, expected = LlamaTokenizer(LlamaModel(read_gguf(Path(path)))), Tokenizer.from_file(reference)
    texts = rare_texts(5000, 11, sorted(tokenizer.control_texts))
    found = [each.ids for each in expected.encode_batch_fast(texts)]
    assert [text for text, ids in zip(texts, found, strict=True) if tokenizer.encode(text) != ids] == []


def test_long_texts_and_no_texts(tokenizer: LlamaTokenizer) -> None:
    text = "hello w\u00e9 \u4f60\U0001f600\n" * 5000
    assert tokenizer.decode(tokenizer.encode(text)) == text
    with pytest.raises(PromptError, match="lone surrogate at index 2"):
        tokenizer.encode("ab\ud800")


def test_a_closed_model_has_no_vocabulary(gguf_bundle: Callable[..., Bundle]) -> None:
    model = LlamaModel(gguf_bundle().gguf, weights="mapped")
    tokenizer = LlamaTokenizer(model)
    model.close()
    model.close()
    for use in (lambda: tokenizer.encode("a"), lambda: tokenizer.decode([5])):
        with pytest.raises(TokenizerError, match="was closed"):
            use()
