"""Writes the reference pages of the site from what the program says of itself: docstrings, help and options."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, is_typeddict

import edgeinfer
from edgeinfer.apps.cli.main import COMMANDS, build_parser
from edgeinfer.apps.cli.parser import Parser
from edgeinfer.core.options import ConfigOption, options_of
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.reply import ReplyOptions

_WIDTH = "88"
# What everybody uses stands before the rest.
_FIRST = ("load", "plan", "Model", "Chat", "Result", "EdgeInferError")


def write_reference(folder: Path) -> None:
    """Writes python.md, options.md and a page for each command; a page that has not changed is left as it is."""
    pages = {"python.md": _python(), "options.md": _options(), **_commands()}
    for old in (folder / "commands").glob("*.md"):
        if f"commands/{old.name}" not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def _python() -> str:
    """The public names of the package, and of its tools, with their docstrings."""
    parts = ["# Python", "What `import edgeinfer` offers. Everything else may change without notice."]
    parts += _names("edgeinfer", edgeinfer.__all__)
    tools = importlib.import_module("edgeinfer.tools")
    if names := getattr(tools, "__all__", ()):
        parts += ["## Tools", "Measuring and tuning: `from edgeinfer import tools`."]
        parts += _names("edgeinfer.tools", names, level="###")
    return "\n\n".join(parts) + "\n"


def _names(module: str, names: Iterable[str], level: str = "##") -> Iterator[str]:
    """Sections of functions, classes and errors."""
    home = importlib.import_module(module)
    objects = {name: getattr(home, name) for name in sorted(names, key=lambda name: (name not in _FIRST, name))}
    errors = [name for name, value in objects.items() if inspect.isclass(value) and issubclass(value, BaseException)]
    classes = [name for name, value in objects.items() if inspect.isclass(value) and name not in errors]
    functions = [name for name, value in objects.items() if inspect.isroutine(value)]
    for title, kind, found in (
        ("Functions", "autofunction", functions),
        ("Classes", "autoclass", classes),
        ("Errors", "autoexception", errors),
    ):
        if found:
            yield f"{level} {title}"
            for name in found:
                yield _directive(kind, f"{module}.{name}", objects[name])


def _directive(kind: str, name: str, value: Any) -> str:
    """An entry; fields of dataclasses are described in their docstrings, so that they are not listed twice."""
    lines = [f".. {kind}:: {name}"]
    if kind == "autoclass":
        lines.append("   :members:")
        if dataclasses.is_dataclass(value):
            lines.append(f"   :exclude-members: {', '.join(field.name for field in dataclasses.fields(value))}")
        elif not is_typeddict(value):  # whose keys are the options, listed elsewhere, and whose methods are dict's
            lines.append("   :inherited-members:")
    return "\n".join(["```{eval-rst}", *lines, "```"])


def _options() -> str:
    """Every option of loading and of generating, by its name in Python, on the command line and in requests."""
    parts = [
        "# Options",
        "An option has one name: `draft_max` in Python is `--draft-max` on the command line and `draft_max` in a "
        "request.",
    ]
    for title, configuration, asked in (("Loading", LoadOptions, False), ("Generating", ReplyOptions, True)):
        parts.append(f"## {title}")
        groups: dict[str, list[ConfigOption]] = {}
        for declared in options_of(configuration).values():
            groups.setdefault(declared.group or "Python and requests only", []).append(declared)
        for group, options in groups.items():
            parts += [f"### {group[0].upper()}{group[1:]}", "\n".join(_table(options, asked=asked))]
    return "\n\n".join(parts) + "\n"


def _table(options: Iterable[ConfigOption], *, asked: bool) -> Iterator[str]:
    """Rows of options; those of loading are no fields of requests."""
    yield f"| Python | command line |{' request |' if asked else ''} meaning |"
    yield "|---|---|---|" + ("---|" if asked else "")
    for one in options:
        flags = ", ".join(f"`{flag}`" for flag in one.flags)
        wire = ", ".join(f"`{name}`" for name in one.wire)
        meaning = one.help.replace("|", "\\|")
        # The help is that of the flag, which turns the option off.
        negated = any(flag.startswith("--no-") for flag in one.flags)
        meaning = f"`False`: {meaning}" if negated else f"{meaning[0].upper()}{meaning[1:]}"
        yield f"| `{one.name}` | {flags} |{f' {wire} |' if asked else ''} {meaning} |"


def _commands() -> dict[str, str]:
    """A page for each command, with all of its help, and one that lists them."""
    os.environ["COLUMNS"] = _WIDTH  # as argparse asks for it
    pages = {}
    rows = []
    for name, parser in _subcommands(build_parser()):
        pages[f"commands/{name}.md"] = "\n\n".join(_help_of(f"edgeinfer {name}", parser)) + "\n"
        rows.append(f"| [`edgeinfer {name}`](commands/{name}.md) | {COMMANDS[name]} |")
    parts = [
        "# Commands",
        "`edgeinfer COMMAND --help` shows what most people need, `--help-all` everything that is listed here.",
        "\n".join(["| command | what it does |", "|---|---|", *rows]),
        "\n".join(["```{toctree}", ":hidden:", "", *(page.removesuffix(".md") for page in pages), "```"]),
    ]
    return {"commands.md": "\n\n".join(parts) + "\n", **pages}


def _help_of(command: str, parser: Parser, level: int = 1) -> Iterator[str]:
    yield f"{'#' * level} {command}"
    yield f"```text\n{parser.format_help_all().strip()}\n```"
    for name, below in _subcommands(parser):
        yield from _help_of(f"{command} {name}", below, level + 1)


def _subcommands(parser: argparse.ArgumentParser) -> Sequence[tuple[str, Parser]]:
    """The commands below one, in the order of its help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return list(action.choices.items())
    return ()
