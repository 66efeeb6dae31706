"""Checks of options that callers give, also as JSON has them; knows nothing of any one option."""

from __future__ import annotations

from edgeinfer.errors import UsageError

__all__ = ["is_integer", "is_number", "require"]


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
        raise UsageError(f"{name}={value!r} is out of range.", f"{name} must be {rule}.")
