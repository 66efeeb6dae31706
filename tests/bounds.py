"""What a description accepts and says: values one step from sound ones, alone and in pairs, and its properties."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import reprlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from edgeinfer.core.errors import EdgeInferError


def near(value: Any) -> list[Any]:
    """Neighbouring values of the same kind, and those at which a kind changes its meaning."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        found: list[Any] = [-1, 0, 1, value - 1, value + 1, 2 * value]
    elif isinstance(value, float):
        found = [-value, 0.0, 1.0, value / 2, 2 * value, float("nan"), float("inf")]
    elif isinstance(value, str):
        found = ["", "odd"]
    elif isinstance(value, tuple):
        found = [(), value[1:], value[::-1], value + value]
    elif value is None:
        found = [0, 1]
    else:
        found = [None]
    return list(dict.fromkeys(each for each in found if each != value))


def bounds(sound: Any) -> dict[str, Any]:
    """Which changes to a valid instance of a frozen dataclass are refused, and with which words.

    Returns:
        By `field=value` what is said of it; by fields and what is said, how many pairs of values are refused together
        though each is accepted, or the other way round. What changes the kind of a value in a way that nothing looks
        for is left out.
    """
    fields = [field.name for field in dataclasses.fields(sound) if field.init]
    beside = {name: near(getattr(sound, name)) for name in fields}
    alone = {name: [refusal(sound, {name: value}) for value in beside[name]] for name in fields}
    said_alone = {
        f"{name}={reprlib.repr(value)}": said
        for name in fields
        for value, said in zip(beside[name], alone[name], strict=True)
        if said is not None
    }
    pairs: Counter[str] = Counter()
    for one, other in itertools.combinations(fields, 2):
        for first, second in itertools.product(*(range(len(beside[name]))[-2:] for name in (one, other))):
            said = refusal(sound, {one: beside[one][first], other: beside[other][second]})
            # A further field that has limits of its own alone changes no record of pairs.
            if (said is None) != (alone[one][first] is None and alone[other][second] is None):
                pairs[f"{one}, {other}: {said or 'accepted'}"] += 1
    return {"alone": said_alone, "pairs": dict(sorted(pairs.items()))}


def refusal(sound: Any, changes: dict[str, Any]) -> str | None:
    """What is said of an instance with other fields; None where nothing is."""
    try:
        dataclasses.replace(sound, **changes)
    except EdgeInferError as error:
        return str(error.message)
    except (TypeError, AttributeError, ValueError, OverflowError, LookupError, ZeroDivisionError):
        return None
    return None


def facts(sound: Any) -> dict[str, Any]:
    """What the properties of an instance say."""
    return {name: told(getattr(sound, name)) for name in sorted(set(_properties(type(sound))))}


def told(value: Any) -> Any:
    """A value as a record has it: of dataclasses what is not usual, so that a further field changes no record."""
    if isinstance(value, tuple | list):
        return [told(each) for each in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = [(field.name, field.default, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return {name: told(own) for name, usual, own in fields if own != usual}


def _properties(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, property | functools.cached_property) and not name.startswith("_"):
                yield name
