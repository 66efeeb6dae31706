"""Turns text into tokens of which none is a control token unless it was meant; knows nothing of templates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from edgeinfer.errors import TokenizerError
from edgeinfer.runtime.text.byte_level import byte_token
from edgeinfer.runtime.text.contracts import MARK, TokenizerLike
from edgeinfer.runtime.text.control_marks import ControlMarks
from edgeinfer.runtime.text.spelling import BYTE_LEVEL, bytes_of

__all__ = ["LiteralEncoder"]

# A character that no text has and no vocabulary knows.
_UNKNOWN = "\U0010fffe"


class LiteralEncoder:
    """A tokenizer that tells marks from text that looks like them.

    Args:
        tokenizer: turns text into tokens.
        end_ids: tokens that end a reply.

    Attributes:
        marks: of the tokenizer.
    """

    def __init__(self, tokenizer: TokenizerLike, end_ids: Iterable[int] = ()) -> None:
        self.marks = ControlMarks.of(tokenizer, end_ids)
        self._tokenizer = tokenizer
        self._by_character: dict[int, tuple[int, ...]] = {}

    def literal(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text that is data.

        Args:
            add_special_tokens: as of `contracts.TokenizerLike.encode`; the tokenizer's own are the only ones then.
        """
        tokenizer = self._tokenizer
        ids = tokenizer.encode(text, add_special_tokens, parse_special=False)
        if self._controls.isdisjoint(ids):
            return ids
        bare = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        front = next(
            (at for at in range(len(ids) - len(bare)) if ids[at : at + len(bare)] == bare), len(ids) - len(bare)
        )
        return [*ids[:front], *self._spelled(bare), *ids[front + len(bare) :]]

    def marked(self, parts: Sequence[str]) -> list[int]:
        """Token ids of a text in parts, every second of which is a mark; the others are data."""
        text, meant = "".join(parts), [self.marks.ids[mark] for mark in parts[1::2]]
        if self.marks.split(text) == list(parts):
            # Nothing looks like a mark that is none. A vocabulary or a normalizer may still make one of other text.
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if _among(self._only(ids), meant):
                return ids
        marks = iter(meant)
        spelled = self._spelled(self._tokenizer.encode_between(parts))
        return [next(marks) if id_ == MARK else id_ for id_ in spelled]

    def _only(self, ids: Iterable[int]) -> list[int]:
        return [id_ for id_ in ids if id_ in self._controls]

    def _spelled(self, ids: Iterable[int]) -> Iterator[int]:
        """Each control token, which the vocabulary made of plain text, character by character."""
        for id_ in ids:
            if id_ in self._controls:
                if id_ not in self._by_character:
                    self._by_character[id_] = tuple(self._characters(id_))
                yield from self._by_character[id_]
            else:
                yield id_

    def _characters(self, id_: int) -> Iterator[int]:
        tokenizer, unknown = self._tokenizer, sorted(self._unknown)[:1]
        if tokenizer.decoder_types == BYTE_LEVEL:
            spellings = [[byte_token(byte)] for byte in bytes_of(tokenizer, id_)]
        else:
            spellings = [[character, f"##{character}"] for character in tokenizer.id_to_token(id_) or ""]
        for place, ways in enumerate(spellings):
            # Words of WordPiece go on with marked characters.
            found = [tokenizer.token_to_id(way) for way in (reversed(ways) if place else ways)]
            whole = [each for each in found if each is not None and each not in self._controls]
            if whole:
                yield whole[0]
                continue
            in_bytes = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in ways[0].encode("utf-8")]
            yield from unknown if None in in_bytes else (each for each in in_bytes if each is not None)

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """What stands for characters that the vocabulary lacks: special, but it controls nothing."""
        try:
            ids = self._tokenizer.encode(_UNKNOWN, add_special_tokens=False, parse_special=False)
        except TokenizerError:  # there is nothing that stands for them
            return frozenset()
        return frozenset(self._tokenizer.control_texts.values()).intersection(ids)

    @cached_property
    def _controls(self) -> frozenset[int]:
        return frozenset(self.marks.ids.values()) - self._unknown


def _among(ids: Sequence[int], wanted: Iterable[int]) -> bool:
    """Whether these are some of what is wanted, in its order."""
    left = iter(wanted)
    return all(id_ in left for id_ in ids)
