"""Text of messages as HTML that is safe to show, whatever a model wrote.

Nothing in the text becomes markup of its own, nothing is loaded from elsewhere, and links lead to web pages and mail
addresses only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableMapping, Sequence
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

from edgeinfer.apps.desktop.formulas import Lifted
from edgeinfer.apps.desktop.highlight import highlighted

# Beyond these, text is shown as it is: rendering goes on while a reply is made, and must not fall behind.
_MOST_RENDERED = 60_000
_MOST_HIGHLIGHTED = 20_000
_LONGEST_LANGUAGE = 30
_LINK = re.compile(r"(?:https?://|mailto:)[^\s]", re.IGNORECASE)
_THOUGHT = re.compile(r"\s*<think>(?P<thought>.*?)(?P<end></think>|\Z)", re.DOTALL)
# Lists, quotes and brackets in one another: each level looks at the rest of the text again.
_DEEPEST = 20
# What a text may ask of rules that look far ahead or make much of little; beyond, its characters stand for themselves.
_MOST_BRACKETS, _MOST_CELLS = 3_000, 6_000


class _Renderer(RendererHTML):
    """Renders code with a head, pictures as links, and links so that the page they lead to learns nothing of ours."""

    def text(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _lifted(env).shown(escapeHtml(tokens[index].content))

    def code_inline(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return f"<code>{escapeHtml(_lifted(env).typed(tokens[index].content))}</code>"

    def fence(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _code(_lifted(env).typed(tokens[index].content), _lifted(env).typed(tokens[index].info))

    def code_block(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _code(_lifted(env).typed(tokens[index].content), "")

    def th_open(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        # The page allows no styles of its own.
        style = str(tokens[index].attrs.pop("style", ""))
        if style:
            tokens[index].attrSet("class", f"align-{style.removeprefix('text-align:')}")
        return self.renderToken(tokens, index, options, env)

    td_open = th_open

    def link_open(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        if not tokens[index].attrGet("href"):
            # A link to nowhere would lead to this page.
            tokens[index].attrs.pop("href", None)
            return self.renderToken(tokens, index, options, env)
        tokens[index].attrSet("rel", "noopener noreferrer")
        tokens[index].attrSet("target", "_blank")
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
    """Takes from what a text may still spend; whether there was enough."""
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
    """A table, of as many rows as there are cells left; short rows are filled up to the width of the first."""
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


# Numbers alone: links within the page would need names that no other message has.
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
    # Names of files, such as main.py, are no addresses.
    assert parser.linkify is not None, "linkify-it-py comes with the extra"
    parser.linkify.set({"fuzzy_link": False, "fuzzy_email": False})
    return parser


_REPLY = _reply_parser()
# What people type is no Markdown but for the code they paste.
_USER = _parser("zero", {"breaks": True}).enable(["fence", "backticks", "newline"])


def render_reply(text: str) -> str:
    """A reply's Markdown; what a reasoning model thinks before it answers is folded."""
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
    """A user's message as it was typed, with code in fences and backticks."""
    return _plain(text) if len(text) > _MOST_RENDERED else str(_USER.render(text))


def _plain(text: str) -> str:
    return f'<p class="plain">{escape(text)}</p>\n'


def _code(content: str, info: str) -> str:
    language = (info.split() or [""])[0][:_LONGEST_LANGUAGE]
    return (
        f'<div class="code"><div class="code-head"><span class="lang">{escape(language)}</span>'
        f'<button class="copy">Copy</button></div><pre><code>{_coloured(content, language)}</code></pre></div>\n'
    )


# While a reply grows, the blocks it has are rendered again and again.
@lru_cache(maxsize=128)
def _coloured(content: str, language: str) -> str:
    return highlighted(content, language) if len(content) <= _MOST_HIGHLIGHTED else escape(content)
