"""Names, messages, help, docstrings, comments and documents use the field's words and plain English."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from tests.docs.pages import pages
from tests.test_imports import MODULES, ROOT

# What the field says instead is in CONTRIBUTING.md.
BANNED = {
    "law": "probabilities",
    "laws": "probabilities",
    "lawful": "stochastic",
    "chooser": "sampler",
    "multistep": "decoding strategy",
    "saver": "reduced compute",
    "surroundings": "arguments",
    "residence": "lifecycle",
    "residency": "cache",
    "spine": "main branch",
    "rider": "piggyback row",
    "riders": "piggyback rows",
    "prober": "piggyback rows",
    "settle": "commit",
    "settled": "committed",
    "twin": "copy",
    "matchness": "match rate",
    "stake": "loss budget",
    "hopes": "acceptance estimate",
    "books": "statistics",
    "stairs": "row steps",
    "tally": "statistics",
    "elastic": "weight planes",
    "held": "cached",
    "begun": "started",
    "anew": "again",
    "nobody": "none",
    "whom": "which",
    "beside": "next to, with, or compared with",
    "told": "reported, given, or known",
    "company": "batch",
    "afford": "has time for",
    "affords": "has time for",
    "earnest": "really",
}
# What the chat app's window must not say, and does not say in another form either.
WINDOW = ROOT / "apps" / "desktop" / "static"
NEVER_SHOWN = re.compile(
    r"\bguess\w*|\bcache of the conversation|\binterpreter\b|\bsequences?\b|\bpass(?:es)? per\b"
    r"|\b(?:beside|told|earnest|affords?|lends?|company)\b",
    re.IGNORECASE,
)
# Names of a plan's terms, which the window has its own words for.
TERMS = {"interpreter", "sequences"}
# Strings, templates and the text of pages; comments are for developers.
TEXTS = re.compile(
    r"/\*.*?\*/|//[^\n]*|(?P<q>[\"'`])(?P<js>(?:\\.|(?!(?P=q)).)*)(?P=q)|<!--.*?-->|>(?P<html>[^<>{}]+)<|"
    r"\b(?:aria-label|title|placeholder)=\"(?P<attribute>[^\"]*)",
    re.DOTALL,
)
PHRASES = re.compile(r"\b(?:take|takes|taken|taking) in (?:a|the) (?:prompt|text)\b", re.IGNORECASE)
# Values, fields, parameters and files that have had these names since before; and held-out text is the field's.
DOCUMENTED = {"elastic", "matchness", "laws", "laws.bin", "laws.json", "settled"}
DOCUMENTED |= {"held_out", "_held_out", "_HELD_OUT", "held_out_perplexity"}
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# What prose says instead: next to or compared with, written or given, started, batch, no one, which, again, really,
# differently from, from before.
PRIVATE_ENGLISH = re.compile(
    r"\b(?:beside|told|begun|company|nobody|whom|anew|earnest|affords?|lends?|lent|dear|chooser|lawful|multistep|matchness|"
    r"residency|surroundings|otherwise than|of before)\b",
    re.IGNORECASE,
)
# A docstring names its subject first.
NO_SUBJECT = re.compile(r'"""(?:Of|Those|The same|That of)\b')
CODE = re.compile(r"`[^`]*`|\]\([^)]*\)")


def words(name: str) -> list[str]:
    """The words of an identifier, in snake or camel case."""
    return [word.lower() for word in WORD.findall(name)]


def docstrings(tree: ast.Module) -> set[int]:
    """Which string constants are documentation, by their node's id."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, owners) and node.body and isinstance(node.body[0], ast.Expr)
    }


def names_and_texts(tree: ast.Module) -> Iterator[tuple[int, str, bool]]:
    """Line, identifier or string, and whether it is an identifier."""
    documentation = docstrings(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield line, name, True
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield line, name, True
            case ast.keyword(arg=str(name)):
                yield line, name, True
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                yield line, text, False


def offences(module: str, path: Path) -> Iterator[str]:
    for word in words(path.stem):
        if word in BANNED:
            yield f"{module}: the file's name says {word}, not {BANNED[word]}"
    for line, text, identifier in names_and_texts(ast.parse(path.read_text("utf-8"))):
        if text in DOCUMENTED:
            continue
        for word in words(text) if identifier else re.findall(r"[a-z]+", text.lower()):
            if word in BANNED:
                yield f"{module}:{line} {text[:60]!r} says {word}, not {BANNED[word]}"
        if not identifier and PHRASES.search(text):
            yield f"{module}:{line} {text[:60]!r}"


def test_the_fields_words() -> None:
    wrong = [line for module, path in MODULES.items() for line in offences(module, path)]
    assert wrong == [], "\n".join(wrong)


def shown_texts(text: str) -> Iterator[str]:
    """What a script or page of the window may show: strings, and text between tags."""
    for found in TEXTS.finditer(text):
        yield from filter(None, (found["js"], found["html"], found["attribute"]))


def test_the_window_says_it_in_the_fields_words() -> None:
    files = [*WINDOW.glob("js/*.js"), *WINDOW.glob("*.html")]
    said = [(path.name, text) for path in files for text in shown_texts(path.read_text("utf-8")) if text not in TERMS]
    assert len(said) > 1_000 and ("thread.js", "Explain in three sentences how a rainbow forms.") in said
    for module, path in MODULES.items():
        if module.startswith("edgeinfer.apps.desktop"):
            # What may be a sentence: names of fields have no spaces.
            texts = (
                text for _, text, identifier in names_and_texts(ast.parse(path.read_text("utf-8"))) if not identifier
            )
            said += [(module, text) for text in texts if " " in text]
    wrong = [f"{where}: {text[:80]!r}" for where, text in said if NEVER_SHOWN.search(text) or PHRASES.search(text)]
    wrong += [
        f"{where}: {text!r} says {word}"
        for where, text in said
        for word in words(text)
        if word in BANNED and " " in text
    ]
    assert wrong == [], "\n".join(wrong)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings and comments of a module, with their lines; parses only those that may have something to report."""
    text = path.read_text("utf-8")
    if not PRIVATE_ENGLISH.search(text) and not NO_SUBJECT.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if docstring := ast.get_docstring(node):
                    yield node.body[0].lineno, f'"""{docstring}'
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def test_plain_english() -> None:
    files = [*MODULES.values(), *sorted((ROOT / "tests").rglob("*.py"))]
    said = [(f"{path.relative_to(ROOT)}:{line}", text) for path in files for line, text in prose(path)]
    said += [(page.path.name, page.path.read_text("utf-8")) for page in pages() if "log" not in page.path.parts]
    wrong = [f"{place} {match[0]!r}" for place, text in said for match in PRIVATE_ENGLISH.finditer(CODE.sub("", text))]
    wrong += [f"{place} {text[:60]!r} names no subject" for place, text in said if NO_SUBJECT.search(text)]
    assert wrong == [], "\n".join(wrong)


def test_private_english_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""Of a session."""\nx = "beside"  # stands beside it\n', "utf-8")
    assert [bool(NO_SUBJECT.search(text)) for _, text in prose(path)] == [True, False]
    assert [bool(PRIVATE_ENGLISH.search(text)) for _, text in prose(path)] == [False, True]
