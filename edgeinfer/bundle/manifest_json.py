"""Reading a manifest's JSON strictly: into dataclasses, with no field unknown, missing or mistyped.

How a type is read is worked out once. A manifest lists hundreds of tensors of one type, so that taking types apart and
naming places for errors that do not happen took most of opening a bundle.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from edgeinfer.errors import BundleError

DAMAGED = "The bundle is damaged or was edited by hand; export or download it again."

Reader = Callable[[Any], Any]


def wrong(what: str) -> BundleError:
    return BundleError(f"Manifest: {what}.", DAMAGED)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise wrong(what)


def read(kind: Any, value: Any, where: str) -> Any:
    """Turns parsed JSON into `kind`, a dataclass or a type built of JSON's types."""
    try:
        return _reader(kind)(value)
    except _MisfitError as misfit:
        raise wrong(f"{where}{''.join(reversed(misfit.places))} {misfit}") from misfit


class _MisfitError(Exception):
    """A value of a wrong type; `places` say where it is, the innermost first: "[3]", ".tensors"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.places: list[str] = []


@functools.cache
def _reader(kind: Any) -> Reader:
    """A function that reads `kind`, a dataclass or a type of JSON's."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin in (typing.Union, types.UnionType):
        return _union_reader(args)
    if origin is tuple:
        return functools.partial(_read_tuple, _reader(args[0]))
    if origin is dict:
        return functools.partial(_read_dict, _reader(args[1]))
    if origin is Literal:
        return functools.partial(_read_literal, args)
    return _read_float if kind is float else functools.partial(_read_plain, kind)


def _union_reader(args: tuple[Any, ...]) -> Reader:
    candidates = tuple(each for each in args if each is not type(None))
    optional = len(candidates) < len(args)
    only = _reader(candidates[0]) if len(candidates) == 1 else None

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        if only is not None:
            return only(value)
        if not isinstance(value, candidates):
            raise _MisfitError("has the wrong type")
        return value

    return read


def _placed(item: Reader, values: Iterable[tuple[Any, Any]], place: str) -> Iterator[tuple[Any, Any]]:
    """Reads every value, and notes the place of one that does not fit."""
    for key, value in values:
        try:
            yield key, item(value)
        except _MisfitError as misfit:
            misfit.places.append(place % key)
            raise


def _read_tuple(item: Reader, value: Any) -> Any:
    if not isinstance(value, list):
        raise _MisfitError("must be a list")
    return tuple(each for _, each in _placed(item, enumerate(value), "[%d]"))


def _read_dict(item: Reader, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _MisfitError("must be an object")
    return dict(_placed(item, value.items(), ".%s"))


def _read_literal(allowed: tuple[Any, ...], value: Any) -> Any:
    if value not in allowed:
        raise _MisfitError(f"must be one of {', '.join(map(str, allowed))}")
    return value


def _read_float(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: an integer may be too large for a float. NaN compares as false.
    if not number or not abs(value) <= sys.float_info.max:
        raise _MisfitError("must be a finite number")
    return float(value)


def _read_plain(kind: type, value: Any) -> Any:
    # JSON's types come as exactly these; true is no integer.
    if type(value) is not kind:
        raise _MisfitError(f"must be a {kind.__name__}")
    return value


def _dataclass_reader(kind: Any) -> Reader:
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    readers = {field.name: _reader(hints[field.name]) for field in dataclasses.fields(kind)}
    required = [f.name for f in dataclasses.fields(kind) if f.default is missing and f.default_factory is missing]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _MisfitError("must be an object")
        for name in required:
            if name not in value:
                raise _MisfitError(f"lacks {name!r}")
        found: dict[str, Any] = {}
        for name, each in value.items():
            if name not in readers:
                raise _MisfitError(f"has an unknown field {name!r}")
            try:
                found[name] = readers[name](each)
            except _MisfitError as misfit:
                misfit.places.append(f".{name}")
                raise
        return kind(**found)

    return read
