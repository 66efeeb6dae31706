"""Tells a tokenizer of the `tokenizers` library where special tokens are, while it takes text that spells them as text.

The library parses either all special tokens in a text or none. So it is given tokens of our own besides, one for each
way in which its special tokens treat the text around them, under names that no text holds; they stand where special
tokens are meant, and so text is cut, normalized and split as it is around those. Whoever owns the tokenizer hides them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import AddedToken

from edgeinfer.runtime.text.contracts import MARK

__all__ = ["MarkStands"]

# Of a private use plane: normalizers leave them alone, and nobody can guess a name.
_FIRST, _COUNT, _LENGTH = 0xF0000, 0xFFFE, 8

_Way = tuple[bool, bool, bool, bool]
_PLAIN: _Way = (False, False, False, False)


class MarkStands:
    """Stand-ins for special tokens.

    Args:
        backend: is given them, where it has ids for them that nothing else has.
        encoded: gives its token ids of a text, without those that it adds.

    Attributes:
        ids: of the stand-ins; no texts and no other tokens have them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, encoded: Callable[[str], list[int]]) -> None:
        self._backend = backend
        self._encoded = encoded
        added = backend.get_added_tokens_decoder()
        special = {id_: token for id_, token in added.items() if token.special}
        self._ways = {backend.id_to_token(id_): _way(token) for id_, token in special.items()}
        self._ways |= {token.content: _way(token) for token in special.values()}
        self._names = {way: _name() for way in {_PLAIN, *self._ways.values()}}
        # How the library numbers added tokens.
        first = max(backend.get_vocab_size(with_added_tokens=False), 1 + max(added, default=-1))
        self.ids = frozenset(range(first, first + len(self._names)))
        self._added = all(backend.id_to_token(id_) is None for id_ in self.ids)
        if self._added:
            kept = backend.normalizer is None or all(map(self._survives, self._names.values()))
            backend.add_tokens([_token(name, way, kept) for way, name in self._names.items()])
        else:
            self.ids = frozenset()

    def encode(self, parts: Sequence[str]) -> list[int]:
        """Token ids of text with special tokens; see `contracts.TokenizerLike.encode_between`. The library must be set
        to parse none."""
        if self._added:
            names = (self._names[self._ways.get(mark, _PLAIN)] for mark in parts[1::2])
            text = "".join(next(names) if place % 2 else part for place, part in enumerate(parts))
            ids = [MARK if id_ in self.ids else id_ for id_ in self._encoded(text)]
            if ids.count(MARK) == len(parts) // 2:
                return ids
        # Each part by itself: a tokenizer that treats the beginning of a text apart does so with each.
        return [id_ for place, part in enumerate(parts) for id_ in ((MARK,) if place % 2 else self._encoded(part))]

    def _survives(self, name: str) -> bool:
        """Whether a name is found in normalized text; some normalizers drop what is no text."""
        return name in str(self._backend.normalizer.normalize_str(name))


def _name() -> str:
    return "".join(chr(_FIRST + secrets.randbelow(_COUNT)) for _ in range(_LENGTH))


def _way(token: AddedToken) -> _Way:
    return token.lstrip, token.rstrip, token.single_word, token.normalized


def _token(name: str, way: _Way, kept: bool) -> AddedToken:
    lstrip, rstrip, single_word, normalized = way
    normalized = normalized and kept
    return AddedToken(name, lstrip=lstrip, rstrip=rstrip, single_word=single_word, normalized=normalized, special=False)
