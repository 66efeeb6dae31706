"""Regular expressions of JSON Schema, which are ECMAScript's, as the grammar engine writes them. What the engine takes
for something else than ECMAScript does is spelled out, so that nothing of its own notation gets through, and what it
cannot follow is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NoReturn

from edgeinfer.core.errors import GrammarError

# By Unicode's categories: Zl and Zp are one line end each. No four digits stand side by side here and below, which
# would look like a large number to the trial.
_LINE_ENDS = r"\n\r\p{Zl}\p{Zp}"
_SETS = {"d": "0-9", "w": "0-9A-Za-z_", "s": "\\t-\\r\\p{Zs}\\p{Zl}\\p{Zp}\ufeff"}
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}
_BRACES = re.compile(r"\{\d+(?:,\d*)?\}")
_PROPERTY = re.compile(r"\{[A-Za-z_]+(?:=[A-Za-z_]+)?\}")
_UNITS = re.compile(r"u\{([0-9A-Fa-f]{1,6})\}|u([0-9A-Fa-f]{4})|x([0-9A-Fa-f]{2})|c([A-Za-z])")
_NAMED = re.compile(r"\?<[A-Za-z_$][\w$]*>")
_DIGITS = ("[0-9]", "[[0-9]]")  # as \d and [0-9], and [\d], are written here
_MOST_DIGITS = 40
_LOOKING = ("(?=", "(?!", "(?<=", "(?<!")
_PIECE = re.compile(r"\\.|\((?:\?<?[=!]|\?:)?|.", re.DOTALL)
_HIGH, _LOW, _LAST = range(0xD800, 0xDC00), range(0xDC00, 0xE000), 0x10FFFF

_DAYS = (
    "(?:0[13]|0[578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8])"
)
# Without the year 0, which RFC 3339 has and hardly any library of dates.
_YEAR = "(?:00(?:0[1-9]|[1-9][0-9])|(?:0[1-9]|[1-9][0-9])[0-9]{2})"
_FOURTH = "(?:0[48]|[24][048]|[68][048]|[135][26]|[79][26])"
_LEAP = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE = f"(?:{_YEAR}-(?:{_DAYS})|{_LEAP}-02-29)"
_ZONE = "[+-](?:[01][0-9]|2[0-3]):[0-5][0-9]"
_PART = r"(?:\.[0-9]{1,16})?"  # of a second: small models do not stop writing digits
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_PART}(?:[zZ]|{_ZONE})"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_H16 = "[0-9a-fA-F]{1,4}"
_LS32 = rf"(?:{_H16}:{_H16}|(?:{_BYTE}\.){{3}}{_BYTE})"


def _ipv6(least: int) -> str:
    """Groups, of which `::` stands for at least so many, the last two also as an IPv4 address."""
    forms = [f"(?:{_H16}:){{6}}{_LS32}"]
    for after in range(6 - least, -1, -1):
        before = 6 - least - after
        left = f"(?:(?:{_H16}:){{0,{before - 1}}}{_H16})?" if before else ""
        forms.append(f"{left}::(?:{_H16}:){{{after}}}{_LS32}")
    forms.append(f"(?:(?:{_H16}:){{0,{6 - least}}}{_H16})?::{_H16}")
    forms.append(f"(?:(?:{_H16}:){{0,{7 - least}}}{_H16})?::")
    return "|".join(forms)


def _times() -> tuple[str, str]:
    """Times by RFC 3339: texts that both expressions have. A leap second is the last one of a day in UTC, so that the
    offset tells hour and minute. One expression compares the hours and another the minutes: as one, it would have 2,880
    alternatives."""
    minutes = "|".join(
        rf"{minute:02}:60{_PART}(?:[+][0-9]{{2}}:{(minute + 1) % 60:02}|-[0-9]{{2}}:{59 - minute:02})"
        for minute in range(60)
    )
    hours = "|".join(
        rf"{hour:02}:[0-9]{{2}}:60{_PART}"
        rf"(?:[+]{(hour + 1) % 24:02}:00|[+]{hour:02}:(?:0[1-9]|[1-5][0-9])|-{23 - hour:02}:[0-9]{{2}})"
        for hour in range(24)
    )
    same = f"{_TIME}|23:59:60{_PART}[zZ]"
    return f"(?:{same}|[0-9]{{2}}:(?:{minutes}))", f"(?:{same}|{hours})"


def _email() -> str:
    """A mailbox by RFC 5321, section 4.1.2: its local part may be quoted, its domain an address."""
    atom, word = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]{1,64}", "[0-9A-Za-z](?:[0-9A-Za-z-]*[0-9A-Za-z])?"
    quoted = r'"(?:[ !#-\[\]-~]|\\[ -~]){0,64}"'
    address = rf"\[(?:(?:{_BYTE}\.){{3}}{_BYTE}|[Ii][Pp][Vv]6:(?:{_ipv6(2)}))\]"
    return rf"(?:{atom}(?:\.{atom})*|{quoted})@(?:{word}(?:\.{word})*|{address})"


def _duration() -> str:
    """By RFC 3339, appendix A, of numbers of at most 15 digits."""
    second, minute, hour, day, week, month, year = (f"[0-9]{{1,15}}{unit}" for unit in "SMHDWMY")
    time = f"T(?:{hour}(?:{minute}(?:{second})?)?|{minute}(?:{second})?|{second})"
    date = f"(?:{year}(?:{month}(?:{day})?)?|{month}(?:{day})?|{day})(?:{time})?"
    return f"P(?:{date}|{time}|{week})"


def _hostname() -> str:
    """By RFC 1123, at most 253 characters: three long labels or eight of thirty. Without hyphens in third and fourth
    place: whether Punycode behind them is valid takes tables of Unicode (RFC 5892) that no expression has."""
    any_of, word = "[0-9A-Za-z-]", "[0-9A-Za-z]"

    def label(most: int) -> str:
        long = f"{any_of}(?:{word}{any_of}|-{word}){any_of}{{0,{most - 5}}}{word}"
        return f"{word}(?:{any_of}?{word}|{any_of}{any_of}{word}|{long})?"

    return rf"{label(63)}(?:\.{label(63)}){{0,2}}|{label(30)}(?:\.{label(30)}){{0,7}}"


# Formats that the engine's own expressions do not tell rightly, as it writes expressions. A text has all of a format's.
FORMATS: Mapping[str, Sequence[str]] = {
    name: tuple(f"^(?:{expression})$" for expression in expressions)
    for name, expressions in (
        ("date", (_DATE,)),
        ("time", _times()),
        ("date-time", tuple(f"{_DATE}[tT]{time}" for time in _times())),
        ("duration", (_duration(),)),
        ("email", (_email(),)),
        ("hostname", (_hostname(),)),
        ("ipv6", (_ipv6(1),)),  # RFC 3986
    )
}


def translated(pattern: str, keyword: str) -> str:
    """An expression of the same texts as ECMAScript's."""
    return _Translation(pattern, keyword).whole()


def without_assertions(pattern: str) -> str:
    """An expression without what looks ahead or behind and without borders of words: its texts and perhaps others."""
    kept: list[str] = []
    begins: list[int | None] = []  # of each open group, where one that is left out begins
    inside = False  # brackets
    for found in _PIECE.finditer(pattern):
        piece = found[0]
        if inside:
            inside = piece != "]"
        elif piece == "[":
            inside = True
        elif piece in ("\\b", "\\B"):
            continue
        elif piece.startswith("("):
            begins.append(len(kept) if piece in _LOOKING else None)
        elif piece == ")" and begins and (begin := begins.pop()) is not None:
            del kept[begin:]
            continue
        kept.append(piece)
    return "".join(kept)


class _Translation:
    """Reads an expression once, from left to right."""

    def __init__(self, pattern: str, keyword: str) -> None:
        self._text, self._keyword, self._at = pattern, keyword, 0
        self._out: list[str] = []
        self._open = 0
        self._repeats = False  # whether what was read last can be repeated

    def whole(self) -> str:
        while self._at < len(self._text):
            self._term()
        if self._open:
            self._refuse("a group without its end")
        return "".join(self._out)

    def _term(self) -> None:
        begin, char = self._at, self._text[self._at]
        if char in "*+?" or (char == "{" and _BRACES.match(self._text, self._at)):
            self._repetition()
            return
        self._at += 1
        repeats = True
        if char == "(":
            self._group()
            repeats = False
        elif char == ")":
            self._open -= 1
            if self._open < 0:
                self._refuse("a group without its beginning")
            self._out.append(")")
        elif char in "|^$":
            self._out.append(char)
            repeats = False
        elif char == ".":
            self._out.append(f"[^{_LINE_ENDS}]")
        elif char == "[":
            self._set()
        elif char == "\\":
            self._at = begin
            single, several = self._escape(inside=False)
            self._out.append(_literal(single) if single is not None else several)
        else:
            self._out.append(_literal(char))
        self._repeats = repeats

    def _repetition(self) -> None:
        if not self._repeats:
            self._refuse("a repetition of nothing")
        found = _BRACES.match(self._text, self._at)
        count = found[0] if found else self._text[self._at]
        self._out.append(_bounded(count) if self._out[-1] in _DIGITS else count)
        self._at += len(count)
        # Whether as many or as few as possible are tried first is of no matter for what matches.
        if self._text.startswith("?", self._at):
            self._at += 1
        self._repeats = False

    def _group(self) -> None:
        named = _NAMED.match(self._text, self._at)
        if named:
            self._at = named.end()
        elif self._text.startswith("?:", self._at):
            self._at += 2
        elif self._text.startswith("?", self._at):
            self._refuse(f"({self._text[self._at : self._at + 2]}")
        self._open += 1
        self._out.append("(?:")

    def _set(self) -> None:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        parts: list[str] = []
        while not self._text.startswith("]", self._at):
            first, several = self._member()
            follows = self._text[self._at : self._at + 2]
            if first is None or follows[:1] != "-" or follows in ("-", "-]"):
                parts.append(several if first is None else _literal(first))
                continue
            self._at += 1
            last, several_too = self._member()
            if last is None:
                parts += [_literal(first), _literal("-"), several_too]
            elif last < first:
                self._refuse(f"the range {first}-{last}")
            else:
                parts.append(f"{_literal(first)}-{_literal(last)}")
        self._at += 1
        if not parts:
            self._refuse("empty brackets")
        self._out.append(f"[{'^' if negated else ''}{''.join(parts)}]")

    def _member(self) -> tuple[str | None, str]:
        if self._at >= len(self._text):
            self._refuse("brackets without their end")
        if self._text[self._at] == "\\":
            return self._escape(inside=True)
        self._at += 1
        return self._text[self._at - 1], ""

    def _escape(self, *, inside: bool) -> tuple[str | None, str]:
        """A character, or None and a set of them in brackets."""
        begin = self._at
        char = self._text[begin + 1 : begin + 2]
        self._at += 2
        if char.lower() in _SETS:
            return None, f"[{'' if char in _SETS else '^'}{_SETS[char.lower()]}]"
        if char in ("p", "P") and (found := _PROPERTY.match(self._text, self._at)):
            self._at = found.end()
            return None, f"[\\{char}{found[0]}]"
        if char in _CONTROLS and not (char == "0" and self._text[self._at : self._at + 1].isdigit()):
            return _CONTROLS[char], ""
        if char == "b" and inside:
            return "\b", ""
        if char in ("u", "x", "c"):
            return self._by_number(begin), ""
        if not char or char.isalnum() or not char.isascii():
            self._refuse(f"\\{char}")
        return char, ""

    def _by_number(self, begin: int) -> str:
        found = _UNITS.match(self._text, begin + 1)
        if found is None:
            self._refuse(self._text[begin : begin + 2])
        self._at = found.end()
        if found[4]:
            return chr(ord(found[4]) % 32)
        code = int(found[1] or found[2] or found[3], 16)
        low = _UNITS.match(self._text, self._at + 1) if code in _HIGH and found[2] else None
        if low and self._text[self._at] == "\\" and low[2] and int(low[2], 16) in _LOW:
            self._at = low.end()
            code = 0x10000 + (code - _HIGH.start) * 0x400 + int(low[2], 16) - _LOW.start
        if code in _HIGH or code in _LOW or code > _LAST:
            self._refuse(self._text[begin : self._at])
        return chr(code)

    def _refuse(self, what: str) -> NoReturn:
        message = f"json_schema cannot be used: {self._keyword}: {what} in {self._text[:80]!r} cannot be followed."
        raise GrammarError(message, "Use an expression without it, or describe the texts by enum.")


def _bounded(count: str) -> str:
    """A repetition of digits with an end: small models do not stop writing them."""
    least = {"*": 0, "+": 1}.get(count) if count in "*+" else int(count[1:-2]) if count.endswith(",}") else None
    return count if least is None else f"{{{least},{max(least, _MOST_DIGITS)}}}"


def _literal(char: str) -> str:
    """A character that stands for itself, inside brackets too."""
    return char if char.isalnum() or not char.isascii() else f"\\x{{{ord(char):x}}}"
