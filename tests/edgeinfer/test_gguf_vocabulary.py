"""Vocabularies of GGUF files: special tokens, what ends a reply, and what files leave unsaid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.bundle.gguf.vocabulary import GgufVocabulary, read_vocabulary
from edgeinfer.errors import BundleError
from tests.gguf_builder import ARRAY, BOOL, INT32, STRING, UINT32, Builder, small_model
from tests.tables import each_row

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocabulary(folder: Path, **changes: Any) -> GgufVocabulary:
    return read_vocabulary(read_gguf(small_model(**changes).write(folder / "m.gguf")))


def spelled(folder: Path, *tokens: str, **changes: Any) -> GgufVocabulary:
    """A vocabulary of these tokens alone, the first of which is the one that ends."""
    metadata = {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, list(tokens))),
        "tokenizer.ggml.merges": (ARRAY, (STRING, [])),
        "tokenizer.ggml.eos_token_id": (UINT32, 0),
    }
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return read_vocabulary(read_gguf(Builder(metadata).write(folder / "m.gguf")))


def test_all_that_a_file_says(tmp_path: Path) -> None:
    found = vocabulary(tmp_path)
    assert (found.model, found.pre, found.size, found.merges) == ("gpt2", "qwen2", 12, 2)
    assert found.special == {"bos": 1, "eos": 2}
    assert found.special_texts == {"bos": "<s>", "eos": "</s>"}
    assert (found.bos, found.add_bos, found.ends) == (1, True, (2, 11))
    assert found.tokens.strings()[3:7] == ["Ġa", "b", "é", "\U0001f600"]
    assert found.token_types is not None and found.scores is not None
    np.testing.assert_array_equal(found.token_types.numbers()[:4], [2, 3, 3, 1])
    np.testing.assert_array_equal(found.scores.numbers(), -np.arange(12, dtype=np.float32))
    assert found.chat_template is not None and found.chat_template.startswith("{% for")


def test_byte_pairs_without_merges(tmp_path: Path) -> None:
    unmerged = {"tokenizer__ggml__pre": (STRING, "kimi-k2"), "tokenizer__ggml__merges": None}
    assert vocabulary(tmp_path, **unmerged).merges == 0


@each_row(
    ("kind", "pre", "begins"),
    [
        ("llama", "", True),
        ("gpt2", "qwen2", False),
        ("gpt2", "llama-bpe", True),
        ("gemma4", "", True),
        ("t5", "", False),
    ],
)
def test_whether_texts_begin_with_a_token_where_files_do_not_say(
    tmp_path: Path, kind: str, pre: str, begins: bool
) -> None:
    found = spelled(tmp_path, *_BYTES, "a", model=(STRING, kind), pre=(STRING, pre))
    assert found.add_bos is begins


def test_bytes_may_be_spelled_as_characters(tmp_path: Path) -> None:
    tokens = [*map(chr, range(128)), *_BYTES[128:]]
    assert spelled(tmp_path, *tokens, model=(STRING, "llama")).size == 256
    with pytest.raises(BundleError, match="no token for some bytes"):
        spelled(tmp_path, *tokens[1:], model=(STRING, "llama"))


def test_no_token_begins_a_text_where_there_is_none(tmp_path: Path) -> None:
    found = spelled(tmp_path, "a", "b", add_bos_token=(BOOL, 1))
    assert (found.add_bos, found.bos) == (True, None)  # by default it is token 11
    found = spelled(tmp_path, *map(chr, range(97, 110)), pre=(STRING, "glm4"), add_bos_token=(BOOL, 1))
    assert found.bos is None


def test_ids_by_default(tmp_path: Path) -> None:
    unsaid = {f"tokenizer__ggml__{name}_token_id": None for name in ("bos", "eos")}
    assert vocabulary(tmp_path, **unsaid).special == {"bos": 11, "eos": 11}
    assert spelled(tmp_path, *_BYTES, model=(STRING, "llama")).special == {"bos": 1, "eos": 0, "unk": 0}


def test_ids_that_matter_little_may_be_wrong(tmp_path: Path) -> None:
    for value in ((UINT32, 2**32 - 1), (INT32, -1)):
        found = vocabulary(tmp_path, tokenizer__ggml__padding_token_id=value)
        assert "pad" not in found.special


@each_row(
    ("tokens", "ends"),
    [
        (["</s>", "a", "<|im_end|>", "<end_of_turn>", "<|im_start|>"], (0, 2, 3)),
        (["x", "<|endoftext|>", "<|eom_id|>", "<｜end▁of▁sentence｜>", "[e~["], (0, 1, 2, 3, 4)),
        (["<|return|>", "<|call|>", "<|end|>"], (0, 1)),
        (["<|flush|>", "<|calls|>", "<|end|>"], (0, 1)),
        (["<|return|>", "<|end|>"], (0, 1)),
        (["<eos>", "</s>", "<|tool_response>"], (0, 2)),
        (["<|plamo:eos|>", "</s>"], (0,)),
        (["x", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"], (0, 1, 2, 3)),
    ],
)
def test_what_ends_a_reply(tmp_path: Path, tokens: list[str], ends: tuple[int, ...]) -> None:
    assert spelled(tmp_path, *tokens).ends == ends


def test_what_the_metadata_name_ends_a_reply(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "d", "<PAD>"]
    ids = {"eot_token_id": (UINT32, 1), "eom_token_id": (UINT32, 2), "fim_pad_token_id": (UINT32, 3)}
    assert spelled(tmp_path, *tokens, **ids).ends == (0, 1, 2, 3)


def test_empty_tokens_are_no_token_twice(tmp_path: Path) -> None:
    assert spelled(tmp_path, "", "a", "").size == 3
