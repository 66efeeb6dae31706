"""Formulas in Markdown: taken out before it is parsed, so that it changes nothing in them, and put back as typed.

A formula is `$...$`, `$$...$$`, `\\(...\\)`, `\\[...\\]` or an environment such as `\\begin{align}`. Code, links and
amounts of money are none. One that is still being written is shown as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape

# What stands for a formula while Markdown is parsed: private characters, which a letter is to all its rules.
_OPEN, _CLOSE = "\ue000", "\ue001"
_STAND_IN = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
# As a link's address has them.
_ANY_STAND_IN = re.compile(f"(?:{_OPEN}|%EE%80%80)(\\d+)(?:{_CLOSE}|%EE%80%81)")
_LONGEST = 4_000
# Beyond so many in one message they stay as typed: each takes the window a millisecond.
_MOST = 1_000
# What may open a formula, or something in which there is none.
_SIGN = re.compile(
    r"(?P<fence>^(?:[ \t>]|[-*+][ \t]|\d{1,9}[.)][ \t])*(?P<mark>`{3,}|~{3,}))|(?P<code>`+)|(?P<address>\]\(|<?https?://)"
    r"|(?P<dollars>\$+)|(?P<bracket>\\[\[(])|(?P<environment>\\begin\{(?P<name>[a-z]+\*?)\})|\\.",
    re.MULTILINE,
)
_ENVIRONMENTS = {"equation", "align", "alignat", "gather", "multline", "eqnarray", "split", "cases", "CD"}
_DISPLAYED = re.compile(r"[ \t]*(?:\n|\Z)|[^\n]*[\\^_=]")
_ESCAPED_LINK = re.compile(r"[ xX]\]|[^\]\n]*\][(:\[]")
_ADDRESS = re.compile(r"[^\s<>)|]*")
_BLANK_LINE = re.compile(r"\n[ \t>]*\n")
_QUOTED_LINE = re.compile(r"\n[ \t]*>[ \t]?")
# Ordinals and plurals may follow a formula without a space: $n$th. Otherwise a letter says that it is none: $A:$B.
_AFTER = re.compile(r"(?![A-Za-z0-9_$])|(?:th|st|nd|rd|s|d)\b")
# Without spaces at its ends; or with one at each, where the rest cannot be but a formula.
_INNER = re.compile(r"\S(?:.*\S)?|[ \t](?=[^\n]*[\\^_=])[^\d\s][^\n]*[ \t]", re.DOTALL)
# An amount and the words behind it, as in "$5 or 6$".
_AMOUNT = re.compile(r"\d[\d.,]*(?:[kKmMbB]|bn)?(?:\s+[A-Za-z]{2,}|\s*[-/]\s*\$)")


@dataclass(frozen=True)
class Formula:
    """A formula, or the beginning of one.

    Attributes:
        source: as it was typed, with what marks it.
        display: on a line of its own.
        whole: whether its end is there.
    """

    source: str
    display: bool
    whole: bool = True

    @property
    def html(self) -> str:
        """As the page is given it, which draws it where it can; text until then."""
        if not self.whole:
            return escape(self.source)
        return f'<span class="math{" display" if self.display else ""}">{escape(self.source)}</span>'


class Lifted:
    """A text whose formulas were taken out.

    Attributes:
        text: with a stand-in for each of them.
    """

    def __init__(self, text: str) -> None:
        self._formulas: list[Formula] = []
        self._text = text.replace(_OPEN, "\ufffd").replace(_CLOSE, "\ufffd")
        # Where each closing sign was last found, so that no text is searched twice.
        self._next: dict[str, int] = {}
        self.text = "".join(self._parts()) if "$" in text or "\\" in text else self._text

    def typed(self, text: str) -> str:
        """A text with its formulas as they were typed."""
        return _STAND_IN.sub(lambda match: self._formulas[int(match[1])].source, text) if self._formulas else text

    def shown(self, html: str) -> str:
        """Escaped text with its formulas as HTML."""
        return _STAND_IN.sub(lambda match: self._formulas[int(match[1])].html, html) if self._formulas else html

    def cleared(self, html: str) -> str:
        """HTML whose attributes have no stand-ins left."""
        return _ANY_STAND_IN.sub(lambda match: escape(self._source(int(match[1]))), html)

    def _source(self, number: int) -> str:
        return self._formulas[number].source if number < len(self._formulas) else ""

    def _parts(self) -> list[str]:
        parts, done, place, text = [], 0, 0, self._text
        while (sign := _SIGN.search(text, place)) is not None:
            found, place = self._at(sign)
            if found is None:
                continue
            if len(self._formulas) >= _MOST:
                break
            parts += [text[done : sign.start()], f"{_OPEN}{len(self._formulas)}{_CLOSE}"]
            self._formulas.append(found)
            done = place
        return [*parts, text[done:]]

    def _at(self, sign: re.Match[str]) -> tuple[Formula | None, int]:
        """What a sign opens, if that is a formula, and where to go on."""
        text, begin, end = self._text, sign.start(), sign.end()
        if sign["fence"] is not None:
            return None, self._fence_end(sign["mark"], end)
        if sign["code"] is not None:
            return None, self._code_end(sign["code"], end) or end
        if sign["address"] is not None:
            match = _ADDRESS.match(text, end)
            return None, end if match is None else match.end()
        if sign["dollars"] is not None:
            return self._dollars(begin, end)
        if sign["bracket"] is not None:
            display = text[begin + 1] == "["
            return self._marked(begin, end, "\\]" if display else "\\)", display)
        if sign["environment"] is not None and sign["name"].rstrip("*") in _ENVIRONMENTS:
            return self._marked(begin, end, f"\\end{{{sign['name']}}}", True)
        return None, end

    def _dollars(self, begin: int, end: int) -> tuple[Formula | None, int]:
        text = self._text
        before = text[begin - 1] if begin else " "
        if end - begin == 2 and not before.isalnum():
            return self._marked(begin, end, "$$", True)
        if end - begin != 1 or before.isalnum() or _AMOUNT.match(text, end):
            return None, end
        close = self._find("$", end)
        while close > 0 and text[close - 1] == "\\":
            close = self._find("$", close + 1)
        inner = text[end:close]
        fits = 0 < close - end <= _LONGEST and "`" not in inner and _INNER.fullmatch(inner)
        if not fits or end <= self._blank_line(end) < close or not _AFTER.match(text, close + 1):
            return None, end
        return Formula(self._unquoted(begin, close + 1), False), close + 1

    def _marked(self, begin: int, end: int, mark: str, display: bool) -> tuple[Formula | None, int]:
        """A formula up to a closing mark; the beginning of one where the text ends before it."""
        close = self._find(mark, end)
        blank = self._blank_line(end)
        if 0 <= close - end <= _LONGEST and (not end <= blank < close or mark == "\\]"):
            after = close + len(mark)
            inner = self._text[end:close].strip()
            return (Formula(self._unquoted(begin, after), display) if inner else None), after
        if close >= 0 or blank >= 0 or not self._begins(end, mark):
            return None, end
        return Formula(self._unquoted(begin, len(self._text)), display, whole=False), len(self._text)

    def _begins(self, end: int, mark: str) -> bool:
        r"""Whether the text after an opening mark may become a formula: not that of $$, the process, or of \[x](y)."""
        if mark == "$$":
            return _DISPLAYED.match(self._text, end) is not None
        return mark != "\\]" or _ESCAPED_LINK.match(self._text, end) is None

    def _fence_end(self, mark: str, end: int) -> int:
        """Where a block of code ends; one backtick more in the first line, and it is a span of code."""
        line = self._text.find("\n", end)
        if mark[0] == "`" and "`" in self._text[end : line if line >= 0 else None]:
            return self._code_end(mark, end) or end
        close = re.compile(rf"^[ \t>]*{mark}{mark[0]}*[ \t]*$", re.MULTILINE).search(self._text, end)
        return len(self._text) if close is None else close.end()

    def _blank_line(self, start: int) -> int:
        known = self._next.get("")
        if known is None or 0 <= known < start:
            match = _BLANK_LINE.search(self._text, start)
            known = self._next[""] = -1 if match is None else match.start()
        return known

    def _code_end(self, ticks: str, end: int) -> int | None:
        """Where a code span ends that begins with so many backticks; None where it does not."""
        close = self._find(ticks, end)
        while close >= 0:
            after = close + len(ticks)
            while self._text[after : after + 1] == "`":
                after += 1
            if after - close == len(ticks):
                return after
            close = self._find(ticks, after)
        return None

    def _find(self, mark: str, start: int) -> int:
        """As `str.find`, which asks again only behind what was found before."""
        known = self._next.get(mark)
        if known is None or 0 <= known < start:
            known = self._next[mark] = self._text.find(mark, start)
        return known

    def _unquoted(self, begin: int, end: int) -> str:
        """A formula without the signs of a quotation that it stands in."""
        source = self._text[begin:end]
        line = self._text[self._text.rfind("\n", 0, begin) + 1 : begin]
        return _QUOTED_LINE.sub("\n", source) if line.lstrip().startswith(">") else source
