"""Checks of options that callers give, also as JSON has them; knows nothing of any one option."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass

from edgeinfer.errors import UsageError

__all__ = [
    "LARGEST_COUNT",
    "Range",
    "is_integer",
    "is_number",
    "require",
    "require_few",
    "require_ranges",
    "require_short",
    "shown",
]

# Of what is counted, without a limit of its own: what all systems' counters hold.
LARGEST_COUNT = 2**31 - 1
_SHOWN = 80


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have.

    Attributes:
        whole: it takes whole numbers only.
        above: the least is not among them.
        optional: None is taken too.
    """

    least: float
    most: float
    whole: bool = False
    above: bool = False
    optional: bool = False

    def holds(self, value: object) -> bool:
        """Whether a value is among them; NaN never is, and a truth is no number."""
        if value is None:
            return self.optional
        if not (is_integer(value) if self.whole else is_number(value)):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)  # type: ignore[operator]

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        limits = f"above {self.least} and at most {self.most}" if self.above else f"from {self.least} to {self.most}"
        return f"{kind} {limits}"


def is_integer(value: object) -> bool:
    """Whether it is a whole number, and not a truth, which Python counts among them."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a number, and not a truth."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Refuses a value that breaks a rule.

    Raises:
        UsageError: the condition is false.
    """
    if not condition:
        raise UsageError(f"{name}={shown(value)} is out of range.", f"{name} must be {rule}.")


def require_ranges(options: object, ranges: Mapping[str, Range]) -> None:
    """Refuses options that are out of their ranges.

    Raises:
        UsageError: one is.
    """
    for name, allowed in ranges.items():
        value = getattr(options, name)
        require(allowed.holds(value), name, value, str(allowed))


def shown(value: object) -> str:
    """A value as messages show it, in a few words whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def require_few(name: str, values: Sized, most: int) -> None:
    """Refuses more values than anybody needs, before anything is made of them.

    Raises:
        UsageError: there are more.
    """
    if len(values) > most:
        raise UsageError(f"{name} has {len(values)} entries.", f"{name} can have {most} at most.")


def require_short(name: str, texts: Iterable[str], most: int) -> None:
    """Refuses longer texts than anybody needs, before anything is made of them.

    Raises:
        UsageError: one is longer.
    """
    longest = max(map(len, texts), default=0)
    if longest > most:
        raise UsageError(f"{name} has {longest} characters.", f"{name} can have {most} at most.")
