"""A byte-pair tokenizer whose vocabulary and merges are mapped from a bundle's table, with the ids of the library's."""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import suppress
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import groupby, pairwise
from pathlib import Path
from typing import Self

import tokenizers
from tokenizers import AddedToken

from edgeinfer.bundle.array_file import ArrayFileError
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tokenizer_table import TABLE, TokenizerTable
from edgeinfer.errors import TokenizerError
from edgeinfer.runtime.system.allocation import allocating
from edgeinfer.runtime.text.contract import SPECIAL
from edgeinfer.runtime.text.tokenizer import SEEN_WORDS, SHORT, Tokenizer, library_errors

# Symbols of the longest word that is kept with its tokens.
_LONGEST_SEEN = 32
# Measured on 256 symbols and on 20,000: what the library takes of itself, and of each byte of the small tokenizer.json.
_LIBRARY_BYTES, _PARSED, _SEEN_WORD_BYTES = 1_000_000, 30, 600
_HALF = 32
_LOWER = (1 << _HALF) - 1


class MappedTokenizer(Tokenizer):
    """Implements `contract.TokenizerLike`. The library cuts texts into words and words into symbols, by a vocabulary of
    symbols alone; the symbols of each word are merged here.

    Args:
        table: of the tokenizer.
    """

    # The library's account of every symbol, and there are four to a token.
    _character_bytes = 300

    def __init__(self, table: TokenizerTable) -> None:
        backend = tokenizers.Tokenizer.from_buffer(table.tokenizer)
        super().__init__(backend)
        self._table = table
        self._size = table.size
        added = backend.get_added_tokens_decoder()
        self._added = {table.added[token.content]: token for token in added.values()}
        self._spelled = {table.added[token.content]: backend.id_to_token(id_) for id_, token in added.items()}
        self._special = frozenset(token.content for token in added.values() if token.special)
        # By the library's ids of symbols and added tokens, which number both from 0 on.
        ids = {id_: table.added[token.content] for id_, token in added.items()}
        self._true = dict(enumerate(table.symbols)) | ids
        # Of the table alone, so that a tokenizer does not refer to itself and goes as soon as it is not needed.
        self._merged = partial(_merged, table)
        self._seen = lru_cache(SEEN_WORDS)(self._merged)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Maps a tokenizer.table."""
        with allocating("The tokenizer"), library_errors(f"{path} is not a usable tokenizer"):
            try:
                tokenizer = cls(TokenizerTable(Path(path)))
            except (ArrayFileError, OSError, KeyError, ValueError) as error:
                message = f"Cannot use the tokenizer {path}: {error}."
                raise TokenizerError(message, "Export the model again.") from error
            tokenizer.decode(tokenizer.encode("a"))
        return tokenizer

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        """That of a bundle with a table."""
        bundle.check(TABLE)
        return cls.from_file(bundle.path / TABLE)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; ids that the vocabulary lacks add nothing."""
        # As the library does, by their texts: a special token that is spelled in another way is not left out.
        hidden = self._special if skip_special_tokens else frozenset()
        spelled = [text for text in map(self.id_to_token, ids) if text is not None and text not in hidden]
        decoder = self._backend.decoder
        return " ".join(spelled) if decoder is None else str(decoder.decode(spelled))

    def token_to_id(self, text: str) -> int | None:
        """The id of one token as the vocabulary spells it, None where it has no such token."""
        added = self._table.added.get(text)
        return self._table.id_of(text) if added is None else added

    def id_to_token(self, id_: int) -> str | None:
        """The vocabulary's spelling of an id, None where it has no such id."""
        spelled = self._spelled.get(id_)
        return self._table.spelling(id_) if spelled is None else spelled

    def _added_tokens(self) -> dict[int, AddedToken]:
        return self._added

    def _ids(self, text: str, add_special_tokens: bool, placeholders: Set[int] = frozenset()) -> list[int]:
        if len(text) <= SHORT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = []
        for word, symbols in groupby(zip(encoding.word_ids, encoding.ids, strict=True), key=_word):
            if word is None:  # what the template adds, by its ids there
                ids += [id_ for _, id_ in symbols]
                continue
            true = tuple(SPECIAL if id_ in placeholders else self._true[id_] for _, id_ in symbols)
            if len(true) == 1:
                ids += true
            else:
                ids += self._seen(true) if len(true) <= _LONGEST_SEEN else self._merged(true)
        return ids


def mapped_tokenizer_bytes(table: Path, *, used: bool) -> int:
    """What stays of a mapped tokenizer in memory of its own; 0 where the table cannot be read."""
    with suppress(ArrayFileError, OSError, KeyError, ValueError):
        symbols = TokenizerTable(table).tokenizer
        return _LIBRARY_BYTES + _PARSED * len(symbols) + (SEEN_WORDS * _SEEN_WORD_BYTES if used else 0)
    return 0


def _merged(table: TokenizerTable, symbols: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of a word: of all neighbours that make a token those of the lowest rank do, of equal ones the
    leftmost, until there are none."""
    merge = table.merge
    if table.whole_words:
        whole = table.id_of("".join(table.spelling(id_) or "" for id_ in symbols))
        if whole is not None:
            return (whole,)
    ids = list(symbols)
    before, after = list(range(-1, len(ids) - 1)), list(range(1, len(ids) + 1))
    # Each with the two tokens that it is of: where either was merged meanwhile, it is gone.
    pairs = ((merge(left, right), at, left, right) for at, (left, right) in enumerate(pairwise(ids)))
    found = [(merged, at, left, right) for merged, at, left, right in pairs if merged is not None]
    heapify(found)
    while found:
        merged, at, left, right = heappop(found)
        other = after[at]
        if ids[at] != left or other == len(ids) or ids[other] != right:
            continue
        ids[at], ids[other] = merged & _LOWER, SPECIAL
        end = after[at] = after[other]
        if end < len(ids):
            before[end] = at
            if (follows := merge(ids[at], ids[end])) is not None:
                heappush(found, (follows, at, ids[at], ids[end]))
        start = before[at]
        if start >= 0 and (precedes := merge(ids[start], ids[at])) is not None:
            heappush(found, (precedes, start, ids[start], ids[at]))
    return tuple(id_ for id_ in ids if id_ != SPECIAL)


def _word(symbol: tuple[int | None, int]) -> int | None:
    return symbol[0]
