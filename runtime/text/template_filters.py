"""Filters and tests that chat templates may use, each charged before it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jinja2 import tests
from jinja2.runtime import Undefined

from edgeinfer.runtime.text.allowance import (
    ELEMENT_COST,
    STEP_COST,
    Allowance,
    LimitError,
    RefusedError,
    size_of,
)
from edgeinfer.runtime.text.template_values import MAX_WIDTH, SafeText, Values, lines_in

_MAX_INDENT = 16  # of JSON
_MAX_DIGITS = 1000
_WORD_ENDS = re.compile(r"([-\s({\[<]+)")  # as jinja2 splits a title
_PLAIN_TESTS = (
    "boolean",
    "defined",
    "false",
    "float",
    "integer",
    "iterable",
    "mapping",
    "none",
    "number",
    "sameas",
    "sequence",
    "string",
    "true",
    "undefined",
)


class Filters:
    """The filters by name.

    Args:
        allowance: what pays for them.
        values: what may be done to values.
        item: looks up an attribute as templates do.
        undefined: what stands for a missing value.

    Attributes:
        table: by name.
        tests: those by name that `select` and its like take.
    """

    def __init__(
        self,
        allowance: Allowance,
        values: Values,
        item: Callable[[Any, Any], Any],
        undefined: Callable[[str], Undefined],
        tests: Mapping[str, Any],
    ) -> None:
        self._allowance, self._values, self._item, self._undefined = allowance, values, item, undefined
        self._spend, self._text = allowance.spend, allowance.text
        self._tests = tests
        cased = {"capitalize": str.capitalize, "lower": str.lower, "upper": str.upper}
        self.table: dict[str, Callable[..., Any]] = {
            **{name: self._casing(change) for name, change in cased.items()},
            "abs": self._abs,
            "count": len,
            "d": self._default,
            "default": self._default,
            "dictsort": self._dictsort,
            "first": self._first,
            "float": self._float,
            "indent": self._indent,
            "int": self._int,
            "items": self._items,
            "join": self._join,
            "last": self._last,
            "length": len,
            "list": allowance.items,
            "lower": self._casing(str.lower),
            "map": self._map,
            "max": self._extreme(max),
            "min": self._extreme(min),
            "reject": self._selecting(keep=False, by_attribute=False),
            "rejectattr": self._selecting(keep=False, by_attribute=True),
            "replace": self._replace,
            "reverse": self._reverse,
            "safe": self._safe,
            "select": self._selecting(keep=True, by_attribute=False),
            "selectattr": self._selecting(keep=True, by_attribute=True),
            "sort": self._sort,
            "string": self._text,
            "sum": self._sum,
            "title": self._title,
            "tojson": self._tojson,
            "trim": lambda value, chars=None: values.strip(str.strip, self._text(value), chars),
            "unique": self._unique,
        }

    # Of texts

    def _casing(self, change: Callable[[str], str]) -> Callable[[Any], str]:
        return lambda value: self._values.change_case(change, self._text(value))

    def _safe(self, value: Any) -> SafeText:
        text = self._text(value)
        self._spend(ELEMENT_COST + size_of(text))
        return SafeText(text)

    def _title(self, value: Any) -> str:
        text = self._text(value)
        self._spend((ELEMENT_COST + 12) * len(text))
        return "".join(part[0].upper() + part[1:].lower() for part in _WORD_ENDS.split(text) if part)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text = self._text
        return self._values.replace(text(value), text(old), text(new), -1 if count is None else count)

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        text = self._text(value)
        blanks = width if isinstance(width, int) else len(width)
        if blanks > MAX_WIDTH:
            raise RefusedError(f"indent() takes at most {MAX_WIDTH} blanks")
        indention = " " * width if isinstance(width, int) else width
        self._spend(10 * len(text))
        self._spend(2 * size_of(text) + lines_in(text) * (2 * ELEMENT_COST + 4 * max(blanks, 0)))
        lines = (text + "\n").splitlines()
        if blank:
            shifted = ("\n" + indention).join(lines)
        else:
            shifted = "\n".join([lines[0], *(indention + line if line else line for line in lines[1:])])
        return indention + shifted if first else shifted

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Plain JSON, as transformers gives templates; jinja2's own filter escapes HTML."""
        blanks = indent if isinstance(indent, int) else size_of(indent or "")
        if blanks > _MAX_INDENT or sum(map(size_of, separators or ())) > _MAX_INDENT:
            raise RefusedError(f"tojson() takes at most {_MAX_INDENT} blanks or separating characters")
        self._allowance.writing(value, max(blanks, 0))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    # Of numbers

    def _int(self, value: Any, default: Any = 0, base: int = 10) -> Any:
        try:
            return int(self._digits(value), base) if isinstance(value, str) else int(value)
        except (TypeError, ValueError):
            try:
                return int(float(value))
            except (TypeError, ValueError, OverflowError):
                return default

    def _float(self, value: Any, default: Any = 0.0) -> Any:
        try:
            return float(self._digits(value))
        except (TypeError, ValueError):
            return default

    def _digits(self, value: Any) -> Any:
        if isinstance(value, str) and len(value) > _MAX_DIGITS:
            raise LimitError(f"a number of more than {_MAX_DIGITS} digits")
        return value

    def _abs(self, value: Any) -> Any:
        self._allowance.number(value)
        return abs(value)

    def _sum(self, values: Any, attribute: Any = None, start: Any = 0) -> Any:
        total = start
        for value in self._attributes(values, attribute):
            total = self._values.operate("+", lambda a, b: a + b, self._number(total), self._number(value))
        return total

    def _number(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple):
            raise RefusedError("sum() takes numbers")
        return value

    # Of sequences

    def _first(self, values: Any) -> Any:
        return next(iter(values), self._undefined("No first item, sequence was empty."))

    def _last(self, values: Any) -> Any:
        return next(iter(reversed(values)), self._undefined("No last item, sequence was empty."))

    def _items(self, value: Any) -> Iterator[tuple[Any, Any]]:
        if not isinstance(value, Undefined | Mapping):
            raise TypeError("Can only get item pairs from a mapping.")
        return iter(() if isinstance(value, Undefined) else value.items())

    def _reverse(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._values.slice(value, None, None, -1)
        return iter(self._allowance.items(value)[::-1])

    def _join(self, values: Any, d: Any = "", attribute: Any = None) -> str:
        return self._values.join(self._text(d), self._allowance.texts(self._attributes(values, attribute)))

    def _default(self, value: Any, default_value: Any = "", boolean: bool = False) -> Any:
        return default_value if isinstance(value, Undefined) or (boolean and not value) else value

    def _map(self, values: Any, name: str | None = None, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if not values:  # none, too
            return iter(())
        if name is None:
            return iter(self._attributes(values, kwargs["attribute"], kwargs.get("default")))
        function = self._named(self.table, name, "filter")
        return iter([self._step(function, value, *args, **kwargs) for value in self._allowance.items(values)])

    def _selecting(self, *, keep: bool, by_attribute: bool) -> Callable[..., Iterator[Any]]:
        def selected(values: Any, *args: Any) -> Iterator[Any]:
            if not values:  # none, too
                return iter(())
            attribute, args = (args[0], args[1:]) if by_attribute else (None, args)
            test = self._named(self._tests, args[0], "test") if args else bool
            elements = self._allowance.items(values)
            keys = self._attributes(elements, attribute)
            chosen = [bool(self._step(test, key, *args[1:])) is keep for key in keys]
            # An iterator, as jinja2 gives: templates that ask for its truth or length must see the same.
            return (element for element, fits in zip(elements, chosen, strict=True) if fits)

        return selected

    def _named(self, table: Mapping[str, Callable[..., Any]], name: Any, what: str) -> Callable[..., Any]:
        if not isinstance(name, str) or name not in table:
            raise RefusedError(f"{str(name)[:80]!r} is not among the {what}s that chat templates may use")
        return table[name]

    def _step(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._spend(STEP_COST)
        return function(*args, **kwargs)

    def _attributes(self, values: Any, attribute: Any, default: Any = None) -> list[Any]:
        """The elements, or what a path such as "function.name" leads to from each, by a default where it breaks off."""
        elements = self._allowance.items(values)
        if attribute is None:
            return elements
        path = attribute.split(".") if isinstance(attribute, str) else [attribute]
        self._spend(ELEMENT_COST * len(path))
        for part in path:
            key = int(self._digits(part)) if isinstance(part, str) and part.isdigit() else part
            elements = [self._step(self._item, element, key) for element in elements]
            if default is not None:
                elements = [default if isinstance(element, Undefined) else element for element in elements]
        return elements

    # Orders

    def _keys(self, values: Any, case_sensitive: bool, attribute: Any, what: str) -> tuple[list[Any], list[Any]]:
        """The elements and what they are ordered by."""
        elements = self._allowance.items(values)
        keys = self._attributes(elements, attribute)
        longest = 0
        for index, key in enumerate(keys):
            self._allowance.scalar(key, what)
            self._allowance.number(key)
            if isinstance(key, str):
                longest = max(longest, len(key))
                keys[index] = key if case_sensitive else self._values.change_case(str.lower, key)
        self._spend(len(keys) * len(keys).bit_length() * (1 + longest // 16))
        return elements, keys

    def _sort(
        self, value: Any, reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
    ) -> list[Any]:
        elements, keys = self._keys(value, case_sensitive, attribute, "sort()")
        return [elements[index] for index in sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)]

    def _dictsort(
        self, value: Mapping[Any, Any], case_sensitive: bool = False, by: str = "key", reverse: bool = False
    ) -> list[Any]:
        if by not in ("key", "value"):
            raise RefusedError('You can only sort by either "key" or "value"')
        return self._sort(value.items(), reverse, case_sensitive, 0 if by == "key" else 1)

    def _extreme(self, choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(value: Any, case_sensitive: bool = False, attribute: Any = None) -> Any:
            elements, keys = self._keys(value, case_sensitive, attribute, f"{choose.__name__}()")
            if not keys:
                return self._undefined("No aggregated item, sequence was empty.")
            return elements[choose(range(len(keys)), key=keys.__getitem__)]

        return chosen

    def _unique(self, value: Any, case_sensitive: bool = False, attribute: Any = None) -> Iterator[Any]:
        elements, keys = self._keys(value, case_sensitive, attribute, "unique()")
        self._spend(2 * ELEMENT_COST * len(keys))
        first: dict[Any, Any] = {}
        for key, element in zip(keys, elements, strict=True):
            first.setdefault(key, element)
        return iter(first.values())


def template_tests(allowance: Allowance, values: Values) -> dict[str, Any]:
    """The tests by name."""

    def comparing(name: str) -> Callable[[Any, Any], Any]:
        return lambda left, right: values.compare(left, name, right)

    def divides(value: Any, num: Any) -> bool:
        if not isinstance(value, int | float) or not isinstance(num, int | float):
            raise TypeError("only numbers can be divided")
        allowance.number(value)
        allowance.number(num)
        return value % num == 0

    comparisons = {
        "eq": ("eq", "equalto", "=="),
        "ne": ("ne", "!="),
        "lt": ("lt", "lessthan", "<"),
        "lteq": ("le", "<="),
        "gt": ("gt", "greaterthan", ">"),
        "gteq": ("ge", ">="),
        "in": ("in",),
    }
    return {
        **{name: tests.TESTS[name] for name in _PLAIN_TESTS},
        **{name: comparing(by) for by, names in comparisons.items() for name in names},
        "divisibleby": divides,
        "even": lambda value: divides(value, 2),
        "odd": lambda value: not divides(value, 2),
    }
