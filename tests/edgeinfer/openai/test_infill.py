"""Prompts with a gap: the order of llama.cpp's server, what is left out, and models without the tokens for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.infill import Gap

NAMES = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]


class Letters:
    """A model with a token for each letter and for some names."""

    info = SimpleNamespace(name="letters")

    def __init__(self, context: int, names: list[str], begin: tuple[int, ...] = ()) -> None:
        self.context, self.begin_ids = context, list(begin)
        self.special = {name: 1000 + place for place, name in enumerate(names)}

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        assert not add_special
        return [self.special[text]] if parse_special and text in self.special else list(map(ord, text))

    def spelled(self, ids: list[int]) -> str:
        names = {id_: name for name, id_ in self.special.items()}
        return "".join(names.get(id_) or chr(id_) for id_ in ids)


def test_a_gap_is_written_as_llama_cpp_writes_it() -> None:
    model: Any = Letters(8192, NAMES)
    ids, ends = Gap("def f(", "return 1", "x", (("a.py", "one<|fim_pad|>"), ("b.py", "two"))).ids(model)
    assert model.spelled(ids) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\none<|fim_pad|><|file_sep|>b.py\ntwo<|file_sep|>filename\n"
        "<|fim_prefix|>def f(x<|fim_suffix|>return 1<|fim_middle|>"
    )
    assert model.spelled(ends) == "<|repo_name|><|file_sep|><|fim_pad|>"
    assert model.special["<|fim_pad|>"] not in ids  # a text's names are plain text
    plain: Any = Letters(8192, NAMES[:3], (2,))
    ids, ends = Gap("a", "b", others=(("c", "d"),)).ids(plain)
    written = "\n\n--- snippet ---\n\nd\x02<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert (plain.spelled(ids), ends) == (written, [])


def test_what_is_far_from_the_gap_is_left_out() -> None:
    model: Any = Letters(64, NAMES[:3])
    ids, _ = Gap("a" * 100 + "yz", "mn" + "b" * 100, others=(("c", "d" * 100),)).ids(model)
    text = model.spelled(ids)
    assert len(ids) <= 32 + 3 and "yz<|fim_suffix|>mn" in text and text.startswith("<|fim_prefix|>a")


def test_a_model_without_the_tokens_is_refused() -> None:
    model: Any = Letters(64, NAMES[1:])
    with pytest.raises(RequestError, match="it cannot fill in the middle") as error:
        Gap("a", "b").ids(model)
    assert error.value.param == "suffix"
