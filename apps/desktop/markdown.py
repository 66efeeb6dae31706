"""Messages as HTML that is safe to show, whatever a model wrote: no markup of its own, nothing loaded from elsewhere,
links only to web pages and mail addresses.

Formulas are replaced by placeholders before Markdown is parsed, and put back as typed. A formula is `$...$`, `$$...$$`,
`\\(...\\)`, `\\[...\\]` or an environment such as `\\begin{align}`; code, links and amounts of money are not.
An unfinished formula is shown as text.

Code is coloured in one pass: lexers by regular expressions take quadratic time and more on hostile text. Here every
character is read a bounded number of times: repetitions are possessive (`*+`), and unclosed strings or comments extend
to the end of the line or text. `languages.json` has the patterns, and for each language those of its comments, texts
and other parts, and its words by CSS class.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.renderer import RendererHTML
from markdown_it.rules_block import StateBlock, table
from markdown_it.rules_inline import StateInline, image, link
from markdown_it.token import Token
from mdit_py_plugins.footnote import footnote_plugin
from mdit_py_plugins.tasklists import tasklists_plugin

# Placeholders of formulas: private characters, which Markdown's rules treat as letters.
_OPEN, _CLOSE = "\ue000", "\ue001"
_STAND_IN = re.compile(f"{_OPEN}(\\d+){_CLOSE}")
# Placeholders as they are in a link's address.
_ANY_STAND_IN = re.compile(f"(?:{_OPEN}|%EE%80%80)(\\d+)(?:{_CLOSE}|%EE%80%81)")
_LONGEST = 4_000
# Most formulas of a message; rendering one takes a millisecond.
_MOST = 1_000
# The start of a formula, or of code or an address, which contain none.
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
# Only ordinals and plurals may follow a formula without a space: $n$th, not $A:$B.
_AFTER = re.compile(r"(?![A-Za-z0-9_$])|(?:th|st|nd|rd|s|d)\b")
# No space at either end; or one at each if the rest is clearly a formula.
_INNER = re.compile(r"\S(?:.*\S)?|[ \t](?=[^\n]*[\\^_=])[^\d\s][^\n]*[ \t]", re.DOTALL)
# An amount and the words after it, as in "$5 or 6$".
_AMOUNT = re.compile(r"\d[\d.,]*(?:[kKmMbB]|bn)?(?:\s+[A-Za-z]{2,}|\s*[-/]\s*\$)")


@dataclass(frozen=True)
class Formula:
    """A formula."""

    source: str  # as typed, with its delimiters
    display: bool  # on a line of its own
    whole: bool = True  # whether its end has been typed

    @property
    def html(self) -> str:
        """The HTML that the page's script renders."""
        if not self.whole:
            return escape(self.source)
        return f'<span class="math{" display" if self.display else ""}">{escape(self.source)}</span>'


class Lifted:
    """A text whose formulas were replaced by placeholders."""

    def __init__(self, text: str) -> None:
        self._formulas: list[Formula] = []
        self._text = text.replace(_OPEN, "\ufffd").replace(_CLOSE, "\ufffd")
        # The last place of each closing delimiter, so that no text is searched twice.
        self._next: dict[str, int] = {}
        self.text = "".join(self._parts()) if "$" in text or "\\" in text else self._text  # with the placeholders

    def typed(self, text: str) -> str:
        """Put the formulas back as typed."""
        return _STAND_IN.sub(lambda match: self._formulas[int(match[1])].source, text) if self._formulas else text

    def shown(self, html: str) -> str:
        """Put the formulas into escaped text as HTML."""
        return _STAND_IN.sub(lambda match: self._formulas[int(match[1])].html, html) if self._formulas else html

    def cleared(self, html: str) -> str:
        """Remove placeholders from attributes."""
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
        """The formula that starts at a sign, if any, and where to continue."""
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
        """The formula up to a closing delimiter, or an unfinished one at the end of the text."""
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
        """Whether an opening delimiter may start a formula: not $$, the process id, and not an escaped link."""
        if mark == "$$":
            return _DISPLAYED.match(self._text, end) is not None
        return mark != "\\]" or _ESCAPED_LINK.match(self._text, end) is None

    def _fence_end(self, mark: str, end: int) -> int:
        """The end of a code block; a code span if its first line has a backtick."""
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
        """The end of a code span; None if it is not closed."""
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
        """`str.find` that searches each part of the text once."""
        known = self._next.get(mark)
        if known is None or 0 <= known < start:
            known = self._next[mark] = self._text.find(mark, start)
        return known

    def _unquoted(self, begin: int, end: int) -> str:
        """The formula without the quotation marks of the lines around it."""
        source = self._text[begin:end]
        line = self._text[self._text.rfind("\n", 0, begin) + 1 : begin]
        return _QUOTED_LINE.sub("\n", source) if line.lstrip().startswith(">") else source


# Longer text is shown as it is: rendering must keep up with a growing reply.
_MOST_RENDERED = 60_000
_MOST_HIGHLIGHTED = 20_000
_LONGEST_LANGUAGE = 30
_LINK = re.compile(r"(?:https?://|mailto:)[^\s]", re.IGNORECASE)
_THOUGHT = re.compile(r"\s*<think>(?P<thought>.*?)(?P<end></think>|\Z)", re.DOTALL)
# Depth of nested lists, quotes and brackets: each level scans the rest of the text again.
_DEEPEST = 20
# Budgets of a text for rules that scan far ahead or produce much output.
_MOST_BRACKETS, _MOST_CELLS = 3_000, 6_000


class _Renderer(RendererHTML):
    """Renders code with a header, images as links, and links without a referrer."""

    def text(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _lifted(env).shown(escapeHtml(tokens[index].content))

    def code_inline(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return f"<code>{escapeHtml(_lifted(env).typed(tokens[index].content))}</code>"

    def fence(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _code(_lifted(env).typed(tokens[index].content), _lifted(env).typed(tokens[index].info))

    def code_block(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _code(_lifted(env).typed(tokens[index].content), "")

    def th_open(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        # The page's policy forbids inline styles.
        style = str(tokens[index].attrs.pop("style", ""))
        if style:
            tokens[index].attrSet("class", f"align-{style.removeprefix('text-align:')}")
        return self.renderToken(tokens, index, options, env)

    td_open = th_open

    def link_open(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        if tokens[index].attrGet("href"):
            tokens[index].attrSet("rel", "noopener noreferrer")
            tokens[index].attrSet("target", "_blank")
        else:  # an empty link would lead to this page
            tokens[index].attrs.pop("href", None)
        return self.renderToken(tokens, index, options, env)

    def image(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        token = tokens[index]
        source = str(token.attrGet("src") or "")
        label = self.renderInlineAsText(token.children or [], options, env) or source
        if not source:
            return escape(label)
        return f'<a href="{escape(source)}" rel="noopener noreferrer" target="_blank">{escape(label)}</a>'


def _lifted(env: MutableMapping[str, Any]) -> Lifted:
    return env.get("lifted") or _NOTHING_LIFTED


_NOTHING_LIFTED = Lifted("")


def _spend(env: MutableMapping[str, Any], name: str, cost: int, most: int) -> bool:
    """Spend from a budget of a text; return whether there was enough."""
    left = env.get(name, most) - cost
    if left >= 0:
        env[name] = left
    return bool(left >= 0)


def _link(state: StateInline, silent: bool) -> bool:
    opens = state.src.startswith("[", state.pos)
    return opens and _spend(state.env, "brackets", 1, _MOST_BRACKETS) and link(state, silent)


def _image(state: StateInline, silent: bool) -> bool:
    opens = state.src.startswith("![", state.pos)
    return opens and _spend(state.env, "brackets", 1, _MOST_BRACKETS) and image(state, silent)


def _table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """A table of limited size; short rows are filled up to the width of the first."""
    if start + 2 > end:
        return False
    columns = state.src.count("|", state.bMarks[start + 1], state.eMarks[start + 1]) + 1
    rows = state.env.get("cells", _MOST_CELLS) // columns
    if rows < 1 or not table(state, start, min(end, start + 2 + rows), silent):
        return False
    return silent or _spend(state.env, "cells", columns * max(1, state.line - start - 2), _MOST_CELLS)


def _parser(preset: str, options: dict[str, Any]) -> MarkdownIt:
    parser = MarkdownIt(preset, {"html": False, "maxNesting": _DEEPEST, **options}, renderer_cls=_Renderer)
    parser.inline.ruler.at("link", _link)
    parser.inline.ruler.at("image", _image)
    parser.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})
    parser.validateLink = lambda url: _LINK.match(url) is not None  # type: ignore[method-assign]
    return parser


# Only numbers: links within the page would need unique names.
_FOOTNOTES: dict[str, Callable[[Token], str]] = {
    "footnote_ref": lambda token: f'<sup class="footnote">{token.meta["id"] + 1}</sup>',
    "footnote_open": lambda token: "<li>",
    "footnote_close": lambda token: "</li>\n",
    "footnote_anchor": lambda token: "",
    "footnote_block_open": lambda token: '<ol class="footnotes">\n',
    "footnote_block_close": lambda token: "</ol>\n",
}


def _reply_parser() -> MarkdownIt:
    parser = _parser("js-default", {"linkify": True}).use(tasklists_plugin).use(footnote_plugin, inline=False)
    for name, html in _FOOTNOTES.items():
        parser.add_render_rule(name, lambda self, tokens, index, options, env, html=html: html(tokens[index]))
    # File names such as main.py are not addresses.
    assert parser.linkify is not None, "linkify-it-py comes with the extra"
    parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False})
    return parser


_REPLY = _reply_parser()
# Users' text is not Markdown, except for code.
_USER = _parser("zero", {"breaks": True}).enable(["fence", "backticks", "newline"])


def render_reply(text: str) -> str:
    """Render a reply's Markdown; the thoughts of a reasoning model are folded."""
    if len(text) > _MOST_RENDERED:
        return _plain(text)
    thought = _THOUGHT.match(text)
    if thought is None:
        return _rendered(text)
    opened = "" if thought["end"] else " open"
    inner = _rendered(thought["thought"])
    return (
        f'<details class="thinking"{opened}><summary>Thinking</summary>{inner}</details>'
        f"{_rendered(text[thought.end() :])}"
    )


def _rendered(text: str) -> str:
    lifted = Lifted(text)
    return lifted.cleared(str(_REPLY.render(lifted.text, {"lifted": lifted})))


def render_user(text: str) -> str:
    """Render a user's message as typed, with code in fences and backticks."""
    return _plain(text) if len(text) > _MOST_RENDERED else str(_USER.render(text))


def _plain(text: str) -> str:
    return f'<p class="plain">{escape(text)}</p>\n'


def _code(content: str, info: str) -> str:
    language = (info.split() or [""])[0][:_LONGEST_LANGUAGE]
    return (
        f'<div class="code"><div class="code-head"><span class="lang">{escape(language)}</span>'
        f'<button class="copy">Copy</button></div><pre><code>{_coloured(content, language)}</code></pre></div>\n'
    )


# The blocks of a growing reply are rendered repeatedly.
@lru_cache(maxsize=128)
def _coloured(content: str, language: str) -> str:
    return highlighted(content, language) if len(content) <= _MOST_HIGHLIGHTED else escape(content)


@dataclass(frozen=True)
class _Language:
    """The lexical rules of a language."""

    pattern: re.Pattern[str]  # each match is of one group, named by its CSS class; "w" is a word
    classes: dict[str, str]  # of words
    keys: str  # characters that follow the name of a value
    folds: bool  # whether words are case-insensitive


def _languages() -> Iterator[tuple[str, _Language]]:
    data = json.loads(importlib.resources.files("edgeinfer.apps.desktop").joinpath("languages.json").read_text("utf-8"))
    known: dict[str, str] = data["patterns"]
    for each in data["languages"]:
        named = (("c", each["comments"]), ("s", each["texts"]))
        parts = [f"(?P<{name}>{'|'.join(map(known.__getitem__, listed))})" for name, listed in named if listed]
        pattern = "|".join([*parts, *map(known.__getitem__, each["others"])])
        classes = {word: name for name, words in each["words"].items() for word in words.split()}
        rules = _Language(re.compile(pattern, re.MULTILINE), classes, each.get("keys", ""), each.get("folds", False))
        yield from ((name, rules) for name in each["names"].split())


LANGUAGES = dict(_languages())


def highlighted(code: str, language: str) -> str:
    """Code as HTML, coloured if the language is known."""
    known = LANGUAGES.get(language.lower())
    if known is None:
        return escape(code)
    parts, end = [], 0
    for match in known.pattern.finditer(code):
        name = _class_of(match, code, known)
        if name is not None:
            parts += [escape(code[end : match.start()]), f'<span class="{name}">{escape(match[0])}</span>']
            end = match.end()
    return "".join(parts) + escape(code[end:])


def _class_of(match: re.Match[str], code: str, language: _Language) -> str | None:
    """The CSS class of a match; None for no colour."""
    kind, after = match.lastgroup, code[match.end() : match.end() + 2]
    if language.keys and kind in ("w", "s") and after.lstrip(" ")[:1] in tuple(language.keys):
        return "na"
    if kind != "w":
        return kind
    word = match[0].lower() if language.folds else match[0]
    return language.classes.get(word) or ("nf" if after.startswith("(") else None)
