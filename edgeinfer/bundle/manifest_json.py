"""Reading a manifest's JSON strictly: into dataclasses, with no field unknown, missing or mistyped."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from typing import Any, Literal

from edgeinfer.errors import BundleError

__all__ = ["DAMAGED", "read", "require"]

DAMAGED = "The bundle is damaged or was edited by hand; export or download it again."


def require(condition: bool, what: str) -> None:
    """Raises BundleError about the manifest unless the condition holds."""
    if not condition:
        raise BundleError(f"Manifest: {what}.", DAMAGED)


def read(kind: Any, value: Any, where: str) -> Any:
    """Turns parsed JSON into `kind`, a dataclass or a type built of JSON's types."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        candidates = [a for a in args if a is not type(None)]
        if len(candidates) == 1:
            return read(candidates[0], value, where)
        require(isinstance(value, tuple(candidates)), f"{where} has the wrong type")
        return value
    if origin is tuple:
        require(isinstance(value, list), f"{where} must be a list")
        return tuple(read(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        require(isinstance(value, dict), f"{where} must be an object")
        return {k: read(args[1], v, f"{where}.{k}") for k, v in value.items()}
    if origin is Literal:
        require(value in args, f"{where} must be one of {', '.join(map(str, args))}")
        return value
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared, not converted: an integer may be too large for a float. NaN compares as false.
        require(number and abs(value) <= sys.float_info.max, f"{where} must be a finite number")
        return float(value)
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    require(fits, f"{where} must be a {kind.__name__}")
    return value


# A manifest has hundreds of tensors of one type, and evaluating its annotations each time took most of opening.
_hints = functools.cache(typing.get_type_hints)


def _read_dataclass(kind: Any, value: Any, where: str) -> Any:
    require(isinstance(value, dict), f"{where} must be an object")
    hints = _hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for name in value:
        require(name in fields, f"{where} has an unknown field {name!r}")
    for name, f in fields.items():
        optional = f.default is not dataclasses.MISSING or f.default_factory is not dataclasses.MISSING
        require(optional or name in value, f"{where} lacks {name!r}")
    return kind(**{name: read(hints[name], v, f"{where}.{name}") for name, v in value.items()})
