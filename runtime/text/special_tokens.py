"""Special tokens in rendered text, and how text from messages is kept from posing as one.

A chat template writes special tokens as text, such as "<|im_end|>", and a message may contain the same characters. So a
conversation is rendered a second time, with the first and last characters of all special tokens replaced in its data by
placeholders: characters of Unicode's private use areas that occur nowhere else. A special token that is whole in that
text was written by the template.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, Self

from edgeinfer.core.errors import PromptError, TokenizerError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.text.contract import BYTE_LEVEL, SPECIAL, TokenizerLike, byte_token, bytes_of
from edgeinfer.runtime.text.template import ChatTemplate

# An end token that is not marked as special counts as one where it is written like one, and not as a word.
_LIKE_SPECIAL = re.compile(r"[<\[({].+[>\])}]", re.DOTALL)
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_ESCAPED = re.compile(r"\\u([0-9a-f]{4})")
_PLACEHOLDERS = range(0xE000, 0xF900)
# A character that no text has and no vocabulary knows.
_UNKNOWN = "\U0010fffe"
# Roles, which templates write between pieces of special tokens.
_ROLES = frozenset(
    ("system", "developer", "user", "human", "assistant", "model", "bot", "tool", "function", "ipython", "environment",
     "observation", "context", "documents", "text")
)  # fmt: skip
# Keys that every template is given, by these names.
_KEYS = frozenset({"role", "content", "type", "text", "tool_calls"})
# Constants of a template that are looked for in data: no chat template has more, or longer ones.
_MOST_CONSTANTS, _LONGEST_CONSTANT = 200, 200


@dataclass(frozen=True)
class SpecialTokens:
    """Texts of special tokens with their ids."""

    ids: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: TokenizerLike, end_ids: Iterable[int] = ()) -> Self:
        """Collect the special tokens of a tokenizer, and the tokens that end a reply even if it does not mark them."""
        found = {text: id_ for text, id_ in tokenizer.control_texts.items() if text}
        ends = {tokenizer.id_to_token(id_): id_ for id_ in set(end_ids).difference(found.values())}
        return cls(found | {text: id_ for text, id_ in ends.items() if text and _LIKE_SPECIAL.fullmatch(text)})

    def split(self, text: str) -> list[str]:
        """Split a text into parts of which every second one is a special token; the longest where several begin."""
        return self._pattern.split(text) if self._pattern is not None else [text]

    @cached_property
    def edges(self) -> frozenset[str]:
        """First and last characters of special tokens."""
        return frozenset(edge for text in self.ids for edge in (text[0], text[-1]))

    @cached_property
    def characters(self) -> frozenset[str]:
        """All characters of special tokens."""
        return frozenset("".join(self.ids))

    def inside(self, text: str) -> bool:
        """Whether a special token has this text, white space and case aside, between its first and last character."""
        core = text.strip()
        return 0 < len(core) <= self._longest and core.casefold() in self._inner

    def harmless(self, constant: str) -> frozenset[int]:
        """Places of edge characters that cannot begin or end a special token in this text."""
        places = (place for place, character in enumerate(constant) if character in self.edges)
        return frozenset(place for place in places if not self._dangerous(constant, place))

    def _dangerous(self, text: str, place: int) -> bool:
        here, before = text[place:], text[: place + 1]
        begins = any(here.startswith(token) or token.startswith(here) for token in self.ids)
        return begins or any(before.endswith(token) or token.endswith(before) for token in self.ids)

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        if not self.ids:
            return None
        try:
            return re.compile(f"({_any_of(sorted(self.ids))})")
        except RecursionError:  # hundreds of tokens, each of which begins with the one before
            longest_first = sorted(self.ids, key=len, reverse=True)
            return re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    @cached_property
    def _inner(self) -> str:
        return "\0".join(text[1:-1] for text in self.ids).casefold()

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.ids), default=0)


def _any_of(texts: Sequence[str]) -> str:
    """Write a pattern that matches the longest of some sorted texts. A common beginning is matched once: vocabularies
    have hundreds of special tokens that differ in a number."""
    first, last = texts[0], texts[-1]
    alike = next((at for at, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), len(first))
    rest = [text[alike:] for text in texts]
    ways = [_any_of(list(group)) for _, group in groupby(filter(None, rest), key=lambda text: text[0])]
    behind = f"(?:{'|'.join(ways)})" if ways else ""
    return re.escape(first[:alike]) + (behind if rest[0] or not behind else f"{behind}?")


class Placeholders:
    """Characters that replace others while a template runs; none of them occurs in `texts`."""

    def __init__(self, characters: Iterable[str], texts: Collection[str]) -> None:
        taken = {ord(found) for text in texts for found in _PRIVATE.findall(text)}
        # A template may write JSON in ASCII.
        taken |= {int(found, 16) for text in texts if "\\u" in text for found in _ESCAPED.findall(text)}
        free = (code for code in _PLACEHOLDERS if code not in taken)
        self._codes: dict[str, int] = {}
        for character in sorted(set(characters)):
            code = next(free, None)
            if code is None:
                message = "The messages contain all characters of Unicode's private use area."
                raise PromptError(message, "Leave some of them out.")
            self._codes[character] = code
        self._characters = {code: character for character, code in self._codes.items()}

    def hide(self, text: str, characters: Collection[str], exempt: Collection[int] = ()) -> str:
        """Replace characters by their placeholders, except at some places."""
        changed = text
        for character in characters:
            changed = changed.replace(character, chr(self._codes[character]))
        if not exempt:
            return changed
        letters = list(changed)
        for place in exempt:
            letters[place] = text[place]
        return "".join(letters)

    def restore(self, text: str) -> str:
        """Replace all placeholders by their characters."""
        for code, character in self._characters.items():
            text = text.replace(chr(code), character)
        return _ESCAPED.sub(self._unescaped, text) if "\\u" in text else text

    def _unescaped(self, match: re.Match[str]) -> str:
        return self._characters.get(int(match.group(1), 16), match.group())


def strings_in(value: Any, key: str | None = None) -> Iterator[tuple[str | None, str]]:
    """List all texts of nested data, keys too, each with the key that it is under; keys are under none."""
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
    """Change all texts of nested data; `change` also takes the key that each is under, as `strings_in` gives it."""
    if isinstance(value, str):
        return change(key, str.__str__(value))
    if isinstance(value, Mapping):
        return {change(None, str(name)): mapped(inner, change, str(name)) for name, inner in value.items()}
    if isinstance(value, Sequence):
        return [mapped(inner, change, key) for inner in value]
    return value


@dataclass(frozen=True)
class GuardedTemplate:
    """A chat template with the special tokens that its data must not write."""

    template: ChatTemplate
    special_tokens: SpecialTokens

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        partial_reply: str = "",
    ) -> list[str]:
        """Render a conversation in parts, of which every second one is a special token that the template wrote."""
        if tools and self._tool_use is not None:
            return self._tool_use.parts(messages, tools, variables, partial_reply)
        messages, tools = self.template.fitted(messages, True, tools, variables)
        plain = self.template.rendered(messages, True, tools, variables)
        given = dict(variables or {})
        found = [*strings_in((messages, tools)), ("content", partial_reply)]
        found += [each for name, value in given.items() for each in strings_in(value, name)]
        hidden = {each: characters for each in found if (characters := self._to_hide(*each))}
        if not hidden:
            return self.special_tokens.split(plain + partial_reply)
        texts = [plain, self.template.source, *(text for _, text in found)]
        placeholders = Placeholders(set().union(*hidden.values()), texts)

        def guarded(key: str | None, text: str) -> str:
            characters = hidden.get((key, text))
            return placeholders.hide(text, characters, self._exempt(key, text)) if characters else text

        values = {name: mapped(value, guarded, name) for name, value in given.items()}
        text = self.template.rendered(mapped(messages, guarded), True, mapped(tools, guarded), values)
        genuine = self.special_tokens.split(text + guarded("content", partial_reply))
        parts = [placeholders.restore(part) for part in genuine]
        if "".join(parts) == plain + partial_reply:
            return parts
        # The template looked at a character that was hidden. Where its special tokens are the same either way, the
        # text of the untouched data is right.
        as_it_is = self.special_tokens.split(plain + partial_reply)
        return as_it_is if as_it_is[1::2] == genuine[1::2] else parts

    def _to_hide(self, key: str | None, text: str) -> Collection[str]:
        """Characters of a text of the data that need placeholders."""
        if self._known(key, text):
            return ()
        if key == "role" or self.special_tokens.inside(text):
            return self.special_tokens.characters.intersection(text)
        edges = [edge for edge in self.special_tokens.edges if edge in text]
        if not edges:
            return ()
        exempt = Counter(text[place] for place in self._exempt(key, text))
        return [edge for edge in edges if text.count(edge) > exempt[edge]]

    def _known(self, key: str | None, text: str) -> bool:
        """Whether templates expect this very word, and may write special tokens around it."""
        if key is None:
            return text in _KEYS or text in self._words.names
        return key in ("role", "type") and (text in _ROLES or text in self._words.constants)

    def _exempt(self, key: str | None, text: str) -> Collection[int]:
        """Places in a text that belong to constants which the template looks for, and are harmless."""
        found: set[int] = set()
        if key == "role" or self.special_tokens.inside(text):
            return found
        for constant, places in self._words.harmless.items():
            begin = text.find(constant)
            while begin >= 0:
                found.update(begin + place for place in places)
                begin = text.find(constant, begin + 1)
        return found

    @cached_property
    def _tool_use(self) -> GuardedTemplate | None:
        return None if self.template.tool_use is None else GuardedTemplate(self.template.tool_use, self.special_tokens)

    @cached_property
    def _words(self) -> _Words:
        return _Words.of(self.template.source, self.special_tokens)


@dataclass(frozen=True)
class _Words:
    """Names and constants of a template's source. `constants` could not begin or end a special token; `harmless` are
    constants with the places that need no placeholder."""

    names: frozenset[str]
    constants: frozenset[str]
    harmless: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, source: str, special: SpecialTokens) -> _Words:
        import jinja2  # slow to import, and imported already: the template was rendered

        tokens = list(jinja2.Environment().lex(source))
        names = {text for _, kind, text in tokens if kind == "name"}
        strings = (text[1:-1] for _, kind, text in tokens if kind == "string")
        # As jinja2 reads texts in quotes.
        quoted = {text.encode("ascii", "backslashreplace").decode("unicode-escape") for text in strings}
        constants = {text for text in quoted if text.isidentifier() or special.edges.isdisjoint(text)}
        short = sorted(text for text in quoted if len(text) <= _LONGEST_CONSTANT and special.edges.intersection(text))
        places = {text: special.harmless(text) for text in short[:_MOST_CONSTANTS]}
        harmless = {text: where for text, where in places.items() if where}
        return cls(frozenset(names | constants), frozenset(constants), harmless)


class LiteralEncoder:
    """A tokenizer that tells special tokens from text that looks like them."""

    def __init__(self, tokenizer: TokenizerLike, end_ids: Iterable[int] = ()) -> None:
        self.special_tokens = SpecialTokens.of(tokenizer, end_ids)
        self._tokenizer = tokenizer
        self._by_character: dict[int, tuple[int, ...]] = {}

    def literal(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text without parsing special tokens."""
        tokenizer = self._tokenizer
        ids = tokenizer.encode(text, add_special_tokens, parse_special=False)
        if self._control_ids.isdisjoint(ids):
            return ids
        bare = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        front = next(
            (at for at in range(len(ids) - len(bare)) if ids[at : at + len(bare)] == bare), len(ids) - len(bare)
        )
        return [*ids[:front], *self._spelled(bare), *ids[front + len(bare) :]]

    def encode_parts(self, parts: Sequence[str]) -> list[int]:
        """Encode a text in parts, every second of which is a special token; the others are data."""
        text, meant = "".join(parts), [self.special_tokens.ids[token] for token in parts[1::2]]
        if self.special_tokens.split(text) == list(parts):
            # No data looks like a special token. A vocabulary or a normalizer may still make one of other text.
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if _among([id_ for id_ in ids if id_ in self._control_ids], meant):
                return ids
        special = iter(meant)
        spelled = self._spelled(self._tokenizer.encode_between(parts))
        return [next(special) if id_ == SPECIAL else id_ for id_ in spelled]

    def _spelled(self, ids: Iterable[int]) -> Iterator[int]:
        """Spell special tokens that the vocabulary made of plain text, character by character."""
        for id_ in ids:
            if id_ in self._control_ids:
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
            whole = [each for each in found if each is not None and each not in self._control_ids]
            if whole:
                yield whole[0]
                continue
            in_bytes = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in ways[0].encode("utf-8")]
            yield from unknown if None in in_bytes else (each for each in in_bytes if each is not None)

    @cached_property
    def _unknown(self) -> frozenset[int]:
        """The special token for characters that the vocabulary lacks, which controls nothing."""
        try:
            ids = self._tokenizer.encode(_UNKNOWN, add_special_tokens=False, parse_special=False)
        except TokenizerError:  # there is no such token
            return frozenset()
        return frozenset(self._tokenizer.control_texts.values()).intersection(ids)

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.ids.values()) - self._unknown


def _among(ids: Sequence[int], wanted: Iterable[int]) -> bool:
    """Whether these are some of what is wanted, in its order."""
    left = iter(wanted)
    return all(id_ in left for id_ in ids)
