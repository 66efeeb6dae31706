"""Reading JSON strictly: into dataclasses, with no field unknown, missing or mistyped. How a type is read is worked out
once. A manifest lists hundreds of tensors of one type, so that taking types apart and naming places for errors that do
not happen took most of opening a bundle."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar

from edgeinfer.core.errors import BundleError

DAMAGED = "The bundle is damaged or was edited by hand; export or download it again."

Reader = Callable[[Any], Any]
T = TypeVar("T")


def wrong(what: str) -> BundleError:
    return BundleError(f"Manifest: {what}.", DAMAGED)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise wrong(what)


def read(kind: Any, value: Any, where: str) -> Any:
    """Turns parsed JSON of a manifest into `kind`, a dataclass or a type built of JSON's types."""
    try:
        return _reader(kind, whole=False)(value)
    except MisfitError as misfit:
        raise wrong(f"{where}{misfit.place} {misfit.args[0]}") from misfit


def read_whole(kind: type[T], value: object) -> T:
    """Turns parsed JSON into a dataclass of which every field is written; MisfitError where it is another."""
    found: T = _reader(typing.cast(Any, kind), whole=True)(value)
    return found


class MisfitError(ValueError):
    """A value of a wrong type; `places` say where it is, the innermost first: "[3]", ".tensors"."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.places: list[str] = []

    @property
    def place(self) -> str:
        return "".join(reversed(self.places))

    def __str__(self) -> str:
        return f"{self.place} {self.args[0]}".lstrip(". ")


@functools.cache
def _reader(kind: Any, whole: bool) -> Reader:
    """A function that reads `kind`, a dataclass or a type of JSON's; `whole` wants fields that have defaults too."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind, whole)
    if origin in (typing.Union, types.UnionType):
        return _union_reader(args, whole)
    if origin is tuple and args[-1] is not Ellipsis:
        return functools.partial(_read_row, [_reader(each, whole) for each in args])
    if origin is tuple:
        return functools.partial(_read_tuple, _reader(args[0], whole))
    if origin in (dict, Mapping):
        return functools.partial(_read_dict, _reader(args[1], whole))
    if origin is Literal:
        return functools.partial(_read_literal, args)
    return _read_float if kind is float else functools.partial(_read_plain, kind)


def _union_reader(args: tuple[Any, ...], whole: bool) -> Reader:
    candidates = tuple(each for each in args if each is not type(None))
    optional = len(candidates) < len(args)
    only = _reader(candidates[0], whole) if len(candidates) == 1 else None

    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        if only is not None:
            return only(value)
        if not isinstance(value, candidates):
            raise MisfitError("has the wrong type")
        return value

    return read


def _placed(item: Reader, values: Iterable[tuple[Any, Any]], place: str) -> Iterator[tuple[Any, Any]]:
    """Reads every value, and notes the place of one that does not fit."""
    for key, value in values:
        try:
            yield key, item(value)
        except MisfitError as misfit:
            misfit.places.append(place % key)
            raise


def _read_tuple(item: Reader, value: Any) -> Any:
    if not isinstance(value, list):
        raise MisfitError("must be a list")
    return tuple(each for _, each in _placed(item, enumerate(value), "[%d]"))


def _read_row(items: list[Reader], value: Any) -> Any:
    if not isinstance(value, list) or len(value) != len(items):
        raise MisfitError(f"must be a list of {len(items)}")
    return tuple(item(each) for item, each in zip(items, value, strict=True))


def _read_dict(item: Reader, value: Any) -> Any:
    if not isinstance(value, dict):
        raise MisfitError("must be an object")
    return dict(_placed(item, value.items(), ".%s"))


def _read_literal(allowed: tuple[Any, ...], value: Any) -> Any:
    if value not in allowed:
        raise MisfitError(f"must be one of {', '.join(map(str, allowed))}")
    return value


def _read_float(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # Compared, not converted: an integer may be too large for a float. NaN compares as false.
    if not number or not abs(value) <= sys.float_info.max:
        raise MisfitError("must be a finite number")
    return float(value)


def _read_plain(kind: type, value: Any) -> Any:
    # JSON's types come as exactly these; true is no integer.
    if type(value) is not kind:
        raise MisfitError(f"must be a {kind.__name__}")
    return value


def _dataclass_reader(kind: Any, whole: bool) -> Reader:
    hints, missing, fields = typing.get_type_hints(kind), dataclasses.MISSING, dataclasses.fields(kind)
    readers = {field.name: _reader(hints[field.name], whole) for field in fields}
    required = [f.name for f in fields if whole or (f.default is missing and f.default_factory is missing)]

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MisfitError("must be an object")
        for name in required:
            if name not in value:
                raise MisfitError(f"lacks {name!r}")
        found: dict[str, Any] = {}
        for name, each in value.items():
            if name not in readers:
                raise MisfitError(f"has an unknown field {name!r}")
            try:
                found[name] = readers[name](each)
            except MisfitError as misfit:
                misfit.places.append(f".{name}")
                raise
        return kind(**found)

    return read
