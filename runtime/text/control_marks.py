"""The texts that a tokenizer turns into control tokens, and how data is kept apart from them.

Data goes into a template with the first and last characters of all marks replaced, one for one, by characters of
Unicode's private use areas that occur nowhere else. What is a mark in the rendered text was then written by the
template: every mark that data begins or ends lacks a character of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Self

from edgeinfer.errors import PromptError, TokenizerError
from edgeinfer.records import dataclass
from edgeinfer.runtime.text.contract import BYTE_LEVEL, MARK, TokenizerLike, byte_token, bytes_of

# An end token that is not marked as special counts as a mark where it is written like one, and not as a word.
_LIKE_A_MARK = re.compile(r"[<\[({].+[>\])}]", re.DOTALL)
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})")
_STANDS = range(0xE000, 0xF900)
# A character that no text has and no vocabulary knows.
_UNKNOWN = "\U0010fffe"


@dataclass(frozen=True)
class ControlMarks:
    """Texts with the ids of the control tokens that they are.

    Attributes:
        ids: by text.
    """

    ids: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: TokenizerLike, end_ids: Iterable[int] = ()) -> Self:
        """Those of a tokenizer, and the tokens that end a reply even if it does not mark them."""
        found = {text: id_ for text, id_ in tokenizer.control_texts.items() if text}
        ends = {tokenizer.id_to_token(id_): id_ for id_ in set(end_ids).difference(found.values())}
        return cls(found | {text: id_ for text, id_ in ends.items() if text and _LIKE_A_MARK.fullmatch(text)})

    def split(self, text: str) -> list[str]:
        """The text in parts of which every second one is a mark; the longest one where several begin."""
        return self._pattern.split(text) if self._pattern is not None else [text]

    @cached_property
    def edges(self) -> frozenset[str]:
        """Characters that begin or end a mark."""
        return frozenset(edge for text in self.ids for edge in (text[0], text[-1]))

    @cached_property
    def characters(self) -> frozenset[str]:
        """All that marks are made of."""
        return frozenset("".join(self.ids))

    def inside(self, text: str) -> bool:
        """Whether a text, white space and case aside, may stand between the first and last character of a mark."""
        core = text.strip()
        return 0 < len(core) <= self._longest and core.casefold() in self._inner

    def harmless(self, constant: str) -> frozenset[int]:
        """Places in a text whose characters cannot begin or end a mark there, though they begin or end some."""
        places = (place for place, character in enumerate(constant) if character in self.edges)
        return frozenset(place for place in places if not self._dangerous(constant, place))

    def _dangerous(self, text: str, place: int) -> bool:
        here, back = text[place:], text[: place + 1]
        starts = any(here.startswith(mark) or mark.startswith(here) for mark in self.ids)
        return starts or any(back.endswith(mark) or mark.endswith(back) for mark in self.ids)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if not self.ids:
            return None
        try:
            return re.compile(f"({_any_of(sorted(self.ids))})")
        except RecursionError:  # hundreds of marks, each of which begins with the one before
            longest_first = sorted(self.ids, key=len, reverse=True)
            return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @cached_property
    def _inner(self) -> str:
        return "\0".join(text[1:-1] for text in self.ids).casefold()

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids), default=0)


def _any_of(texts: Sequence[str]) -> str:
    """A pattern of any of these sorted texts, the longest that there is. What they begin with alike is looked at once:
    vocabularies have hundreds of marks that differ in a number."""
    first, last = texts[0], texts[-1]
    alike = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    rest = [text[alike:] for text in texts]
    ways = [_any_of(list(group)) for _, group in groupby(filter(None, rest), key=lambda text: text[0])]
    behind = f"(?:{'|'.join(ways)})" if ways else ""
    return re.escape(first[:alike]) + (behind if rest[0] or not behind else f"{behind}?")


class Stand:
    """Characters that stand for others while a template runs.

    Args:
        characters: to be stood for.
        texts: in which none of those that stand in may occur.

    Raises:
        PromptError: the texts hold all that could.
    """

    def __init__(self, characters: Iterable[str], texts: Collection[str]) -> None:
        taken = {ord(found) for text in texts for found in _PRIVATE.findall(text)}
        # A template may write JSON in ASCII.
        taken |= {int(found, 16) for text in texts if "\\u" in text for found in _ESCAPED.findall(text)}
        free = (code for code in _STANDS if code not in taken)
        self._codes: dict[str, int] = {}
        for character in sorted(set(characters)):
            code = next(free, None)
            if code is None:
                message = "The messages contain all characters of Unicode's private use area."
                raise PromptError(message, "Leave some of them out.")
            self._codes[character] = code
        self._back = {code: character for character, code in self._codes.items()}

    def put(self, text: str, characters: Collection[str], exempt: Collection[int] = ()) -> str:
        """The text with these characters stood for, but at places that are exempt."""
        changed = text
        for character in characters:
            changed = changed.replace(character, chr(self._codes[character]))
        if not exempt:
            return changed
        letters = list(changed)
        for place in exempt:
            letters[place] = text[place]
        return "".join(letters)

    def back(self, text: str) -> str:
        """The text with all characters its own again."""
        for code, character in self._back.items():
            text = text.replace(chr(code), character)
        return _ESCAPED.sub(self._unescaped, text) if "\\u" in text else text

    def _unescaped(self, match: re.Match[str]) -> str:
        return self._back.get(int(match.group(1), 16), match.group())


def strings_in(value: Any, key: str | None = None) -> Iterator[tuple[str | None, str]]:
    """All texts of nested data, keys too, each with the key that it is under; keys are under none."""
    stack: list[tuple[str | None, Any]] = [(key, value)]
    while stack:
        under, item = stack.pop()
        if isinstance(item, str):
            yield under, str.__str__(item)
        elif isinstance(item, Mapping):
            for name, inner in item.items():
                stack += [(None, str(name)), (str(name), inner)]
        elif isinstance(item, Sequence):
            stack += [(under, inner) for inner in item]


def mapped(value: Any, change: Callable[[str | None, str], str], key: str | None = None) -> Any:
    """Nested data with all its texts changed; `change` is given the key that each is under, as of `strings_in`."""
    if isinstance(value, str):
        return change(key, str.__str__(value))
    if isinstance(value, Mapping):
        return {change(None, str(name)): mapped(inner, change, str(name)) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [mapped(inner, change, key) for inner in value]
    return value


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
        """Token ids of a text that is data."""
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
