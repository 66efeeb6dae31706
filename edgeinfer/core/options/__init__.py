"""How options are declared, checked and grouped; `options.load` and `options.reply` declare them. An option is a field
of a configuration that `option` made. Its help, range, flags and request fields are given there and nowhere else:
commands, requests, the reference pages and the types for editors are made from them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence, Sized
from typing import Any, ClassVar, Literal, Self, TypeVar

from edgeinfer.core.errors import Setting, UsageError, joined, shown
from edgeinfer.core.records import dataclass

C = TypeVar("C")

# The largest count where nothing sets a lower limit: what the counters of all systems hold.
LARGEST_COUNT = 2**31 - 1
LARGEST_SIZE = 2**63 - 1
# Nothing that a size limits fits into less.
_SMALLEST_SIZE = 100_000
_UNITS = {"": 1, "B": 1, "K": 1000, "KB": 1000, "M": 1000**2, "MB": 1000**2, "G": 1000**3, "GB": 1000**3}
_UNITS |= {"T": 1000**4, "TB": 1000**4, "KIB": 1024, "MIB": 1024**2, "GIB": 1024**3, "TIB": 1024**4}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_SHOWN = 80
_METAVARS = {int: "N", float: "X"}


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have."""

    least: float
    most: float
    whole: bool = False  # only whole numbers are allowed
    above: bool = False  # `least` itself is not allowed
    optional: bool = False  # None is allowed

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
    """One field of a configuration: what it means, which values it takes, and its names outside Python."""

    name: str
    type: Any  # of its values; None is not part of it
    optional: bool  # None is allowed
    default: Any
    help: str  # one line without a full stop; it ends in the default where that is not obvious
    range: Range | None = None  # the numbers it takes; None where it takes none
    choices: tuple[str, ...] = ()  # the texts it takes; empty where any text will do
    # Of the commands, such as ("-c", "--context"); empty where no command offers it. A flag of a truth value that
    # begins with "--no-" turns it off.
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    group: str = ""  # heading under which help lists it
    size: bool = False  # commands take the number as a size, such as 600MB
    # Fields of an OpenAI-style request that give the value as it is, its own name first; empty where none does.
    wire: tuple[str, ...] = ()
    basic: bool = False  # the short help of commands shows it too
    brief: str = ""  # replaces the help there, where that is long
    # Another option and its value; both are given, or neither. None where there is no such option.
    goes_with: tuple[str, str] | None = None
    given: str = ""  # type of the values that callers may give, in Python; empty where that is the field's own

    @property
    def description(self) -> str:
        """The help as documentation of a value: the flag of an option that is on by default turns it off."""
        return f"False: {self.help}" if self.type is bool and self.default is True else self.help

    def check(self, value: object) -> None:
        """Refuse a value that this option cannot have. Tuples and mappings are checked by their configuration."""
        if value is None and self.optional:
            return
        if self.range is not None:
            if not self.range.holds(value):
                require(False, self.name, value, str(self.range))
        elif self.choices:
            if not isinstance(value, str) or value not in self.choices:
                hint = suggestion(value, self.choices) + Setting(self.name)
                hint += f" must be one of {', '.join(self.choices)}."
                raise UsageError(f"Unknown {self.name} {shown(value)}.", hint)
        elif self.type in (bool, str):
            require(isinstance(value, self.type), self.name, value, "true or false" if self.type is bool else "a text")


def option(
    default: Any = dataclasses.MISSING,
    help: str = "",
    low: float | None = None,  # without it, the option takes no numbers
    high: float = LARGEST_COUNT,
    metavar: str | None = None,  # by default N for whole numbers and X for others
    *,
    above: bool = False,  # the range does not include `low`
    choices: tuple[str, ...] = (),
    cli: bool = True,  # commands offer it, as --name or, where it is on by default, as --no-name
    flag: str = "",  # the command's long flag where it is not called like the option
    short: str = "",  # a further flag of one letter
    wire: bool | tuple[str, ...] = True,  # whether requests give it, or the further fields that do
    factory: Any = dataclasses.MISSING,  # makes the default where that is mutable
    **rest: Any,
) -> Any:
    """Declare a field of a configuration, read by `options_of`; `ConfigOption` says what `rest` may be."""
    ends = None if low is None else (low, high, above)
    flags = (cli, flag, short)
    declared = {"help": help, "ends": ends, "choices": choices, "flags": flags, "metavar": metavar, "wire": wire}
    return dataclasses.field(default=default, default_factory=factory, metadata=declared | rest)


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
    made: Any = field.default_factory
    default = made() if field.default is dataclasses.MISSING else field.default
    declared = dict(field.metadata)
    (cli, flag, short), ends, wire = declared.pop("flags"), declared.pop("ends"), declared.pop("wire")
    long = flag or ("--no-" if kind is bool and default is True else "--") + field.name.replace("_", "-")
    declared["metavar"] = declared["metavar"] or _METAVARS.get(kind)
    return ConfigOption(
        name=field.name,
        type=kind,
        optional=optional,
        default=default,
        range=None if ends is None else Range(ends[0], ends[1], kind is int, ends[2], optional),
        flags=tuple(filter(None, (short, long))) if cli else (),
        wire=(field.name, *(() if wire is True else wire)) if wire else (),
        **declared,
    )


def documented(configuration: type[C]) -> type[C]:
    """Add the help of each option to a configuration's docstring."""
    declared = (field for field in dataclasses.fields(configuration) if field.metadata)  # type: ignore[arg-type]
    lines = [f"    {f.name}: {'False: ' if f.default is True else ''}{f.metadata['help']}." for f in declared]
    configuration.__doc__ = "\n".join([inspect.cleandoc(configuration.__doc__ or ""), "", "Attributes:", *lines])
    return configuration


def check_options(configuration: Any) -> None:
    """Refuse values of another type or out of range."""
    for name, declared in options_of(type(configuration)).items():
        declared.check(getattr(configuration, name))


class OptionGroup:
    """Base of frozen dataclasses that hold the options of one subject. `mode` is the field of a group with a choice
    that a text alone can make, and the option's name where options are flat."""

    mode: ClassVar[tuple[str, str] | None] = None

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def of(cls, given: Self | Mapping[str, Any]) -> Self:
        """Make the object of what a caller gave; UsageError where that is no mapping, or an option is wrong."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            kinds = f"a {cls.__name__} or a mapping of its options"
            raise UsageError(f"{shown(given)} cannot be used as {cls.__name__}.", f"Give {kinds}.")
        require_known(f"option of {cls.__name__}", given, options_of(cls))
        return cls(**without_none(given))

    def flat(self) -> dict[str, Any]:
        """The options that differ from their defaults, by their names outside of a group."""
        changed = {
            name: value
            for name, declared in options_of(type(self)).items()
            if (value := getattr(self, name)) != declared.default
        }
        if self.mode is not None and self.mode[0] in changed:
            changed[self.mode[1]] = changed.pop(self.mode[0])
        return changed


def flat_options(given: Mapping[str, Any], groups: Mapping[str, type[OptionGroup]]) -> dict[str, Any]:
    """Options with those of groups in place of the groups; an option that is also given by itself stays as it is."""
    alone = dict(given)
    flat: dict[str, Any] = {}
    for name, group in groups.items():
        value = alone.get(name)
        if value is None:
            alone.pop(name, None)
        elif group.mode is None or not isinstance(value, str):
            flat |= group.of(alone.pop(name)).flat()
    return flat | alone


def without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options but for those given as None, which count as left out."""
    return {name: value for name, value in given.items() if value is not None}


class FlatOptions:
    """Base of configurations, whose options callers give by themselves or in groups. Messages call an option a `kind`,
    such as "load option", and name the functions that it is `taken_by`."""

    kind: ClassVar[str]
    taken_by: ClassVar[str]

    @classmethod
    def require_known(cls, given: Iterable[str]) -> None:
        """Refuse names that are no options, or those of another configuration."""
        others = {name: other for other in FlatOptions.__subclasses__() for name in options_of(other)}
        elsewhere = {name: f"It is a {other.kind}: pass it to {other.taken_by}." for name, other in others.items()}
        require_known(cls.kind, given, options_of(cls), elsewhere)


def require_known(
    kind: str, given: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse names that are no options of a kind such as "load option", with the hints for those that are another's."""
    names = sorted(known)
    for name in given:
        if name not in names:
            hint = (elsewhere or {}).get(name) or suggestion(name, names) or f"Known options: {', '.join(names)}."
            raise UsageError(f"Unknown {kind} {name!r}.", hint.strip())


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuse a value that breaks a rule."""
    if not condition:
        raise UsageError(Setting(name, value) + " is out of range.", Setting(name) + f" must be {rule}.")


def require_few(name: str, values: Sized, most: int) -> None:
    """Refuse more values than any request needs, before anything is made of them."""
    if len(values) > most:
        raise UsageError(Setting(name) + f" has {len(values)} entries.", Setting(name) + f" can have at most {most}.")


def require_alone(names: Sequence[str]) -> None:
    """Refuse options that exclude each other."""
    if len(names) > 1:
        raise UsageError(joined(map(Setting, names), "and") + " cannot be combined.", "Leave out all but one.")


def is_integer(value: object) -> bool:
    """Whether it is a whole number; True and False, which Python counts among them, are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def suggestion(name: object, known: Iterable[str]) -> str:
    """ "Did you mean ...?" and a space, where a name is nearly one of those that are known; else an empty text."""
    found = nearest(name, known)
    return f"Did you mean {found!r}? " if found else ""


def nearest(name: object, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known name that is most like a name that is none of them; None if no name is as `alike`, from 0 to 1."""
    from difflib import get_close_matches  # only errors need it

    short = isinstance(name, str) and len(name) <= _SHOWN
    found = get_close_matches(str(name).lower(), list(known), 1, alike) if short else []
    return found[0] if found else None


def parse_size(value: int | str) -> int:
    """Bytes of a size such as ``600MB``, ``1.5GiB`` or ``400000000``."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise UsageError(f"{value!r} is not a size.", "Write it like 600MB or 1.5GiB.")
    # Python writes no integers of thousands of digits.
    match = _SIZE.fullmatch(value if isinstance(value, str) else str(min(max(value, 0), LARGEST_SIZE + 1)))
    unit = match and _UNITS.get(match.group(2).upper())
    size = float(match.group(1)) * unit if match and unit else 0.0
    if not 0 < round(min(size, 2 * LARGEST_SIZE)) <= LARGEST_SIZE:
        raise UsageError(f"{shown(value)} is not a positive size.", "Write it like 600MB or 1.5GiB.")
    return round(size)


def checked_size(name: str, value: int | str) -> int:
    """Bytes of a size. A small number without a unit is a mistake: 400 is surely meant to be 400MB."""
    size = parse_size(value)
    if size < _SMALLEST_SIZE and str(value).strip().isdigit():
        raise UsageError(Setting(name, size) + f" means {size} bytes.", f"Did you mean {size}MB?")
    return size


def format_size(size: int, *, up: bool = False) -> str:
    """A size in bytes as people read it, in decimal units: ``412.3 MB``."""
    for unit, factor in (("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if abs(size) >= factor:
            return f"{math.ceil(size * 10 / factor) / 10 if up else size / factor:.1f} {unit}"
    return f"{size} B"
