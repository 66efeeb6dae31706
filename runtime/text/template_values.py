"""Operators and methods that chat templates may use, each charged before it runs."""

from __future__ import annotations

import operator
import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.runtime import Undefined

from edgeinfer.runtime.text.allowance import (
    ELEMENT_COST,
    MAX_INTEGER_BITS,
    POINTER_COST,
    Allowance,
    LimitError,
    RefusedError,
    size_of,
)

MAX_WIDTH = 1000  # of a field of a format, an indent, digits behind the point
_CASED_CHARACTER = 12  # bytes: one character may become three, and four bytes each while it is made
_PERCENT = re.compile(r"%(?:\(\w*\))?[-#0 +]*(\d*)(?:\.(\d*))?[diouxXeEfFgGcrsa%]")
_SPECIFICATION = re.compile(r"(?:.?[<>=^])?[-+ ]?#?0?(\d*)[,_]?(?:\.(\d+))?[bcdeEfFgGnosxX%]?", re.DOTALL)
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_ESCAPES = str.maketrans({"&": "&amp;", ">": "&gt;", "<": "&lt;", "'": "&#39;", '"': "&#34;"})
_LONGEST_ESCAPE = 5
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
}


class SafeText(str):
    """What the filter `safe` gives: text that is added to it is escaped for HTML, as jinja2 does."""

    __slots__ = ()


def lines_in(text: str) -> int:
    """How many lines `str.splitlines` makes, at most."""
    return 1 + sum(map(text.count, _LINE_ENDS))


class Values:
    """What may be done to values.

    Args:
        allowance: what pays for it.

    Attributes:
        text_methods, mapping_methods: by name; each takes the value first.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance = allowance
        self._spend = allowance.spend
        self.text_methods: dict[str, Callable[..., Any]] = {
            "capitalize": self._cased(str.capitalize),
            "endswith": self._affix(str.endswith),
            "find": self._find,
            "format": self.format,
            "isdigit": self._affix(str.isdigit),
            "join": self.join,
            "lower": self._cased(str.lower),
            "lstrip": self._stripping(str.lstrip),
            "removeprefix": self._affix(str.removeprefix),
            "removesuffix": self._affix(str.removesuffix),
            "replace": self.replace,
            "rsplit": self._splitting(str.rsplit),
            "rstrip": self._stripping(str.rstrip),
            "split": self._splitting(str.split),
            "splitlines": self._splitlines,
            "startswith": self._affix(str.startswith),
            "strip": self._stripping(str.strip),
            "title": self._cased(str.title),
            "upper": self._cased(str.upper),
        }
        self.mapping_methods: dict[str, Callable[..., Any]] = {
            "get": self._get,
            "items": lambda mapping: mapping.items(),
            "keys": lambda mapping: mapping.keys(),
            "values": lambda mapping: mapping.values(),
        }

    # Operators

    def operate(self, symbol: str, plain: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
        """A binary operator of arithmetic."""
        if symbol == "+" and _safe(left, right) and _same_sequence(left, right):
            return self._escaped([left, right])
        if symbol == "+" and _same_sequence(left, right):
            self._concatenation(left, right)
        elif symbol == "*" and (repeated := _repetition(left, right)):
            sequence, factor = repeated
            each = size_of(sequence) if isinstance(sequence, str) else POINTER_COST * len(sequence)
            self._spend(ELEMENT_COST + each * max(factor, 0))
        elif symbol == "%" and isinstance(left, str):
            self._percent(left, right)
        elif _numbers(left, right):
            self._arithmetic(symbol, left, right)
        elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
            kinds = f"{type(left).__name__!r} and {type(right).__name__!r}"
            raise TypeError(f"unsupported operand types for {symbol}: {kinds}")
        return plain(left, right)

    def compare(self, left: Any, *rest: Any) -> Any:
        """A chain of comparisons: names of operators and what they compare with, by turns."""
        result: Any = True
        for name, right in zip(rest[::2], rest[1::2], strict=True):
            if name in ("in", "notin"):
                result = self._allowance.contains(right, left) is (name == "in")
            else:
                self._spend(self._allowance.comparison(left, right))
                result = _COMPARISONS[name](left, right)
            if not result:
                return result
            left = right
        return result

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        if isinstance(value, str):
            self._spend(ELEMENT_COST + size_of(value))
        elif isinstance(value, list | tuple):
            self._spend(ELEMENT_COST + POINTER_COST * len(range(*slice(start, stop, step).indices(len(value)))))
        elif not isinstance(value, Undefined | range):
            raise TypeError(f"a {type(value).__name__} cannot be sliced")
        return value[start:stop:step]

    def joined(self, *parts: Any) -> str:
        """The operator `~`."""
        return self.join("", self._allowance.texts(parts))

    def mapping(self, *pairs: Any) -> dict[Any, Any]:
        """A mapping of keys and values that come by turns."""
        self._spend(ELEMENT_COST * (1 + len(pairs)))
        for key in pairs[::2]:
            self._allowance.scalar(key, "the key of a mapping")
        return dict(zip(pairs[::2], pairs[1::2], strict=True))

    def literal(self, value: Any) -> Any:
        """A list or tuple that was written out."""
        self._spend(ELEMENT_COST + POINTER_COST * len(value))
        return value

    def _escaped(self, texts: list[str]) -> SafeText:
        self._spend(sum(_LONGEST_ESCAPE * size_of(text) for text in texts))
        whole = "".join(text if isinstance(text, SafeText) else text.translate(_ESCAPES) for text in texts)
        return SafeText(whole)

    def _concatenation(self, left: Any, right: Any) -> None:
        if isinstance(left, str):
            wide = 1 if left.isascii() and right.isascii() else 4
            self._spend(ELEMENT_COST + wide * (len(left) + len(right)))
        else:
            self._spend(ELEMENT_COST + POINTER_COST * (len(left) + len(right)))

    def _arithmetic(self, symbol: str, left: Any, right: Any) -> None:
        self._spend(1)
        self._allowance.number(left)
        self._allowance.number(right)
        if symbol == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > MAX_INTEGER_BITS:
                raise LimitError(f"the template uses a number of more than {MAX_INTEGER_BITS} bits")
            if right < 0 and -right > MAX_INTEGER_BITS:
                raise LimitError("the template uses too small a number")

    # Formats

    def _percent(self, text: str, arguments: Any) -> None:
        """Charges for `text % arguments`."""
        self._spend(ELEMENT_COST + 2 * size_of(text))
        fields = 0
        for match in _PERCENT.finditer(text):
            fields += 1
            self._spend(ELEMENT_COST + _width(match))
        if "%" in _PERCENT.sub("", text):
            raise RefusedError("a format has a field that is too wide or not a plain one")
        self._arguments([arguments], fields if isinstance(arguments, Mapping) else 1)

    def format(self, text: str, *args: Any, **kwargs: Any) -> str:
        """`text.format(...)`, of plain fields."""
        self._spend(ELEMENT_COST * (1 + text.count("{") + text.count("}")) + size_of(text))
        fields = 0
        for _literal, name, specification, _conversion in string.Formatter().parse(text):
            if name is None:
                continue
            fields += 1
            if "." in name or "[" in name:
                raise RefusedError(f"the field {name[:80]!r} of a format is unsafe")
            match = _SPECIFICATION.fullmatch(specification or "")
            if match is None:
                raise RefusedError("a format has a field that is not a plain one")
            self._spend(ELEMENT_COST + _width(match))
        self._arguments([args, kwargs], fields)
        return text.format(*args, **kwargs)

    def _arguments(self, values: list[Any], times: int) -> None:
        before = self._allowance.left
        self._allowance.writing(values)
        self._spend((before - self._allowance.left) * max(times - 1, 0))

    # Methods

    def join(self, separator: str, values: Any) -> str:
        """`separator.join(values)`."""
        items = self._allowance.items(values)
        # By kind before anything is added up: one wide text makes the whole wide.
        length = sum(len(item) for item in items if isinstance(item, str)) + len(separator) * len(items)
        narrow = separator.isascii() and all(item.isascii() for item in items if isinstance(item, str))
        self._spend(ELEMENT_COST + POINTER_COST * len(items) + length * (1 if narrow else 4))
        return separator.join(items)

    def replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        """`text.replace(old, new, count)`."""
        self._spend(len(text) + len(old))
        times = text.count(old)
        if count >= 0:
            times = min(times, count)
        wide = 1 if text.isascii() and new.isascii() else 4
        self._spend(ELEMENT_COST + wide * (len(text) + times * max(len(new) - len(old), 0)))
        return text.replace(old, new, count)

    def change_case(self, change: Callable[[str], str], text: str) -> str:
        """`text.lower()` and the like."""
        self._spend(ELEMENT_COST + (1 if text.isascii() else _CASED_CHARACTER) * len(text))
        return type(text)(change(text))

    def strip(self, strip: Callable[..., str], text: str, characters: str | None = None) -> str:
        """`text.strip(characters)` and the like."""
        self._spend(ELEMENT_COST + size_of(text) + len(text) * len(characters or "") // 4)
        return type(text)(strip(text, characters))

    def _cased(self, change: Callable[[str], str]) -> Callable[[str], str]:
        return lambda text: self.change_case(change, text)

    def _stripping(self, strip: Callable[..., str]) -> Callable[..., str]:
        return lambda text, characters=None: self.strip(strip, text, characters)

    def _affix(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(text: str, *affixes: Any) -> Any:
            if len(affixes) > 1:
                raise RefusedError("of the arguments of str methods, positions are not among what templates may use")
            self._spend(ELEMENT_COST + size_of(text))
            for affix in affixes:
                self._spend(POINTER_COST * len(affix) if isinstance(affix, str | tuple) else 1)
            return method(text, *affixes)

        return checked

    def _splitting(self, split: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def checked(text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
            # Searching from the right looks at the separator again at each place.
            self._spend(size_of(text) + (len(text) * len(sep or "") // 4 if split is str.rsplit else 0))
            pieces = 1 + (text.count(sep) if sep else (len(text) + 1) // 2)
            if maxsplit >= 0:
                pieces = min(pieces, 1 + maxsplit)
            self._spend(pieces * (ELEMENT_COST + POINTER_COST) + (0 if text.isascii() else pieces * POINTER_COST))
            return split(text, sep, maxsplit)

        return checked

    def _splitlines(self, text: str, keepends: bool = False) -> list[str]:
        self._spend(10 * len(text))
        self._spend(size_of(text) + lines_in(text) * 2 * ELEMENT_COST)
        return text.splitlines(bool(keepends))

    def _find(self, text: str, sub: str) -> int:
        self._spend(ELEMENT_COST + len(text) + len(sub))
        return text.find(sub)

    def _get(self, mapping: Mapping[Any, Any], key: Any, default: Any = None) -> Any:
        self._allowance.scalar(key, "get()")
        return mapping.get(key, default)


def _numbers(*values: object) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _safe(*values: object) -> bool:
    return any(isinstance(value, SafeText) for value in values)


def _same_sequence(left: object, right: object) -> bool:
    return any(isinstance(left, kind) and isinstance(right, kind) for kind in (str, list, tuple))


def _repetition(left: Any, right: Any) -> tuple[Any, int] | None:
    for sequence, factor in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(factor, int):
            return sequence, factor
    return None


def _width(match: re.Match[str]) -> int:
    # By digits first: turning many of them into a number takes long.
    widths = [digits or "0" for digits in match.groups()]
    if any(len(digits) > 4 or int(digits) > MAX_WIDTH for digits in widths):
        raise RefusedError(f"a format asks for a field of more than {MAX_WIDTH} characters")
    return sum(map(int, widths))
