"""Reads replies while they are written: text, and calls in any form of `dialects.toml`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol

from edgeinfer.core.records import dataclass
from edgeinfer.core.results import Chunk
from edgeinfer.openai.dialects import Kind, Kinds, ToolFormat, as_json, escaped, plain_key


@dataclass(frozen=True)
class TextPiece:
    text: str


@dataclass(frozen=True)
class CallPiece:
    """The start of a call."""

    place: int  # index of the call in the reply
    id: str  # the answer to the call names it
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """Some of a call's arguments, which together are a JSON object."""

    place: int
    text: str


@dataclass(frozen=True)
class ReasoningPiece:
    """Some of the thought before the answer."""

    text: str


Piece = TextPiece | CallPiece | ArgumentsPiece | ReasoningPiece


class ReplyReader(Protocol):
    """Splits the chunks of one reply into text and calls."""

    def push(self, chunk: Chunk) -> list[Piece]:
        """Pieces that became certain with a chunk."""

    def finish(self) -> list[Piece]:
        """Pieces that were waiting back, at the end of the reply."""

    @property
    def in_call(self) -> bool:
        """Whether a call has started whose arguments are not complete."""


class PlainReader:
    """Reads replies that are only text."""

    def push(self, chunk: Chunk) -> list[Piece]:
        return [TextPiece(chunk.text)] if chunk.text else []

    def finish(self) -> list[Piece]:
        return []

    @property
    def in_call(self) -> bool:
        return False


_NAME = r"(?P<name>[A-Za-z0-9_.:/-]{1,128})"
_HOLES = {"{name}": _NAME, "{index}": r"\d+", "{id}": r"(?P<id>[\w-]+)", "{kind}": r"(?P<kind>\w+)"}
_HOLES["{key}"] = r"(?P<key>[^\n]+?)"
_UNIT = re.compile(r"\{(?:name|index|id|kind|key)\}|\s+|.", re.DOTALL)
_FIRST_PLACEHOLDER, _PLACEHOLDERS = 0xD800, 0x800  # surrogates, which no text holds
_HIDDEN = dict.fromkeys(range(_FIRST_PLACEHOLDER, _FIRST_PLACEHOLDER + _PLACEHOLDERS))


@dataclass(frozen=True)
class _Literal:
    """A text of a form, however its blanks are written."""

    whole: re.Pattern[str]
    start: re.Pattern[str]  # fully matches any beginning of it

    @classmethod
    def of(cls, text: str, behind: str = "") -> _Literal:
        units: list[str] = []
        before = "a"
        for unit in _UNIT.findall(text):
            blank, word = unit.isspace(), unit in _HOLES or unit.isalnum() or unit == "_"
            if not (blank or word or before.isspace() or before.isalnum()):
                units.append(r"\s*")
            units.append(r"\s*" if blank else _HOLES.get(unit) or re.escape(unit))
            before = "a" if word else unit
        nested = ""
        for unit in reversed([*units, behind]):
            nested = f"(?:{unit}{nested})?"
        return cls(re.compile("".join(units) + behind), re.compile(nested))

    def begins(self, text: str) -> bool:
        return self.start.fullmatch(text) is not None


@dataclass(frozen=True)
class _Form:
    """A form with its texts ready to be found."""

    format: ToolFormat
    first: _Literal  # up to the arguments of a first call
    another: _Literal  # and of another one, behind the end of a call
    tail: _Literal
    close: _Literal
    parameter: _Literal  # up to a parameter's value
    lead: _Literal  # the start of that
    value_end: str
    quote: str

    @classmethod
    def of(cls, form: ToolFormat, tags: tuple[str, ...]) -> _Form:
        def spelled(text: str) -> str:
            for place, tag in enumerate(tags):
                text = text.replace(tag, chr(_FIRST_PLACEHOLDER + place))
            return text

        head, middle, tail = map(spelled, form.parts)
        before, after = map(spelled, form.ends)
        key, value, value_end = map(spelled, form.tags)
        ended = r"\s*" if form.style == "json" else ""
        if not middle.strip():  # a name ends where arguments begin, or the call ends
            follows = key[:1] + tail.lstrip()[:1] if form.style == "tagged" else "{"
            ended = rf"\s*(?=[{re.escape(follows)}])"
        return cls(
            form,
            _Literal.of(f"{before}{head}{{name}}{middle}", ended),
            _Literal.of(f"\n{spelled(form.between)}{head}{{name}}{middle}", ended),
            _Literal.of(f"\n{tail}"),
            _Literal.of(f"\n{after}"),
            _Literal.of(f"\n{key}{{key}}{value.rstrip()}"),
            _Literal.of(f"\n{key}"),
            value_end.strip(),
            spelled(form.quote),
        )


_form = lru_cache(256)(_Form.of)


class CallReader:
    """Reads replies that may hold calls in the forms of a family. Text that turns out to be no call stays text.

    Args:
        names: functions that may be called.
        kinds: which parameters hold texts.
        tokens: tags of the forms that are special tokens, by id, which have no text.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Sequence[str] = (),
        kinds: Kinds | None = None,
        tokens: Mapping[int, str] | None = None,
    ) -> None:
        texts = tuple((tokens or {}).values())
        self._placeholders = {id_: chr(_FIRST_PLACEHOLDER + place) for place, id_ in enumerate(tokens or {})}
        self._kinds = kinds or Kinds({})
        self._forms = [_form(each, texts) for each in form.family]
        spelled = {text: chr(_FIRST_PLACEHOLDER + place) for place, text in enumerate(texts)}
        # A tag inside of a value is text of it.
        self._tags = {ord(placeholder): json.dumps(text)[1:-1] for text, placeholder in spelled.items()}
        self._markers: list[tuple[str, _Form]] = []
        for each in self._forms:
            for marker in each.format.markers(names):
                for text, placeholder in spelled.items():
                    marker = marker.replace(text, placeholder)
                self._markers.append((marker, each))
        self._anywhere = [marker for marker, each in self._markers if each.format.anywhere]
        self._marked = re.compile("|".join(map(re.escape, self._anywhere))) if self._anywhere else None
        self._form_of = dict(self._markers)
        self._starts = {marker[0] for marker in self._anywhere}
        self._longest = max(map(len, self._anywhere), default=1) - 1
        self._buffer = ""
        self._state: Callable[[], list[Piece] | None] = self._in_text
        self._said = False  # whether any text was given
        self._final = False
        self._place = -1
        self._current = self._forms[0]
        self._arguments: _Arguments = _JsonArguments()

    def push(self, chunk: Chunk) -> list[Piece]:
        if self._placeholders:
            # The text of a chunk comes after its token.
            self._buffer += "".join(self._placeholders.get(id_, "") for id_ in chunk.token_ids)
        self._buffer += chunk.text
        return self._read()

    def finish(self) -> list[Piece]:
        self._final = True
        pieces = self._read()
        left, self._buffer = self._buffer, ""
        # A call that was cut short has nothing to add to its arguments, which were given.
        return pieces + (self._text(left) if self._state == self._in_text else [])

    @property
    def in_call(self) -> bool:
        return self._state in (self._in_head, self._in_arguments)

    def _read(self) -> list[Piece]:
        pieces: list[Piece] = []
        while (found := self._state()) is not None:
            pieces += found
        return pieces

    def _in_text(self) -> list[Piece] | None:
        text = self._buffer
        at, form = len(text), None
        if not self._said:
            start = text.lstrip()
            firsts = [(marker, each) for marker, each in self._markers if not each.format.anywhere]
            for marker, each in firsts:
                if start.startswith(marker.lstrip()):
                    at, form = len(text) - len(start), each
            if form is None and not self._final and any(marker.lstrip().startswith(start) for marker, _ in firsts):
                return None
        if form is None and self._marked is not None and (found := self._marked.search(text)) is not None:
            at, form = found.start(), self._form_of[found.group()]
        if form is not None:
            shown = text[:at].rstrip()
            self._buffer, self._current, self._state = text[at:], form, self._in_head
            return self._text(shown)
        # Characters at the end that may be the start of a marker wait, and so do blanks before them.
        shown = text[: len(text) - (0 if self._final else self._waiting(text))]
        shown = shown if self._final else shown.rstrip()
        self._buffer = text[len(shown) :]
        return self._text(shown) or None

    def _waiting(self, text: str) -> int:
        for at in range(max(len(text) - self._longest, 0), len(text)):
            if text[at] in self._starts and any(each.startswith(text[at:]) for each in self._anywhere):
                return len(text) - at
        return 0

    def _in_head(self) -> list[Piece] | None:
        head = self._current.first
        match = head.whole.match(self._buffer)
        if match is not None:
            return self._called(match)
        if head.begins(self._buffer):
            return None
        # No call after all.
        shown, self._buffer, self._state = self._buffer[0], self._buffer[1:], self._in_text
        return self._text(shown)

    def _called(self, match: re.Match[str]) -> list[Piece]:
        self._buffer = self._buffer[match.end() :]
        self._place += 1
        form, name = self._current.format, match["name"]
        if form.style == "tagged":
            self._arguments = _TaggedArguments(self._current, lambda key: self._kinds.of(name, key))
        elif form.style == "json":
            self._arguments = _JsonArguments()
        else:
            self._arguments = _WholeArguments(self._current)
        self._state = self._in_arguments
        id_ = match.groupdict().get("id") or form.new_id(name, self._place)
        return [CallPiece(self._place, id_, name)]

    def _in_arguments(self) -> list[Piece] | None:
        read, used, done = self._arguments.feed(self._buffer, self._final)
        self._buffer = self._buffer[used:]
        if done:
            self._state = self._in_tail
        elif not read:
            return None
        return [ArgumentsPiece(self._place, read.translate(self._tags) if self._tags else read)] if read else []

    def _in_tail(self) -> list[Piece] | None:
        tail = self._current.tail
        match = tail.whole.match(self._buffer)
        if match is None and tail.begins(self._buffer):
            return None
        self._buffer = self._buffer[0 if match is None else match.end() :]
        self._state = self._behind
        return []

    def _behind(self) -> list[Piece] | None:
        """Read another call or the end of all calls, which may start alike."""
        form = self._current
        if (match := form.another.whole.match(self._buffer)) is not None:
            return self._called(match)
        match = form.close.whole.match(self._buffer)
        if match is not None and form.format.ends[1]:
            self._buffer = self._buffer[match.end() :]
        elif form.another.begins(self._buffer) or form.close.begins(self._buffer):
            return None
        self._state, self._said = self._in_text, True
        return []

    def _text(self, text: str) -> list[Piece]:
        visible = text.translate(_HIDDEN) if self._placeholders else text
        self._said = self._said or bool(visible)
        return [TextPiece(visible)] if visible else []


class _Arguments(Protocol):
    """Turns a call's arguments into JSON."""

    def feed(self, text: str, final: bool) -> tuple[str, int, bool]:
        """JSON that became certain, how much of the text was read for it, and whether the arguments are complete."""


class _JsonArguments:
    """Arguments that are a JSON object: finds its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = self._escaped = False

    def feed(self, text: str, final: bool) -> tuple[str, int, bool]:
        blanks = 0 if self._depth else len(text) - len(text.lstrip())
        for at, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return text[blanks : at + 1], at + 1, True
        return text[blanks:], len(text), False


class _WholeArguments:
    """Python's keywords up to a bracket, or an object of bare keys: turned into JSON once they are complete."""

    def __init__(self, form: _Form) -> None:
        self._python = form.format.style == "python"
        self._quotes = ("'", '"') if self._python else ('"', form.quote)
        self._depth, self._at, self._open = 0, 0, ""

    def feed(self, text: str, final: bool) -> tuple[str, int, bool]:
        at = self._at
        while at < len(text):
            if self._open:
                if text[at] == "\\" and len(self._open) == 1 and self._open in "'\"":
                    at += 2
                    continue
                if text.startswith(self._open, at):
                    at += len(self._open)
                    self._open = ""
                    continue
            elif quote := next((each for each in self._quotes if text.startswith(each, at)), None):
                self._open = quote
                at += len(quote)
                continue
            elif not final and any(each.startswith(text[at:]) for each in self._quotes):
                break
            elif text[at] in "([{":
                self._depth += 1
            elif text[at] in ")]}":
                if self._python and self._depth == 0:
                    return self._whole(text[:at]), at, True
                self._depth -= 1
                if not self._python and self._depth == 0:
                    return self._whole(text[: at + 1]), at + 1, True
            if self._open and not final and self._open.startswith(text[at:]):
                break
            at += 1
        self._at = at
        return "", 0, False

    def _whole(self, text: str) -> str:
        try:
            value = _keywords(text) if self._python else _Bare(text, self._quotes[-1]).value()
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError, IndexError):
            return text


_ESCAPE = re.compile(r"\\(.)", re.DOTALL)


def _keywords(text: str) -> dict[str, Any]:
    # Python warns of escapes that it does not know.
    text = _ESCAPE.sub(lambda found: ("" if found[1] in "\n\\'\"abfnrtvxuUN01234567" else "\\") + found[0], text)
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    if call.args:
        raise ValueError("arguments without a name")
    made: dict[str, Any] = {}
    for each in call.keywords:
        value = _literal(each.value)
        made |= {each.arg: value} if each.arg is not None else value
    return made


_CONSTANTS = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    """The value of Python's or JSON's literal."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_literal(key)): _literal(value) for key, value in pairs if key is not None}
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return list(map(_literal, parts))
        case _:
            return ast.literal_eval(node)


class _Bare:
    """Reads an object of bare keys."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._at = text, quote, 0

    def value(self) -> Any:
        self._blanks()
        first = self._text[self._at]
        if first == "{":
            return dict(self._items("}", self._pair))
        if first == "[":
            return self._items("]", self.value)
        if self._text.startswith(self._quote, self._at):
            end = self._text.index(self._quote, self._at + len(self._quote))
            found = self._text[self._at + len(self._quote) : end]
            self._at = end + len(self._quote)
            return found
        if first == '"':
            found, self._at = json.JSONDecoder(strict=False).raw_decode(self._text, self._at)
            return found
        match = re.compile(r"[^,\]}]*").match(self._text, self._at)
        assert match is not None
        self._at = match.end()
        word = match.group().strip()
        known = as_json(word)
        return word if known is None else known[0]

    def _items(self, end: str, read: Callable[[], Any]) -> list[Any]:
        self._at += 1
        found: list[Any] = []
        while True:
            self._blanks()
            if self._text[self._at] == end:
                self._at += 1
                return found
            found.append(read())
            self._blanks()
            self._at += self._text[self._at] == ","

    def _pair(self) -> tuple[str, Any]:
        if self._text[self._at] == '"' or self._text.startswith(self._quote, self._at):
            key = self.value()
            self._blanks()
        else:
            end = self._text.index(":", self._at)
            key, self._at = self._text[self._at : end].strip(), end
        if self._text[self._at] != ":":
            raise ValueError("a key without a value")
        self._at += 1
        return str(key), self.value()

    def _blanks(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1


class _TaggedArguments:
    """Parameters in tags. A text is given as it comes, a value once it is complete."""

    def __init__(self, form: _Form, kind: Callable[[str], Kind]) -> None:
        self._form, self._kind_of = form, kind
        self._kind: Kind | None = None  # that of the parameter whose value is read
        self._fresh = False  # whether its first line break may still come
        self._streamed = False  # whether some of its text was given
        self._written = ""  # what the next parameter is written behind
        self._before = "{"

    def feed(self, text: str, final: bool) -> tuple[str, int, bool]:
        if self._kind is None:
            return self._between(text, final)
        used = 0
        if self._fresh:
            if not text and not final:
                return "", 0, False
            self._fresh = False
            used = int(self._form.format.tags[1].endswith("\n") and text.startswith("\n"))
        read, more, _ = self._value(text[used:], final)
        return read, used + more, False

    def _between(self, text: str, final: bool) -> tuple[str, int, bool]:
        match = self._form.parameter.whole.match(text)
        if match is None:
            if self._form.parameter.begins(text):
                return "", 0, False
            return ("{}" if self._before == "{" else "}"), 0, True
        key = plain_key(match["key"].strip())
        kind = match.groupdict().get("kind")
        self._kind = self._kind_of(key) if kind is None else "text" if kind == "true" else "value"
        self._fresh, self._streamed = True, False
        read = f"{self._before}{json.dumps(key, ensure_ascii=False)}: "
        self._before = ", "
        return read, match.end(), False

    def _value(self, text: str, final: bool) -> tuple[str, int, bool]:
        end, waits = self._end(text, final)
        if end is None:
            waiting = max(len(text) - len(self._form.value_end) - 1, 0) if waits is None else waits
            if self._kind != "text" or (not self._streamed and text.startswith('"')) or not waiting:
                return "", 0, False
            return self._given(text[:waiting]), waiting, False
        value = text[:end]
        if self._form.format.tags[2].startswith("\n"):
            value = value.removesuffix("\n")
        used = end + len(self._form.value_end)
        kind, self._kind = self._kind, None
        if kind != "text":
            return _as_value(value, kind == "either"), used, False
        if not self._streamed and escaped(value):
            return value, used, False
        return self._given(value) + '"', used, False

    def _given(self, text: str) -> str:
        start, self._streamed = ('"' if not self._streamed else ""), True
        return start + json.dumps(text, ensure_ascii=False)[1:-1]

    def _end(self, text: str, final: bool) -> tuple[int | None, int | None]:
        """Where the value ends, by what follows; else how much of the text is certain, None for all but its end."""
        mark, form = self._form.value_end, self._form
        at = text.find(mark)
        first = at
        while at >= 0:
            rest = text[at + len(mark) :]
            if form.lead.whole.match(rest) or form.tail.whole.match(rest):
                return at, None
            if form.lead.begins(rest) or form.tail.begins(rest):
                return (at, None) if final else (None, max(at - 1, 0))
            at = text.find(mark, at + 1)
        return (first if final and first >= 0 else None), None


def _as_value(text: str, may_be_text: bool) -> str:
    """A parameter's value as JSON; a text where it is none."""
    known = as_json(text)
    if known is None and not may_be_text:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            known = (ast.literal_eval(text.strip()),)
    try:
        return json.dumps(text if known is None else known[0], ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return json.dumps(text, ensure_ascii=False)
