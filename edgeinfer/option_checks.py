"""Checks of options that callers give, also as JSON has them; knows nothing of any one option."""

from __future__ import annotations

from collections.abc import Iterable, Sized

from edgeinfer.errors import UsageError

__all__ = ["is_integer", "is_number", "require", "require_few", "require_short"]

# Characters of a value that an error quotes.
_QUOTED = 200


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
        text = repr(value)
        shown = text if len(text) <= _QUOTED else f"{text[:_QUOTED]}..."
        raise UsageError(f"{name}={shown} is out of range.", f"{name} must be {rule}.")


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
