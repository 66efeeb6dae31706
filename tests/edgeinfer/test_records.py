"""Our `dataclass` behaves like the standard library's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import pytest

from edgeinfer.core import records
from tests.tables import each_row

WAYS: list[dict[str, Any]] = [{}, {"frozen": True}, {"eq": False}, {"frozen": True, "kw_only": True}]
WAYS += [{"frozen": True, "eq": False}, {"frozen": True, "order": True}, {"frozen": True, "slots": True}]
ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((1,), {}),
    ((1, 2.5), {}),
    ((), {"a": 1, "c": [2]}),
    ((), {"b": 3}),
]
ARGUMENTS += [((1,), {"a": 2}), ((1, 2, [3], 4), {}), ((1,), {"z": 0}), ((1,), {"d": 4}), ((-1,), {}), ((), {})]


def _classes(dataclass: Callable[..., Any], way: dict[str, Any]) -> tuple[type, type, type]:
    @dataclass(**way)
    class Base:
        """A base."""

        kind: ClassVar[str] = "kind"
        a: int
        b: float = 1.5
        c: list[int] = dataclasses.field(default_factory=list, compare=False)

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("a is negative")

    @dataclass(**way)
    class Child(Base):
        """With one more, and a method of its own."""

        d: str = dataclasses.field(default="d", repr=False)

        def __repr__(self) -> str:
            return f"<{self.a}>"

    @dataclass(**way)
    class One:
        """A single field."""

        value: object

    return Base, Child, One


def _outcome(action: Callable[..., Any], *args: Any, **given: Any) -> Any:
    try:
        return action(*args, **given)
    except Exception as error:
        return type(error)


@each_row("way", WAYS)
def test_instances_are_made_compared_and_shown_alike(way: dict[str, Any]) -> None:
    for ours, theirs in zip(_classes(records.dataclass, way), _classes(dataclasses.dataclass, way), strict=True):
        for args, given in ARGUMENTS:
            made = [_outcome(cls, *args, **given) for cls in (ours, theirs)]
            if isinstance(made[1], type):
                assert made[0] == made[1], (args, given)
                continue
            mine, other = made
            assert repr(mine) == repr(other) and dataclasses.asdict(mine) == dataclasses.asdict(other)
            for again in (copy.copy, copy.deepcopy, dataclasses.replace):
                assert (again(mine) == mine) == (again(other) == other)
            assert mine != other and (mine == "x") == (other == "x")
            hashed = [_outcome(_hashes_as_its_copy, record) for record in made]
            assert hashed[0] == hashed[1]
            changes = ((setattr, "a", 7), (setattr, "other", 7), (delattr, "a"))
            for change, *what in changes:
                assert _outcome(change, mine, *what) == _outcome(change, other, *what)


def _hashes_as_its_copy(record: object) -> bool:
    return hash(record) == hash(copy.copy(record))


@each_row("way", WAYS)
def test_classes_say_the_same_of_themselves(way: dict[str, Any]) -> None:
    for ours, theirs in zip(_classes(records.dataclass, way), _classes(dataclasses.dataclass, way), strict=True):
        assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(theirs)]
        assert ours.__match_args__ == theirs.__match_args__  # type: ignore[attr-defined]
        said = [inspect.signature(cls).parameters.values() for cls in (ours, theirs)]
        assert [(p.name, p.kind, p.annotation) for p in said[0]] == [(p.name, p.kind, p.annotation) for p in said[1]]
        assert [p.default is p.empty for p in said[0]] == [p.default is p.empty for p in said[1]]


@records.dataclass(frozen=True)
class Kept:
    """One that other processes know too."""

    value: int = 3
    inner: object = None

    @cached_property
    def twice(self) -> int:
        """Cached, and no field."""
        return 2 * self.value


class Written(Kept):
    """With arguments of its own."""

    def __init__(self, text: str) -> None:
        super().__init__(value=int(text))


def test_records_are_pickled_matched_and_inherited() -> None:
    kept = Kept(4)
    assert kept.twice == 8 and kept == Kept(4) and pickle.loads(pickle.dumps(kept)) == kept
    match kept:
        case Kept(value, inner):
            assert (value, inner) == (4, None)
    assert list(inspect.signature(Written).parameters) == ["text"]
    written = Written("5")
    written.note = "not a field"  # type: ignore[attr-defined]
    assert written.value == 5 and written != Kept(5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        written.value = 6  # type: ignore[misc]
    nested = Kept(1, [])
    nested.inner.append(nested)  # type: ignore[attr-defined]
    assert repr(nested) == "Kept(value=1, inner=[...])"
    nan = float("nan")
    assert Kept(nan) == Kept(nan)  # type: ignore[arg-type]  # as tuples that hold the same object are
