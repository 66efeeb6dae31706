"""Tokenizers read from GGUF files: their ids are those of the tokenizer.json that was written, no text is a mark."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits

from edgeinfer.bundle.gguf.normalizer import (
    NORMALIZER_KEY,
    PRE_TOKENIZERS,
    QWEN2,
    GgufNormalizer,
    PreTokenizer,
    normalizer_steps,
)
from edgeinfer.bundle.gguf.reader import GgufFile, read_gguf
from edgeinfer.bundle.tokenizer_table import encode_table
from edgeinfer.core.errors import BundleError, CheckpointError
from edgeinfer.export.gguf.reading_tokenizer import read_tokenizer, tokenizer_refusal
from edgeinfer.export.gguf.route import ORDINARY, RARE, llama_encoder
from edgeinfer.export.gguf.vocabulary import add_vocabulary, byte_level_steps, pre_tokenizer_name, read_vocabulary
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.source.hf_config import read_config
from tests.export.made_tokenizers import (
    ROWS,
    TOKENIZERS,
    UNDERLINE,
    byte_level,
    pieces,
    split,
    whole_words,
    write_words,
)
from tests.export.test_gguf_tokenizer import shared_lines
from tests.gguf_builder import ARRAY, BOOL, FLOAT32, INT32, STRING, UINT32, Builder
from tests.rare_texts import rare_texts
from tests.tables import each_row

BYTES = sorted(ByteLevel.alphabet())


def written(folder: Path, tokenizer: Tokenizer, pre: str | None = None) -> GgufFile:
    """A file with the tokenizer alone, as exports have it, or with another name of its pre-tokenizer."""
    gguf = pytest.importorskip("gguf")
    source = write_words(folder / "words", tokenizer)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    vocabulary = read_vocabulary(source, read_config(source), ROWS)
    add_vocabulary(writer, dataclasses.replace(vocabulary, pre=pre or vocabulary.pre))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(folder / "model.gguf")


def library(gguf: GgufFile) -> Tokenizer:
    return Tokenizer.from_buffer(read_tokenizer(gguf).files["tokenizer.json"])


def others() -> Tokenizer:
    """Composed text, tokens that take white space, and tokens that users may write."""
    tokenizer = byte_level(split(QWEN2), normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("</tool>", normalized=False)])
    for place, way in enumerate(({"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True})):
        tokenizer.add_special_tokens([AddedToken(f"<|strip{place}|>", normalized=False, **way)])
    return tokenizer


@each_row("name", [*TOKENIZERS, "others"])
def test_ids_and_texts_are_those_of_the_tokenizer_that_was_written(name: str, tmp_path: Path) -> None:
    expected = others() if name == "others" else TOKENIZERS[name]()
    found = library(written(tmp_path, expected))
    marks = {id_: token.content for id_, token in expected.get_added_tokens_decoder().items()}
    texts = [*ORDINARY, *RARE, *rare_texts(150, 3, list(marks.values()))]
    for parse in (True, False):
        found.encode_special_tokens = expected.encode_special_tokens = not parse
        for theirs, ours in zip(expected.encode_batch(texts), found.encode_batch(texts), strict=True):
            assert theirs.ids == ours.ids
            assert expected.decode(theirs.ids) == found.decode(ours.ids)
    special = {id_ for id_, token in expected.get_added_tokens_decoder().items() if token.special}
    assert {id_ for id_, token in found.get_added_tokens_decoder().items() if token.special} == special
    assert encode_table(found.to_str().encode("utf-8")) is not None


def bytes_file(folder: Path, pre: Any = "qwen2", **changes: Any) -> GgufFile:
    """A file of single bytes, two merges and a few added tokens; changes are of its keys, None removes one."""
    tokens = [*BYTES, "in", "ing", "<s>", "</s>", "<think>", "[PAD261]", "[PAD262]"]
    types = [1] * (len(BYTES) + 2) + [3, 3, 4, 5, 5]
    keys: dict[str, Any] = {
        "model": (STRING, "gpt2"),
        "pre": None if pre is None else (STRING, pre),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (INT32, types)),
        "merges": (ARRAY, (STRING, ["i n", "in g", "i n"])),
        "bos_token_id": (UINT32, tokens.index("<s>")),
        "eos_token_id": (UINT32, tokens.index("</s>")),
        "add_bos_token": (BOOL, 1),
    } | changes
    metadata = {
        name if "." in name else f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None
    }
    (folder / "model.gguf").write_bytes(Builder({"general.architecture": (STRING, "llama"), **metadata}, []).build())
    return read_gguf(folder / "model.gguf")


def pieces_file(folder: Path, words: dict[str, float], **changes: Any) -> GgufFile:
    """A file of SentencePiece's kind: words with their scores behind three marks and all bytes."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    keys = {
        "model": (STRING, "llama"),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (INT32, [2, 3, 3, *[6] * 256, *[1] * len(words)])),
        "scores": (ARRAY, (FLOAT32, [0.0] * 259 + list(words.values()))),
        "bos_token_id": (UINT32, 1),
        "eos_token_id": (UINT32, 2),
        "merges": None,
    }
    return bytes_file(folder, "default", **keys | changes)


@each_row("row", PRE_TOKENIZERS)
def test_every_name_splits_texts_as_its_row_says(row: PreTokenizer, tmp_path: Path) -> None:
    for name in row.names.split():
        contents = json.loads(read_tokenizer(bytes_file(tmp_path, name)).files["tokenizer.json"])
        steps = byte_level_steps(contents)
        assert steps is not None
        again = pre_tokenizer_name(steps, contents["model"]["ignore_merges"], merges_matter=True)
        first = next(r for r in PRE_TOKENIZERS if (r.steps, r.whole_words) == (row.steps, row.whole_words))
        assert again == first.names.split()[0]
        assert (contents["normalizer"] == {"type": "NFC"}) == row.composes


def test_names_and_rows_are_found_by_one_name_each() -> None:
    names = [name for row in PRE_TOKENIZERS for name in row.names.split()]
    assert len(names) == len(set(names)) > 50


def test_tokens_stand_where_the_file_has_them_and_padding_is_none(tmp_path: Path) -> None:
    gguf = bytes_file(tmp_path, add_eos_token=(BOOL, 1))
    tokenizer = library(gguf)
    assert tokenizer.get_vocab_size() == 261 and tokenizer.id_to_token(261) is None
    assert tokenizer.encode("ing").tokens == ["<s>", "ing", "</s>"]
    assert tokenizer.encode("a", "b").tokens == ["<s>", "a", "</s>", "<s>", "b", "</s>"]
    assert [token.content for token in tokenizer.get_added_tokens_decoder().values()] == ["<s>", "</s>", "<think>"]
    plain = bytes_file(tmp_path, add_bos_token=None)
    assert library(plain).encode("ing").tokens == ["ing"]
    # What files leave out goes by the pre-tokenizer.
    assert library(bytes_file(tmp_path, "llama-bpe", add_bos_token=None)).encode("ing").tokens == ["<s>", "ing"]


def test_small_files_hold_ends_templates_and_special_tokens(tmp_path: Path) -> None:
    files = read_tokenizer(bytes_file(tmp_path, eot_token_id=(UINT32, 260))).files
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [259, 260], "bos_token_id": 258}
    assert json.loads(files["special_tokens.json"]) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert "chat_template.jinja" not in files
    templates = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    files = read_tokenizer(bytes_file(tmp_path, **{key: (STRING, text) for key, text in templates.items()})).files
    assert (files["chat_template.jinja"], files["chat_template.tool_use.jinja"]) == (b"A", b"B")


def test_text_never_becomes_a_control_token(tmp_path: Path) -> None:
    """Merges may lead to one, and words that are taken whole may be spelled like one."""
    tokens = [*BYTES, "<s", "s>", "<s>", "stop", "</s>", "in"]
    types, merges = [1, 1, 3, 3, 3, 1], ["< s", "s >", "<s >", "< s>", "i n"]
    same: dict[str, Any] = {
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (INT32, [1] * len(BYTES) + types)),
        "merges": (ARRAY, (STRING, merges)),
    }
    tokenizer = library(bytes_file(tmp_path, **same))
    assert tokenizer.encode("<s>in", add_special_tokens=False).tokens == ["<s>", "in"]
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("<s>in", add_special_tokens=False).tokens == ["<s", ">", "in"]
    with pytest.raises(CheckpointError, match="control token 'stop' is a word"):
        read_tokenizer(bytes_file(tmp_path, "llama-bpe", **same))


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = others() if request.param == "bytes" else pieces()
    return library(written(tmp_path_factory.mktemp(request.param), made))


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.sampled_from([*"<s/>|unkser\u2581 ", "<s>", "</s>", "<|user|>", "<unk>", "<|strip0|>", "\n", "\u00e9"]),
        max_size=9,
    ).map("".join)
)
def test_no_text_of_a_user_is_a_mark(marked: Tokenizer, text: str) -> None:
    controls = {id_ for id_, token in marked.get_added_tokens_decoder().items() if token.special}
    marked.encode_special_tokens = True
    ids = marked.encode(text, add_special_tokens=False).ids
    assert controls.isdisjoint(ids)
    assert marked.decode(ids).strip() == marked.decode(ids, skip_special_tokens=False).strip()


def test_the_highest_score_merges_first_and_then_the_longest_left_part(tmp_path: Path) -> None:
    words = {UNDERLINE: -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "ab": -1.0, "bc": 0.0, "abc": -2.0}
    contents = json.loads(read_tokenizer(pieces_file(tmp_path, words)).files["tokenizer.json"])
    assert contents["model"]["merges"] == ["b c", "a b", "ab c", "a bc"]
    assert (contents["model"]["unk_token"], contents["model"]["byte_fallback"]) == ("<unk>", True)
    tokenizer = Tokenizer.from_str(json.dumps(contents))
    assert tokenizer.encode("abc \u00e9").tokens == ["<s>", UNDERLINE, "abc", UNDERLINE, "<0xC3>", "<0xA9>"]
    unprefixed = library(pieces_file(tmp_path, words, add_space_prefix=(BOOL, 0)))
    assert unprefixed.encode("abc", add_special_tokens=False).tokens == ["abc"]


def test_spaces_that_converters_wrote_into_tokens_are_found_in_texts(tmp_path: Path) -> None:
    """As Gemma's runs of spaces, which users could define; the longest run goes first."""
    words = {UNDERLINE: -9.0, "a": -10.0, "  ": -1000.0, "   ": -1000.0}
    types = [2, 3, 3, *[6] * 256, 1, 1, 4, 4]
    gguf = pieces_file(tmp_path, words, token_type=(ARRAY, (INT32, types)), add_space_prefix=(BOOL, 0))
    tokenizer = library(gguf)
    assert tokenizer.encode("a   a  a").tokens == ["<s>", "a", UNDERLINE * 3, "a", UNDERLINE * 2, "a"]
    assert tokenizer.decode(tokenizer.encode("a   a  a").ids) == "a   a  a"


def test_marks_of_phi3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), UNDERLINE, "a"]
    changes: dict[str, Any] = {"tokens": (ARRAY, (STRING, tokens))}
    words = {UNDERLINE: -1.0, "a": -2.0}
    plain = library(pieces_file(tmp_path, words, **changes)).get_added_tokens_decoder().values()
    assert not any(token.rstrip for token in plain)
    changes["general.name"] = (STRING, "Phi-3 mini")
    taken = library(pieces_file(tmp_path, words, **changes)).get_added_tokens_decoder().values()
    assert [(token.content, token.rstrip) for token in taken] == [("<unk>", False), ("<s>", False), ("<|end|>", True)]


def draw_file(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of a file whose parts need not fit each other."""
    words = st.text("ab<s>\u2581 \u0120", max_size=4)
    tokens = draw(st.lists(words, max_size=12))
    if draw(st.booleans()):
        tokens = [
            "<unk>",
            "<s>",
            "</s>",
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *dict.fromkeys(filter(None, tokens)),
        ]
    size = len(tokens) + draw(st.sampled_from((0, 0, 0, 1)))
    types, scores = (
        st.sampled_from((1, 1, 1, 2, 3, 4, 5, 6)),
        st.sampled_from((-1e9, -3.0, -2.0, 0.0, 1.0, float("nan"))),
    )
    fill = [6] * (size - 16) if size > 256 else []
    drawn = size - len(fill)
    return {
        "model": (STRING, draw(st.sampled_from(("gpt2", "llama", "gemma4")))),
        "pre": draw(st.sampled_from(("qwen2", "llama-bpe", "deepseek-llm"))),
        "tokens": (ARRAY, (STRING, tokens)),
        "token_type": (ARRAY, (INT32, fill + draw(st.lists(types, min_size=drawn, max_size=drawn)))),
        "scores": (ARRAY, (FLOAT32, [0.0] * len(fill) + draw(st.lists(scores, min_size=drawn, max_size=drawn)))),
        "merges": (
            ARRAY,
            (STRING, draw(st.lists(st.sampled_from(("a b", "< s", "<s >", "a", " a b", "")), max_size=4))),
        ),
        "bos_token_id": (UINT32, draw(st.integers(0, size + 1))),
        "eos_token_id": (UINT32, 0),
        "add_eos_token": (BOOL, draw(st.integers(0, 1))),
        "edgeinfer.tokenizer.rstrip": (ARRAY, (INT32, draw(st.lists(st.integers(-1, 20), max_size=2)))),
    }


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys=st.composite(draw_file)())
def test_files_of_any_parts_are_read_as_they_are_or_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    tokens, types = keys["tokens"][1][1], keys["token_type"][1][1]
    try:
        tokenizer = library(bytes_file(tmp_path, **keys))
    except (BundleError, CheckpointError) as error:
        assert "\n" not in str(error)
        return
    added = {id_: token.special for id_, token in tokenizer.get_added_tokens_decoder().items()}
    assert added == {id_: kind in (2, 3) for id_, kind in enumerate(types) if kind in (2, 3, 4) and id_ < len(tokens)}
    tokenizer.encode_special_tokens = True
    for encoded in tokenizer.encode_batch([*map(str, tokens), "ab<s> "], add_special_tokens=False):
        assert not any(types[id_] == 3 for id_ in encoded.ids)


@each_row(
    "changes, reason",
    [
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'"),
        ({"pre": "of-tomorrow"}, "tokenizer.ggml.pre is 'of-tomorrow'"),
        ({"model": (STRING, "t5")}, "tokenizer.ggml.model is 't5'"),
        ({"model": (STRING, "bert")}, "tokenizer.ggml.model is 'bert'"),
        ({"model": None}, "tokenizer.ggml.model is 'none'"),
        ({"token_type": None}, "tokenizer.ggml.token_type is missing"),
        ({"model": (STRING, "llama")}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_what_is_not_read_is_refused_by_its_key(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    gguf = bytes_file(tmp_path, **changes)
    assert tokenizer_refusal(gguf) == reason
    with pytest.raises(CheckpointError, match=r"llama\.cpp runs it") as caught:
        read_tokenizer(gguf)
    assert reason in str(caught.value)


def test_scores_that_give_no_order_of_merges_are_refused(tmp_path: Path) -> None:
    assert tokenizer_refusal(pieces_file(tmp_path, {"a": -1.0, "b": -2.0})) is None
    assert (
        tokenizer_refusal(pieces_file(tmp_path, {"a": -1.5, "b": -2.25}))
        == "tokenizer.ggml.scores is of a unigram model"
    )
    same = tokenizer_refusal(pieces_file(tmp_path, {"a": -1000.0, "b": -1000.0}))
    assert same == "tokenizer.ggml.scores has one score for all tokens"


def test_unknown_steps_and_wrong_merges_are_refused(tmp_path: Path) -> None:
    gguf = bytes_file(tmp_path, merges=(ARRAY, (STRING, ["i n", "x y"])))
    with pytest.raises(BundleError, match="its merge 'x y' is not of two tokens"):
        read_tokenizer(gguf)
    gguf = bytes_file(tmp_path, **{NORMALIZER_KEY: (ARRAY, (STRING, ["none", "mirror"]))})
    assert tokenizer_refusal(gguf) == f"{NORMALIZER_KEY} has the unknown step 'mirror'"


def as_row(row: PreTokenizer) -> Tokenizer:
    """A tokenizer that splits texts as a row says."""
    words = row.steps[-1] == "words"
    steps = [
        Digits(individual_digits=True) if step == "digits" else split(step)
        for step in (row.steps[:-1] if words else row.steps)
    ]
    made = byte_level(*steps, use_regex=words, normalizer=normalizers.NFC() if row.composes else None)
    return whole_words(made) if row.whole_words else made


# Of the texts that exports are checked with, where llama.cpp leaves out combining marks.
DIFFERENT = {"tekken": 2, "gpt-4o": 2}


@pytest.mark.slow
@pytest.mark.gguf
@each_row("row", PRE_TOKENIZERS)
def test_every_row_splits_as_llama_cpp_does(row: PreTokenizer, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    name = row.names.split()[0]
    gguf = written(tmp_path, as_row(row), name)
    found, normalize = library(gguf), GgufNormalizer(normalizer_steps(gguf.metadata))
    with llama_encoder(gguf.path) as encode:
        different = [text for text in (*ORDINARY, *RARE) if found.encode(text).ids != encode(normalize(text))]
    assert len(different) == DIFFERENT.get(name, 0) and not set(different) & set(ORDINARY), different


@pytest.mark.slow
@pytest.mark.gguf
@pytest.mark.parametrize("name", ["stories260K", "mico_llama_1m", "tales"])
def test_published_tokenizers_come_back_and_agree_with_llama_cpp(name: str, shared: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    source = shared / "models" / name
    write_gguf(source, tmp_path / "model.gguf", "F16")
    gguf = read_gguf(tmp_path / "model.gguf")
    expected, found = Tokenizer.from_file(str(source / "tokenizer.json")), library(gguf)
    marks = [token.content for token in expected.get_added_tokens_decoder().values()]
    normalize = GgufNormalizer(normalizer_steps(gguf.metadata), marks)
    texts = [*shared_lines(shared / "data"), *rare_texts(2000, 11, marks)]
    with llama_encoder(gguf.path) as encode:
        for text, theirs, ours in zip(texts, expected.encode_batch(texts), found.encode_batch(texts), strict=True):
            assert ours.ids == theirs.ids == encode(normalize(text)), text


@pytest.mark.exhaustive
@pytest.mark.gguf
@pytest.mark.parametrize("variable", ["SMOL_GGUF", "QWEN05_GGUF"])
def test_real_files_have_llama_cpps_ids_on_ten_thousand_texts(variable: str, shared: Path) -> None:
    """Where the variable names a file; rare texts are compared by figures in the log."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no file")
    gguf = read_gguf(Path(os.environ[variable]))
    found = library(gguf)
    marks = [token.content for token in found.get_added_tokens_decoder().values()]
    normalize = GgufNormalizer(normalizer_steps(gguf.metadata), marks)
    texts = [text for text in data_texts(shared / "data") if text.strip()][:10_000]
    with llama_encoder(gguf.path) as encode:
        different = [
            t for t, e in zip(texts, found.encode_batch_fast(texts), strict=True) if e.ids != encode(normalize(t))
        ]
    assert len(texts) == 10_000 and different == []


def data_texts(folder: Path) -> Iterator[str]:
    """Pieces of all files, every file in turn."""
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".txt", ".jsonl", ".json", ".md", ".py")]
    pieces = [path.read_text("utf-8", "replace").split("\n") for path in paths]
    for row in zip_longest(*pieces, fillvalue=""):
        yield from (text[:2000] for text in row)
