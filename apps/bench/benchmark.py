"""What a benchmark is: options declared once as fields of a dataclass, a function that measures, a view of its JSON.

The command line, result files and the report page are generated from these declarations.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.bench.plots import Chart
from edgeinfer.apps.bench.render import Section

if TYPE_CHECKING:
    from edgeinfer import Model


Progress = Callable[[str, int, int], None]
StageProgress = Callable[[int, int], None]

_KEY = "option"


@dataclass(frozen=True)
class Declared:
    """How a field of an options class is given on the command line.

    Attributes:
        flags: names, or none for a positional argument.
        help: what it decides.
        group: title of the group that --help lists it in; "" for none.
        settings: further arguments of `argparse`, such as type and metavar.
        rare: only --help-all shows it.
    """

    flags: tuple[str, ...]
    help: str
    group: str
    settings: Mapping[str, Any]
    rare: bool = False


def option(*flags: str, default: Any = MISSING, help: str, group: str = "", rare: bool = False, **settings: Any) -> Any:
    """A field of a frozen options class that is also an option of the command line.

    Type and action follow from the field's annotation, unless they are given.

    Args:
        flags: names, the last perhaps with a placeholder for the value: "--out FILE"; none for a positional argument.
        default: of field and option; without one the option is required.
    """
    return field(default=default, metadata={_KEY: Declared(flags, help, group, settings, rare)})


def declared(options: type[Any]) -> Iterator[tuple[Field[Any], Declared]]:
    """Every field of an options class that is an option, with its declaration."""
    for each in fields(options):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def add_declared(parser: argparse.ArgumentParser, options: type[Any]) -> list[argparse.Action]:
    """Adds the options that a class declares, in their groups; returns the rare ones."""
    rare = []
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    group = ""
    for each, declaration in declared(options):
        group = declaration.group or group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        settings = _inferred(str(each.type)) if "action" not in declaration.settings else {}
        settings |= declaration.settings
        flags = [flag.partition(" ")[0] for flag in declaration.flags]
        if flags:
            settings["dest"] = each.name
            placeholder = declaration.flags[-1].partition(" ")[2]
            settings |= {"metavar": placeholder} if placeholder else {}
        if each.default is not MISSING:
            # argparse appends to the default itself.
            settings["default"] = list(each.default) if settings.get("action") == "append" else each.default
        elif flags:
            settings["required"] = True
        text = _help(declaration.help, each.default)
        action = groups[group].add_argument(*(flags or [each.name]), help=text, **settings)
        if declaration.rare:
            rare.append(action)
    return rare


def _inferred(annotation: str) -> dict[str, Any]:
    """How a value of a field's type is parsed."""
    base = annotation.removesuffix(" | None")
    kinds: dict[str, Any] = {"int": int, "float": float, "Path": Path}
    kinds |= {"tuple[int, ...]": numbers, "tuple[str, ...]": names}
    return {"action": "store_true"} if base == "bool" else {"type": kinds[base]} if base in kinds else {}


def _help(text: str, default: Any) -> str:
    """With the default, where it is a value and the text does not say it."""
    if "default:" in text or default is MISSING or default is None or default is False or default == ():
        return text
    values = default if isinstance(default, tuple) else (default,)
    shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{text} (default: {shown})"


def options_from(options: type[Any], args: argparse.Namespace) -> Any:
    """An options object of parsed arguments; errors as its class raises them."""
    given = {each.name: getattr(args, each.name) for each, _ in declared(options)}
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


@dataclass(frozen=True)
class BenchContext:
    """What a run is given besides its own options.

    Attributes:
        model: path or hub id; None is the built-in model.
        load: keyword arguments of `edgeinfer.load` that the user gave.
        resolve: the folder of a model; None is the built-in one.
        open_model: loads a model by these two, with a progress bar where there is a terminal.
        progress: is told stage, done and total.
        command: the running command line, kept with the figures.
    """

    model: str | None = None
    load: dict[str, Any] = field(default_factory=dict)
    resolve: Callable[[str | None], Path] = lambda model: Path(model or ".")
    open_model: Callable[[str | None, dict[str, Any]], Model] = lambda model, load: edgeinfer.load(model, **load)
    progress: Progress = lambda stage, done, total: None
    command: str = ""

    def stage(self, name: str) -> StageProgress:
        """The progress of one stage, told done and total."""
        return lambda done, total: self.progress(name, done, total)


@dataclass(frozen=True)
class BenchResult:
    """What a run measured.

    Attributes:
        data: as the types of JSON; `Benchmark.section` shows it.
        finished: False where the user interrupted it; the figures are then of what was done.
        passed: whether what the benchmark verifies is so; False makes the exit code 1.
    """

    data: Any
    finished: bool = True
    passed: bool = True


@dataclass(frozen=True)
class Benchmark:
    """A subcommand of `edgeinfer bench`.

    Attributes:
        name: one word, or two where it is a part of a group ("memory plans").
        help: one line.
        description: shown above the options; ends in an example.
        options: a frozen dataclass whose fields are made by `option`.
        run: measures; raises the errors of `edgeinfer.errors`.
        section: shows the JSON of a run, with the header of its result file.
        loads: whether the options of `edgeinfer.load` are options of this one too.
        chart: what --svg draws of the JSON; None where there is no --svg.
        text: what is printed instead of the section, by options and JSON; None prints the section.
        files: whether --json writes the result; False where the options name the output.
    """

    name: str
    help: str
    description: str
    options: type[Any]
    run: Callable[[Any, BenchContext], BenchResult]
    section: Callable[[Any], Section]
    loads: bool = False
    chart: Callable[[Any], Chart] | None = None
    text: Callable[[Any, Any], str] | None = None
    files: bool = True

    @property
    def key(self) -> str:
        """The name in result files."""
        return self.name.replace(" ", "-")


def names(text: str) -> tuple[str, ...]:
    """Words, separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(int(part) for part in text.split(","))
