"""Tokenizers of checkpoints in llama.cpp's terms: what a file says of them, and what llama.cpp has none for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from edgeinfer.bundle.gguf.normalizer import GgufNormalizer
from edgeinfer.core.errors import BundleError, CheckpointError, UsageError
from edgeinfer.export.gguf import writer
from edgeinfer.export.gguf.vocabulary import Vocabulary, read_vocabulary
from edgeinfer.export.gguf.writer import write_gguf
from edgeinfer.export.source.hf_config import read_config
from tests.export.made_tokenizers import ROWS, TOKENIZERS, byte_level, pieces, split, whole_words, write_words
from tests.factories import make_checkpoint


def read(folder: Path, tokenizer: Tokenizer, rows: int = ROWS) -> Vocabulary:
    return read_vocabulary(write_words(folder, tokenizer), read_config(folder), rows)


def test_pre_tokenizers_have_llama_cpps_names(tmp_path: Path) -> None:
    found = {name: read(tmp_path / name, make()).pre for name, make in TOKENIZERS.items()}
    assert found == {name: name.split()[0] for name in TOKENIZERS}


def test_steps_that_llama_cpp_lacks_are_taken_before_it(tmp_path: Path) -> None:
    kinds = ("gpt-2", "gpt-2 nfc", "gpt-2 prefix", "default", "default first", "default always", "default spaces")
    found = {name: read(tmp_path / name, TOKENIZERS[name]()) for name in kinds}
    assert {name: vocabulary.steps for name, vocabulary in found.items()} == {
        "gpt-2": (),
        "gpt-2 nfc": ("nfc",),
        "gpt-2 prefix": ("prefix",),
        "default": (),
        "default first": ("first_prefix",),
        "default always": ("unprefix",),
        "default spaces": ("trim_spaces", "join_spaces"),
    }
    assert [name for name, vocabulary in found.items() if vocabulary.prefix] == [
        *("default", "default always", "default spaces")
    ]


def test_rows_without_a_token_are_unused(tmp_path: Path) -> None:
    vocabulary = read(tmp_path, byte_level(use_regex=True))
    size = len(vocabulary.tokens)
    assert size == len(vocabulary.types) == ROWS
    assert vocabulary.tokens[-1] == f"[PAD{ROWS - 1}]" and vocabulary.types[-1] == 5
    assert vocabulary.types[vocabulary.tokens.index("<s>")] == 3
    assert vocabulary.types[vocabulary.tokens.index("<think>")] == 4


def test_pieces_have_bytes_an_unknown_and_scores_in_the_order_of_merges(tmp_path: Path) -> None:
    tokenizer = pieces()
    vocabulary = read(tmp_path, tokenizer)
    types = dict(zip(vocabulary.tokens, vocabulary.types, strict=True))
    assert types["<0x41>"] == 6 and types["<unk>"] == 2 and types["</s>"] == 3
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    merges = ["".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    ranked = [scores[merged] for merged in dict.fromkeys(merges)]
    assert ranked == sorted(ranked, reverse=True) and len(set(ranked)) == len(ranked)


def test_special_ids_and_what_is_put_around_a_text(tmp_path: Path) -> None:
    vocabulary = read(tmp_path, pieces())
    assert vocabulary.add_bos and not vocabulary.add_eos
    assert vocabulary.ids["bos"] == 1 and vocabulary.tokens[vocabulary.ids["eos"]] == "</s>"
    tokenizer = byte_level(use_regex=True)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    vocabulary = read(tmp_path, tokenizer)
    assert (vocabulary.add_bos, vocabulary.add_eos) == (True, True)


def test_a_second_end_is_the_end_of_a_turn(tmp_path: Path) -> None:
    source = write_words(tmp_path, byte_level(use_regex=True))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}), "utf-8")
    vocabulary = read_vocabulary(source, read_config(source), ROWS)
    assert (vocabulary.ids["eos"], vocabulary.ids["eot"]) == (1, 2)


def test_a_checkpoint_that_names_no_end_is_refused(tmp_path: Path) -> None:
    source = write_words(tmp_path, byte_level(use_regex=True))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": None}), "utf-8")
    (source / "tokenizer_config.json").write_text("{}", "utf-8")
    with pytest.raises(CheckpointError, match="which token ends a text"):
        read_vocabulary(source, read_config(source), ROWS)


def plain(**model: Any) -> Tokenizer:
    """A byte-level tokenizer whose model is changed."""
    parsed = json.loads(byte_level(use_regex=True).to_str())
    parsed["model"] |= model
    return Tokenizer.from_str(json.dumps(parsed))


def without_a_byte() -> Tokenizer:
    parsed = json.loads(pieces().to_str())
    id_ = parsed["model"]["vocab"].pop("<0x41>")
    parsed["model"]["vocab"]["<no byte>"] = id_
    return Tokenizer.from_str(json.dumps(parsed))


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: byte_level(use_regex=True, normalizer=normalizers.Lowercase()), "the normalizer .*Lowercase"),
        (lambda: byte_level(split(r"\w+")), r"splits words as .*: \\w\+\."),
        (lambda: byte_level(pre_tokenizers.Punctuation(), use_regex=True), "Punctuation"),
        (lambda: whole_words(byte_level(use_regex=True)), "words with ignore_merges"),
        (lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True, prefix=True), "each piece"),
        (lambda: plain(end_of_word_suffix="</w>"), "end_of_word_suffix"),
        (lambda: pieces(normalizer=normalizers.Replace("a", "b")), "the normalizer"),
        (lambda: pieces(pre_tokenizer=pre_tokenizers.Whitespace()), "pre-tokenizer .*Whitespace"),
        (without_a_byte, "<0x41>"),
        (lambda: Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")), "WordPiece"),
    ],
)
def test_what_llama_cpp_has_no_tokenizer_for_is_refused(
    make: Callable[[], Tokenizer], what: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=what):
        read(tmp_path, make())


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the embedding has only 700 rows"):
        read(tmp_path, byte_level(use_regex=True), 700)


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(BundleError, match="rot13"):
        GgufNormalizer(["rot13"], [])


def test_phi3s_special_tokens_take_the_spaces_that_follow_by_the_models_name() -> None:
    """llama.cpp looks for them in general.name, and stops at a name like that without such tokens."""

    def words(rstrip: bool) -> Vocabulary:
        return Vocabulary(
            "llama", "default", ("<s>", "</s>"), (3, 3), {}, True, False, strips=((), (1,) if rstrip else ())
        )

    assert writer._shown_name("my model", words(True)) == "my model (Phi-3)"
    assert writer._shown_name("Phi-3-mini", words(False)) == "Phi 3-mini"
    assert writer._shown_name("phi3", None) == "Phi 3"


def test_without_the_package_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(writer, "import_module", missing)
    make_checkpoint(tmp_path / "checkpoint", "llama")
    with pytest.raises(UsageError, match="gguf package is not installed"):
        write_gguf(tmp_path / "checkpoint", tmp_path / "model.gguf", vocabulary=False)
