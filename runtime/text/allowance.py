"""What one render of a chat template may still spend, and what operations on values cost."""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any, NoReturn

# A unit is about one byte built, or what 10 ns do. What a render may build, and so what it may hold, grows with what
# it is given: published templates spend less than twenty units on a byte of a message.
BASE_UNITS = 8_000_000
UNITS_PER_BYTE = 64
MAX_UNITS = 64_000_000
DEADLINE_SECONDS = 5.0
STEP_COST = 200  # of a loop's iteration or a call
ELEMENT_COST = 64  # of a list's or mapping's element that is built
POINTER_COST = 8  # of an element that is copied or looked at
MAX_INTEGER_BITS = 4096
_WIDE_CHARACTER = 4  # bytes of a character in a text that is not all ASCII, at most
_ESCAPED_CHARACTER = 12  # as JSON or a literal spells one, such as a pair of \uXXXX


class LimitError(Exception):
    """A template does too much work."""


class RefusedError(Exception):
    """A template uses what is not on the list of what templates may use."""


def size_of(text: str) -> int:
    """Bytes that a text takes, at most."""
    return len(text) if text.isascii() else _WIDE_CHARACTER * len(text)


def units_for(given_bytes: int) -> int:
    """The allowance of a render that is given so much."""
    return min(BASE_UNITS + UNITS_PER_BYTE * given_bytes, MAX_UNITS)


class Allowance(threading.local):
    """What the render of this thread may still spend. Every operation is charged before it runs.

    Attributes:
        left: units.
    """

    def __init__(self) -> None:
        self.left = MAX_UNITS
        self._deadline = time.monotonic() + DEADLINE_SECONDS

    def begin(self, units: int) -> None:
        """A fresh allowance."""
        self.left = units
        self._deadline = time.monotonic() + DEADLINE_SECONDS

    def spend(self, units: int) -> None:
        """Takes from the allowance."""
        self.left -= units
        if self.left < 0:
            raise LimitError("the template does too much work for the messages it is given")
        if time.monotonic() > self._deadline:
            raise LimitError(f"the template does too much work: it runs for more than {DEADLINE_SECONDS:g} seconds")

    def text(self, value: object) -> str:
        """Any value as text, charged for what that builds."""
        if isinstance(value, str):
            self.spend(1)
            return value
        self.writing(value)
        return str(value)

    def texts(self, values: Iterable[object]) -> list[str]:
        """Each as text."""
        return [self.text(value) for value in values]

    def writing(self, value: object, indent: int = 0) -> None:
        """Charges for spelling a value out as a literal or as JSON, with so many blanks a level."""
        stack: list[tuple[object, int]] = [(value, 1)]
        while stack:
            item, level = stack.pop()
            if isinstance(item, str):
                plain = item.isascii() and item.isprintable()
                self.spend(ELEMENT_COST + len(item) * (2 if plain else _ESCAPED_CHARACTER))
            elif isinstance(item, Mapping):
                self.spend((len(item) + 1) * (3 * ELEMENT_COST + indent * level))
                stack += [(part, level + 1) for pair in item.items() for part in pair]
            elif isinstance(item, list | tuple | set | KeysView | ValuesView | ItemsView):
                self.spend((len(item) + 1) * (2 * ELEMENT_COST + indent * level))
                stack += [(part, level + 1) for part in item]
            else:
                self.number(item)
                self.spend(ELEMENT_COST + (MAX_INTEGER_BITS // 3 if isinstance(item, int) else 0))

    def number(self, value: object) -> None:
        """Refuses integers that no template needs."""
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise LimitError(f"the template uses a number of more than {MAX_INTEGER_BITS} bits")

    def scalar(self, value: object, what: str) -> None:
        """Refuses what is neither text, number, truth value nor none: hashing or ordering it may take for ever."""
        if not (value is None or isinstance(value, str | int | float)):
            raise RefusedError(f"{what} takes texts and numbers, not a {type(value).__name__}")

    def comparison(self, left: object, right: object) -> int:
        """What comparing two values costs; charges for finding that out."""
        if isinstance(left, str) and isinstance(right, str):
            return 1 + min(len(left), len(right)) // 16
        if isinstance(left, Mapping | list | tuple) and isinstance(right, Mapping | list | tuple):
            return self._walk(min(left, right, key=len))
        for value in (left, right):
            if isinstance(value, KeysView | ItemsView | ValuesView):
                raise RefusedError("views of a mapping cannot be compared; make lists of them")
            self.number(value)
        return 1

    def _walk(self, value: object) -> int:
        before, stack = self.left, [value]
        while stack:
            item = stack.pop()
            self.spend(ELEMENT_COST)
            if isinstance(item, str):
                self.spend(len(item) // 16)
            elif isinstance(item, Mapping):
                self.spend(2 * POINTER_COST * len(item))
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                self.spend(POINTER_COST * len(item))
                stack += item
            else:
                self.number(item)
        return before - self.left

    def items(self, value: Any) -> list[Any]:
        """The elements of anything that a loop takes."""
        if isinstance(value, str):
            self.spend((POINTER_COST if value.isascii() else ELEMENT_COST + POINTER_COST) * len(value))
        elif hasattr(value, "__len__"):
            each = ELEMENT_COST if isinstance(value, range | ItemsView) else POINTER_COST
            self.spend(each * len(value))
        self.spend(ELEMENT_COST)
        elements: list[Any] = []
        if hasattr(value, "__len__"):
            return list(value)
        for element in value:
            self.spend(POINTER_COST)
            elements.append(element)
        return elements

    def contains(self, container: Any, value: Any) -> bool:
        """`value in container`."""
        if isinstance(container, str):
            if isinstance(value, str):
                self.spend(1 + len(container) + len(value))
        elif isinstance(container, Mapping | KeysView):
            self.scalar(value, "'in' a mapping")
            self.spend(1)
        else:
            if not isinstance(container, list | tuple):
                container = self.items(container)
            self.spend(len(container))
            for element in container:
                self.spend(self.comparison(element, value))
        return value in container


def refuse_attribute(owner: str, name: object) -> NoReturn:
    """Says that a template may not use something of a value."""
    raise RefusedError(f"{str(name)[:80]!r} of a {owner} is unsafe: it is not among what chat templates may use")
