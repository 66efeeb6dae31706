"""A tokenizer's vocabulary as a grammar engine needs it: the bytes that each token adds."""

from __future__ import annotations

from functools import cached_property
from threading import Lock
from typing import Any

from edgeinfer.errors import TokenizerError, UsageError
from edgeinfer.runtime.system.memory import release_freed
from edgeinfer.runtime.text.contract import BYTE_LEVEL, TokenizerLike, piece_bytes, token_bytes

__all__ = ["GrammarVocabulary", "engine", "spelled"]

# One of these is among the decoding steps of every tokenizer that spells spaces as SentencePiece does.
_PIECES = frozenset({"Replace", "Metaspace"})
# How the engine is told that a token is special: no text leads to it.
_SPECIAL = b"\xff"
# Texts of strings, of which the engine keeps the tokens apart. At 150 thousand tokens its own four of these take 87 MB,
# these two 58 MB for the same time per mask; none 26 MB, and 5 ms instead of 0.2 ms in strings of bounded length.
_SLICES = (r"[^\"\\\x00-\x1F\x7F]{1,10}", r"[^\"\\\x00-\x1F\x7F]{1,30}")


def engine() -> Any:
    """The module `llguidance`.

    Raises:
        UsageError: it is not installed.
    """
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

    Raises:
        TokenizerError: its tokens spell neither bytes nor SentencePiece's pieces.
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


class GrammarVocabulary:
    """The vocabulary of one model for the grammar engine, made when it is first needed: 0.7 s and 58 MB at 150 thousand
    tokens.

    Args:
        tokenizer: of the model.
        size: tokens that the model has logits for.
    """

    def __init__(self, tokenizer: TokenizerLike, size: int) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self.size = size

    @property
    def tokens(self) -> Any:
        """The engine's `LLTokenizer`. One id behind the model's stands for the end of every grammar, whatever ends
        replies of this model.

        Raises:
            UsageError: the engine is not installed.
            TokenizerError: as `spelled`.
        """
        with self._lock:
            return self._made

    @cached_property
    def _made(self) -> Any:
        library = engine()
        spelling = _Spelled([*spelled(self._tokenizer, self.size), _SPECIAL + b"<|end of grammar|>"])
        made = library.LLTokenizer(spelling, slices=list(_SLICES))
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
