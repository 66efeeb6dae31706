"""Syntax highlighting in one pass over the code.

Lexers by regular expressions take quadratic time and more on hostile text. Here every character is read a bounded
number of times: repetitions are possessive (`*+`), and unclosed strings or comments extend to the end of the line or
text. `languages.json` has the patterns, and for each language those of its comments, texts and other parts, and
its words by CSS class.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape


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
