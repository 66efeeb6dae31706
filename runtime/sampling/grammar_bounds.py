"""Numbers, bounds and counts of JSON Schemas as the grammar engine reads them without error."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, NoReturn, TypeGuard

from edgeinfer.errors import GrammarError
from edgeinfer.runtime.sampling.grammar_numbers import NEXT_TO_ZERO

_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_OUTERMOST = 10**18  # bounds of 64-bit integers are taken for this, up to which the engine writes ranges
_WIDEST = 2**63 + 192  # the bound of such integers, also as JavaScript writes it
_DIGITS, _PLACES = 15, 22
_SPACING = 128  # at most, between doubles below 10**18
# Integers without a bound are kept within this, which every reader of JSON takes: small models do not stop writing
# digits. Not where a schema speaks of larger ones.
_MOST_INTEGER = 10**15
_LARGER = re.compile(r"\d{16}|\d[eE]\+?\d")
EXACT = 2**53  # up to which the engine's numbers have all integers


def refuse(what: str, hint: str) -> NoReturn:
    """Raises the error of a schema that cannot be followed; `what` begins with the keyword at fault and a colon."""
    raise GrammarError(f"json_schema cannot be used: {what}.", hint)


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def names_larger(text: str) -> bool:
    """Whether a schema speaks of integers that `bound_integers` would leave out."""
    return _LARGER.search(text) is not None


def mend_numbers(schema: dict[str, Any]) -> None:
    """Writes numbers as the engine reads them, bounds not wider than they are."""
    for keyword in _COUNTS:
        value = schema.get(keyword)
        if isinstance(value, float) and value.is_integer():
            schema[keyword] = int(value)
    for (including, excluding), inward in ((LOWER, 1), (UPPER, -1)):
        value, without = schema.get(including), schema.get(excluding)
        bounds = [_bound(including, value, inward)]
        bounds.append(_bound(excluding, value if without is True else without, inward, excluded=True))
        known = [bound for bound in bounds if bound is not None]
        if known:
            schema.pop(excluding, None)
            bound = max(known, key=lambda bound: bound * inward)
            schema[including] = int(bound) if bound == int(bound) else float(bound)


def add_short_decimals(schema: dict[str, Any]) -> None:
    """Allows decimals with which a bound begins: the engine's range up to 1.55 has 1.50, but not 1.5."""
    if "number" not in schema.get("type", "number") or "const" in schema or "enum" in schema:
        return
    for keyword, far in (("maximum", 1), ("minimum", -1)):
        bound = schema.get(keyword)
        if not isinstance(bound, float) or bound * far <= 0 or not isinstance(schema.get("allOf", []), list):
            continue
        whole, _, decimals = format(Decimal(repr(bound)), "f").partition(".")
        beginnings = [
            float(f"{whole}.{decimals[:size]}") for size in range(1, len(decimals)) if decimals[size - 1] != "0"
        ]
        if beginnings:
            del schema[keyword]
            schema.setdefault("allOf", []).append({"anyOf": [{keyword: bound}, {"enum": beginnings}]})


def bound_integers(schema: dict[str, Any]) -> None:
    """Bounds integers on the sides where nothing does."""
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "integer" not in kinds or "number" in kinds or "const" in schema or "enum" in schema:
        return
    schema.setdefault("minimum", -_MOST_INTEGER)
    schema.setdefault("maximum", _MOST_INTEGER)


def _bound(keyword: str, value: Any, inward: int, *, excluded: bool = False) -> Decimal | None:
    """A bound as the engine reads it without error, no further out; None where there is none.

    It reads decimals of up to `_DIGITS` digits, and integers that a double has; its ranges without their ends are not
    always without them, so that one that is excluded becomes the next one.
    """
    if not is_number(value):
        return None
    outer = -_OUTERMOST * inward
    if value * inward >= _OUTERMOST or abs(value) > _WIDEST:
        refuse(f"{keyword}: {value} is beyond 10**18", "Leave it out, or take a smaller number.")
    if value * inward < outer * inward:
        return Decimal(outer)
    exact = Decimal(str(value))
    if not exact:
        return exact if not excluded else NEXT_TO_ZERO * inward
    step = Decimal(_SPACING)
    if abs(exact) < EXACT:
        step = Decimal((0, (1,), min(0, max(exact.adjusted() - _DIGITS + 1, -_PLACES))))
    near = (exact / step).to_integral_value(ROUND_CEILING if inward > 0 else ROUND_FLOOR) * step
    return near + step * inward if excluded and near == exact else near
