"""Text of messages as HTML that is safe to show, whatever a model wrote; knows nothing of messages or pages.

Nothing in the text becomes markup of its own, nothing is loaded from elsewhere, and links lead to web pages and mail
addresses only.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping, Sequence
from functools import lru_cache
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

__all__ = ["render_reply", "render_user"]

# Beyond these, text is shown as it is: rendering goes on while a reply is made, and must not fall behind.
_MOST_RENDERED = 60_000
_MOST_HIGHLIGHTED = 20_000
_LONGEST_LANGUAGE = 30
_LINK = re.compile(r"(?:https?://|mailto:)[^\s]", re.IGNORECASE)
_THOUGHT = re.compile(r"\s*<think>(?P<thought>.*?)(?P<end></think>|\Z)", re.DOTALL)
_FORMATTER: HtmlFormatter[str] = HtmlFormatter(nowrap=True)


class _Renderer(RendererHTML):
    """Renders code with a head, pictures as links, and links so that the page they lead to learns nothing of ours."""

    def fence(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _code(tokens[index].content, tokens[index].info)

    def code_block(self, tokens: Sequence[Token], index: int, options: Any, env: MutableMapping[str, Any]) -> str:
        return _code(tokens[index].content, "")

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


def _parser(preset: str, options: dict[str, Any]) -> MarkdownIt:
    parser = MarkdownIt(preset, {"html": False, **options}, renderer_cls=_Renderer)
    parser.validateLink = lambda url: _LINK.match(url) is not None  # type: ignore[method-assign]
    return parser


_REPLY = _parser("js-default", {})
# What people type is no Markdown but for the code they paste.
_USER = _parser("zero", {"breaks": True}).enable(["fence", "backticks", "newline"])


def render_reply(text: str) -> str:
    """A reply's Markdown; what a reasoning model thinks before it answers is folded."""
    if len(text) > _MOST_RENDERED:
        return _plain(text)
    thought = _THOUGHT.match(text)
    if thought is None:
        return str(_REPLY.render(text))
    opened = "" if thought["end"] else " open"
    inner = _REPLY.render(thought["thought"])
    return (
        f'<details class="thinking"{opened}><summary>Thinking</summary>{inner}</details>'
        f"{_REPLY.render(text[thought.end() :])}"
    )


def render_user(text: str) -> str:
    """A user's message as it was typed, with code in fences and backticks."""
    return _plain(text) if len(text) > _MOST_RENDERED else str(_USER.render(text))


def _plain(text: str) -> str:
    return f'<p class="plain">{escape(text)}</p>\n'


def _code(content: str, info: str) -> str:
    language = (info.split() or [""])[0][:_LONGEST_LANGUAGE]
    return (
        f'<div class="code"><div class="code-head"><span class="lang">{escape(language)}</span>'
        f'<button class="copy">Copy</button></div><pre><code>{_highlighted(content, language)}</code></pre></div>\n'
    )


# While a reply grows, the blocks it has are rendered again and again.
@lru_cache(maxsize=128)
def _highlighted(content: str, language: str) -> str:
    if language and len(content) <= _MOST_HIGHLIGHTED:
        try:
            lexer = get_lexer_by_name(language, stripnl=False, ensurenl=False)
        except (ClassNotFound, ValueError):
            return escape(content)
        return str(highlight(content, lexer, _FORMATTER))
    return escape(content)
