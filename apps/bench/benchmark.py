"""The `Benchmark` type: options declared as dataclass fields, a function that measures, and a view of its JSON.

The command line, the result files and the report are made from these declarations.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import psutil

import edgeinfer
from edgeinfer.apps.bench.render import Section

if TYPE_CHECKING:
    from edgeinfer import Model


T = TypeVar("T")
Progress = Callable[[str, int, int], None]
StageProgress = Callable[[int, int], None]

_KEY = "option"


@dataclass(frozen=True)
class Declared:
    """How a field is given on the command line: `flags` is empty for a positional argument, `group` is a title in
    --help, `settings` go to `argparse`, and `rare` options are shown by --help-all only."""

    flags: tuple[str, ...]
    help: str
    group: str
    settings: Mapping[str, Any]
    rare: bool = False


def option(*flags: str, default: Any = MISSING, help: str, group: str = "", rare: bool = False, **settings: Any) -> Any:
    """Declare a dataclass field that is also a command line option. Type and action follow from the annotation unless
    given. The last flag may carry a placeholder: "--out FILE"."""
    return field(default=default, metadata={_KEY: Declared(flags, help, group, settings, rare)})


def declared(options: type[Any]) -> Iterator[tuple[Field[Any], Declared]]:
    """Fields that are options, with their declarations."""
    for each in fields(options):
        if _KEY in each.metadata:
            yield each, each.metadata[_KEY]


def add_declared(parser: argparse.ArgumentParser, options: type[Any]) -> list[argparse.Action]:
    """Add the declared options in their groups; returns the rare ones."""
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
    """Arguments of `argparse` for an annotation."""
    base = annotation.removesuffix(" | None")
    kinds: dict[str, Any] = {"int": int, "float": float, "Path": Path}
    kinds |= {"tuple[int, ...]": numbers, "tuple[str, ...]": names}
    return {"action": "store_true"} if base == "bool" else {"type": kinds[base]} if base in kinds else {}


def _help(text: str, default: Any) -> str:
    """Append the default to the help text."""
    if "default:" in text or default is MISSING or default is None or default is False or default == ():
        return text
    values = default if isinstance(default, tuple) else (default,)
    shown = ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    return f"{text} (default: {shown})"


def options_from(options: type[Any], args: argparse.Namespace) -> Any:
    """Build an options object from parsed arguments."""
    given = {each.name: getattr(args, each.name) for each, _ in declared(options)}
    return options(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})


@dataclass(frozen=True)
class BenchContext:
    """The context of a run: the model that the user gave, and callbacks of the command."""

    model: str | None = None  # path or hub id; None is the built-in model
    load: dict[str, Any] = field(default_factory=dict)  # keyword arguments of `edgeinfer.load` that the user gave
    resolve: Callable[[str | None], Path] = lambda model: Path(model or ".")  # finds the folder of a model
    # Loads a model, with a progress bar where there is a terminal.
    open_model: Callable[[str | None, dict[str, Any]], Model] = lambda model, load: edgeinfer.load(model, **load)
    progress: Progress = lambda stage, done, total: None  # called with stage, done and total
    command: str = ""  # the running command line, recorded with the figures

    def stage(self, name: str) -> StageProgress:
        """The progress of one stage."""
        return lambda done, total: self.progress(name, done, total)


@dataclass(frozen=True)
class BenchResult:
    """The outcome of a run."""

    data: Any  # JSON-serializable figures; `Benchmark.section` shows them
    finished: bool = True  # False if the user interrupted the run; the figures cover what was done
    passed: bool = True  # whether everything the benchmark verifies holds; False makes the exit code 1


@dataclass(frozen=True)
class Benchmark:
    """A subcommand of `edgeinfer bench`."""

    name: str  # one word, or two for a part of a group ("memory plans")
    help: str  # one line
    description: str  # shown above the options; ends in an example
    options: type[Any]  # a frozen dataclass whose fields are made by `option`
    run: Callable[[Any, BenchContext], BenchResult]  # measures; raises the errors of `edgeinfer.core.errors`
    section: Callable[[Any], Section] | None = None  # shows the JSON of a run with the header of its result file
    loads: bool = False  # whether the options of `edgeinfer.load` are options of this benchmark too
    text: Callable[[Any, Any], str] | None = None  # printed where there is no section; takes options and JSON
    files: bool = True  # whether --json writes the result; False where the options name the output

    @property
    def key(self) -> str:
        """The name in result files."""
        return self.name.replace(" ", "-")


def names(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(part.strip() for part in text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas."""
    return tuple(int(part) for part in text.split(","))


@dataclass(frozen=True)
class Spread:
    """Quartiles."""

    median: float
    p25: float
    p75: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The quartiles of `values`, which must not be empty."""
        p25, median, p75 = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
        return cls(float(median), float(p25), float(p75))


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items in cyclic order, starting at another one: each round of visits begins elsewhere."""
    start = by % max(len(items), 1)
    return [*items[start:], *items[:start]]


# Libraries that take part in computing, here or in another engine.
_LIBRARIES = (
    *("numpy", "onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "tokenizers", "llama-cpp-python"),
    *("onnxruntime-genai", "openvino", "torch", "transformers"),
)


def environment() -> dict[str, Any]:
    """The machine and the library versions that figures depend on."""
    threads = psutil.cpu_count() or 1
    return {
        "processor": machine_name(),
        "cores": psutil.cpu_count(logical=False) or threads,
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "system": system_name(),
        "python": platform.python_version(),
        "libraries": {name: found for name in _LIBRARIES if (found := _version(name))},
    }


def run_header(benchmark: str, command: str) -> dict[str, Any]:
    """The first fields of every result file."""
    header = {"benchmark": benchmark, "command": command, "test_time": timestamp()}
    return header | {"edgeinfer": edgeinfer.__version__, "environment": environment()}


def result_json(benchmark: str, command: str, data: Mapping[str, Any]) -> str:
    """The text of a result file."""
    return json.dumps({**run_header(benchmark, command), **data}, indent=1) + "\n"


def timestamp() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def system_name() -> str:
    """The operating system with its version and C library."""
    release = ".".join(platform.release().split(".")[:2])
    return " ".join(filter(None, (platform.system(), release, platform.machine(), *platform.libc_ver())))


def machine_name() -> str:
    """The processor's name."""
    cpuinfo = Path("/proc/cpuinfo")
    if sys.platform == "linux" and cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
