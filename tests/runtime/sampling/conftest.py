"""Grammars over a tokenizer of bytes, random replies by them, and their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.grammar import GrammarConstraint
from edgeinfer.runtime.sampling.grammar_source import grammar_source
from edgeinfer.runtime.sampling.grammar_tokens import GrammarVocabulary
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.text.streaming import StreamDecoder
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.factories import make_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bytes")
    make_tokenizer(folder, sentences=['{"name": "Ann", "age": 12}', "été 日本", "[true, false, null]"] * 4, size=300)
    return Tokenizer.from_file(folder / "tokenizer.json")


def made(
    tokenizer: TokenizerLike, ends: Sequence[int] = (1,), size: int | None = None, **form: Any
) -> GrammarConstraint:
    source = grammar_source(ReplyOptions(**form))
    assert source is not None
    return GrammarConstraint(GrammarVocabulary(tokenizer, size or tokenizer.vocab_size), source, ends)


def drawn(constraint: GrammarConstraint, ends: Sequence[int], seed: int, limit: int = 400) -> list[int] | None:
    """Random tokens up to an end; None where there was none. Short ones: the end is taken where it may be."""
    chance, reply = np.random.default_rng(seed), list[int]()
    for _ in range(limit):
        ids = constraint.allowed()
        assert ids.dtype == np.int64 and len(ids) and (np.diff(ids) > 0).all()
        if ids[0] in ends or (ids == ends[0]).any():
            return reply
        forced = constraint.forced()
        token = int(chance.choice(ids))
        assert not forced or forced[0] in ids
        constraint.push(token)
        reply.append(token)
    return None


def text_of(tokenizer: TokenizerLike, ids: Sequence[int]) -> str:
    decoder = StreamDecoder(tokenizer)
    return "".join(map(decoder.push, ids)) + decoder.flush()
