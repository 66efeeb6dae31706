"""The pages that users read: README and docs, with their headings, links and blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
# Written by docs/make_reference.py when the site is built.
GENERATED = ("reference/python.md", "reference/options.md", "reference/commands.md", "reference/commands/")


@dataclass(frozen=True)
class Block:
    """A block of code, in a language of which one is empty."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


@dataclass(frozen=True)
class Link:
    """A link or the source of a picture."""

    page: Path
    line: int
    target: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line} {self.target}"


@dataclass(frozen=True)
class Page:
    """A page, read as Markdown."""

    path: Path
    tokens: tuple[Token, ...]

    @property
    def anchors(self) -> set[str]:
        """What links may name behind a #."""
        found: dict[str, int] = {}
        for opening, inline in zip(self.tokens, self.tokens[1:], strict=False):
            if opening.type == "heading_open":
                name = _slug("".join(t.content for t in inline.children or () if t.type in ("text", "code_inline")))
                found[name] = found.get(name, 0) + 1
        return {name if i == 0 else f"{name}-{i}" for name, count in found.items() for i in range(count)}

    @property
    def blocks(self) -> Iterator[Block]:
        for token in self.tokens:
            if token.type in ("fence", "code_block"):
                yield Block(self.path, (token.map or [0])[0] + 1, token.info.strip(), token.content)

    @property
    def links(self) -> Iterator[Link]:
        for token in self.tokens:
            label: list[str] = []
            for inner in token.children or ():
                line = (token.map or [0])[0] + 1
                if inner.type == "link_open":
                    label = []
                    yield Link(self.path, line, str(inner.attrs["href"]), "")
                elif inner.type == "image":
                    yield Link(self.path, line, str(inner.attrs["src"]), inner.content)
                label.append(inner.content)

    @property
    def prose(self) -> Iterator[tuple[int, str]]:
        """Line and text of what is neither code nor a table of figures."""
        for token in self.tokens:
            for inner in token.children or ():
                if inner.type == "text":
                    yield (token.map or [0])[0] + 1, inner.content


def _slug(heading: str) -> str:
    """As viewers of Markdown files make an anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def pages() -> tuple[Page, ...]:
    """The README and all pages of the site but those that its build writes."""
    found = [README, *sorted(DOCS.rglob("*.md"))]
    parser = MarkdownIt("commonmark").enable("table")
    return tuple(Page(path, tuple(parser.parse(path.read_text("utf-8")))) for path in found if not _generated(path))


def _generated(path: Path) -> bool:
    return path.is_relative_to(DOCS) and path.relative_to(DOCS).as_posix().startswith(GENERATED)
