"""Options of configurations, declared once with their help, range and names, and checks of the values callers give."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence, Sized
from typing import Any, Literal

from edgeinfer.errors import Setting, UsageError, joined, shown
from edgeinfer.records import dataclass

# The largest count where nothing sets a lower limit: what the counters of all systems hold.
LARGEST_COUNT = 2**31 - 1
_SHOWN = 80


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have.

    Attributes:
        whole: only whole numbers are allowed.
        above: the least itself is not allowed.
        optional: None is allowed.
    """

    least: float
    most: float
    whole: bool = False
    above: bool = False
    optional: bool = False

    def holds(self, value: object) -> bool:
        """Whether a value is in the range; NaN never is, and True and False are no numbers."""
        if value is None:
            return self.optional
        if not (is_integer(value) if self.whole else is_number(value)):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)  # type: ignore[operator]

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.most >= LARGEST_COUNT:
            return f"{kind} above {self.least}" if self.above else f"{kind} of at least {self.least}"
        limits = f"above {self.least} and at most {self.most}" if self.above else f"from {self.least} to {self.most}"
        return f"{kind} {limits}"


@dataclass(frozen=True)
class ConfigOption:
    """One field of a configuration: what it means, which values it takes, and its names outside Python.

    Attributes:
        name: of the field.
        type: of its values; None is not part of it.
        optional: None is allowed.
        default: the value where nothing is given.
        help: one line for people, without a full stop; it ends in the default where that is not obvious.
        range: the numbers it takes; None where it takes none.
        choices: the texts that help offers; empty where any text will do.
        also: further texts it takes.
        flags: of the commands, such as ("-c", "--context"); empty where no command offers it. A flag of a truth value
            that begins with "--no-" turns it off. The long one is the option's name.
        metavar: stands for the value in a command's help.
        group: heading under which help lists it.
        size: commands take the number as a size, such as 600MB.
        wire: fields of an OpenAI-style request that give the value as it is, its own name first; empty where none does.
        basic: the short help of commands shows it too.
        brief: stands for the help there, where that is long.
        goes_with: another option and its value; both are given, or neither. None where there is no such option.
    """

    name: str
    type: Any
    optional: bool
    default: Any
    help: str
    range: Range | None = None
    choices: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    group: str = ""
    size: bool = False
    wire: tuple[str, ...] = ()
    basic: bool = False
    brief: str = ""
    goes_with: tuple[str, str] | None = None

    def check(self, value: object) -> None:
        """Refuses a value that this option cannot have. Tuples and mappings are checked by their configuration."""
        if value is None and self.optional:
            return
        if self.range is not None:
            if not self.range.holds(value):
                require(False, self.name, value, str(self.range))
        elif self.choices:
            if not isinstance(value, str) or value not in (*self.choices, *self.also):
                hint = suggestion(value, self.choices) + Setting(self.name)
                hint += f" must be one of {', '.join(self.choices)}."
                raise UsageError(f"Unknown {self.name} {shown(value)}.", hint)
        elif self.type in (bool, str):
            require(isinstance(value, self.type), self.name, value, "true or false" if self.type is bool else "a text")


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    low: float | None = None,
    high: float | None = None,
    above: bool = False,
    choices: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    cli: str | tuple[str, ...] = (),
    metavar: str | None = None,
    group: str = "",
    size: bool = False,
    wire: bool | tuple[str, ...] = True,
    basic: bool = False,
    brief: str = "",
    goes_with: tuple[str, str] | None = None,
    factory: Any = dataclasses.MISSING,
) -> Any:
    """Declares a field of a configuration; `options_of` gives what was declared.

    Args:
        above: the range does not include `low`.
        factory: makes the default where that is mutable.

    See `ConfigOption` for the rest.
    """
    declared = {
        "help": help,
        "ends": None if low is None or high is None else (low, high, above),
        "choices": choices,
        "also": also,
        "flags": (cli,) if isinstance(cli, str) else cli,
        "metavar": metavar,
        "group": group,
        "size": size,
        "wire": wire,
        "basic": basic,
        "brief": brief,
        "goes_with": goes_with,
    }
    return dataclasses.field(default=default, default_factory=factory, metadata=declared)


def options_of(configuration: type[Any]) -> Mapping[str, ConfigOption]:
    """The options of a configuration by name, in the order of its fields."""
    return _options_of(configuration)  # type: ignore[arg-type]  # mypy takes a class for unhashable


@functools.cache
def _options_of(configuration: Hashable) -> Mapping[str, ConfigOption]:
    assert isinstance(configuration, type), "only `options_of` calls it"
    hints = typing.get_type_hints(configuration)
    return {f.name: _declared(f, hints[f.name]) for f in dataclasses.fields(configuration) if f.metadata}


def _declared(field: dataclasses.Field[Any], hint: Any) -> ConfigOption:
    kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
    optional = len(kinds) < len(typing.get_args(hint))
    kind = kinds[0] if optional and len(kinds) == 1 else hint
    kind = str if typing.get_origin(kind) is Literal else kind
    declared = dict(field.metadata)
    ends, wire = declared.pop("ends"), declared.pop("wire")
    made: Any = field.default_factory
    return ConfigOption(
        name=field.name,
        type=kind,
        optional=optional,
        default=made() if field.default is dataclasses.MISSING else field.default,
        range=None if ends is None else Range(ends[0], ends[1], kind is int, ends[2], optional),
        wire=(field.name, *(() if wire is True else wire)) if wire else (),
        **declared,
    )


def check_options(configuration: Any) -> None:
    """Refuses values of another type or out of range."""
    for name, declared in options_of(type(configuration)).items():
        declared.check(getattr(configuration, name))


def is_integer(value: object) -> bool:
    """Whether it is a whole number; True and False, which Python counts among them, are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuses a value that breaks a rule."""
    if not condition:
        raise UsageError(Setting(name, value) + " is out of range.", Setting(name) + f" must be {rule}.")


def suggestion(name: object, known: Iterable[str]) -> str:
    """ "Did you mean ...?" and a space, where a name is nearly one of those that are known; else an empty text."""
    found = nearest(name, known)
    return f"Did you mean {found!r}? " if found else ""


def nearest(name: object, known: Iterable[str], alike: float = 0.6) -> str | None:
    """Which of the known names a name that is none of them is nearly; None if it is like none.

    Args:
        alike: how much they have in common at least, from 0 to 1.
    """
    from difflib import get_close_matches  # only errors need it

    short = isinstance(name, str) and len(name) <= _SHOWN
    found = get_close_matches(str(name).lower(), list(known), 1, alike) if short else []
    return found[0] if found else None


def require_few(name: str, values: Sized, most: int) -> None:
    """Refuses more values than any request needs, before anything is made of them."""
    if len(values) > most:
        raise UsageError(Setting(name) + f" has {len(values)} entries.", Setting(name) + f" can have at most {most}.")


def require_alone(names: Sequence[str]) -> None:
    """Refuses options that exclude each other."""
    if len(names) > 1:
        raise UsageError(joined(map(Setting, names), "and") + " cannot be combined.", "Leave out all but one.")
