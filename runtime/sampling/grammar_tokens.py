"""A tokenizer's vocabulary as a grammar engine needs it: the bytes that each token adds."""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import TokenizerError, UsageError
from edgeinfer.runtime.planning.configuration import GrammarMode
from edgeinfer.runtime.sampling.grammar_numbers import digits_ahead
from edgeinfer.runtime.system.memory import release_freed
from edgeinfer.runtime.text.contract import BYTE_LEVEL, TokenizerLike, bytes_of, piece_bytes, token_bytes

# One of these is among the decoding steps of every tokenizer that spells spaces as SentencePiece does.
_PIECES = frozenset({"Replace", "Metaspace"})
# How the engine is told that a token is special: no text leads to it.
_SPECIAL = b"\xff"
# Texts of strings, of which the engine keeps the tokens apart. At 150 thousand tokens its own four of these took 87 MB
# where these two took 58 for the same time per mask; without any it takes 5 ms instead of 0.2 in strings of bounded
# length.
_SLICES = (r"[^\"\\\x00-\x1F\x7F]{1,10}", r"[^\"\\\x00-\x1F\x7F]{1,30}")

# Bytes of a token in its tables, and while they are made; of the engine's code and its first use; of a grammar while it
# is compiled and followed, of 265 schemas of jsonschemabench the most, and of a further one beside it (docs/log,
# 2026-11-26).
_TOKEN_BYTES: dict[GrammarMode, tuple[int, int]] = {"none": (0, 0), "plain": (130, 190), "sliced": (240, 310)}
_ENGINE_BYTES, _GRAMMAR_BYTES, _FURTHER_GRAMMAR_BYTES = 2_000_000, 8_000_000, 4_000_000


def engine() -> Any:
    """The module `llguidance`."""
    try:
        import llguidance
    except ImportError as error:
        message = "Replies by a schema, a regular expression or a grammar need llguidance, which is not installed."
        raise UsageError(message, "pip install 'edgeinfer[structured]'") from error
    return llguidance


def spelled(tokenizer: TokenizerLike, size: int) -> list[bytes]:
    """The bytes that each token adds to a text; special ones marked, empty for ids that stand for nothing.

    Args:
        size: ids of the model; the tokenizer may have fewer or more.
    """
    kinds = tokenizer.decoder_types
    if kinds != BYTE_LEVEL and _PIECES.isdisjoint(kinds):
        message = (
            f"Tokens of this model cannot be followed by a grammar (decoding steps: {', '.join(kinds) or 'none'})."
        )
        raise TokenizerError(message, "Leave the schema or grammar out, or take a model with byte-level tokens.")
    special = tokenizer.special_ids
    texts = map(tokenizer.id_to_token, range(size))
    text_bytes = token_bytes if kinds == BYTE_LEVEL else piece_bytes
    return [
        b"" if text is None else _SPECIAL + text.encode("utf-8") if id_ in special else text_bytes(text)
        for id_, text in enumerate(texts)
    ]


def grammar_bytes(mode: GrammarMode, size: int, replies: int) -> tuple[int, int]:
    """What replies by grammars take at most: the vocabulary as the engine has it and grammars; and while the former is
    made.
    """
    kept, made = (_ENGINE_BYTES + each * size for each in _TOKEN_BYTES[mode])
    return kept + _GRAMMAR_BYTES + (replies - 1) * _FURTHER_GRAMMAR_BYTES, made


class GrammarVocabulary:
    """The vocabulary of one model for the grammar engine, made when it is first needed: 0.7 s at 150 thousand tokens.

    Args:
        tokenizer: of the model.
        size: tokens that the model has logits for.
        sliced: whether the engine keeps the tokens of strings apart, which takes memory and saves time.
    """

    def __init__(self, tokenizer: TokenizerLike, size: int, *, sliced: bool = True) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._slices = list(_SLICES) if sliced else []
        self.size = size

    @property
    def tokens(self) -> Any:
        """The engine's `LLTokenizer`. One id behind the model's stands for the end of every grammar, whatever ends
        replies of this model.
        """
        with self._lock:
            return self._made[0]

    @property
    def digits(self) -> NDArray[np.uint8]:  # (size + 1,)
        """What each token begins with, by `digits_ahead`; errors as `tokens`."""
        with self._lock:
            return self._made[1]

    def text_of(self, token: int) -> bytes:
        """The bytes of a token."""
        return bytes_of(self._tokenizer, token)

    @cached_property
    def _made(self) -> tuple[Any, NDArray[np.uint8]]:
        library = engine()
        spelling = _Spelled([*spelled(self._tokenizer, self.size), _SPECIAL + b"<|end of grammar|>"])
        made = library.LLTokenizer(spelling, slices=self._slices), digits_ahead(spelling.tokens, _SPECIAL)
        # The engine has a copy, and keeps this.
        spelling.tokens = []
        release_freed()
        return made


class _Spelled:
    """What `LLTokenizer` takes for a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [id_ for id_, token in enumerate(tokens) if token.startswith(_SPECIAL)]

    def __call__(self, text: str | bytes) -> list[int]:
        """Nothing: grammars are made such that no way of spelling a text is forced upon the model."""
        return []
