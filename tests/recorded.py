"""Figures that tests found before, in `tests/recorded/`: a change that moves one shows, a legal one too.

Where a result has no second way to be computed, it is compared with what it was when somebody looked it through. What
was changed on purpose is recorded again with `EDGEINFER_TEST_RECORD=1 pytest -n 0 FILE`, and read in the diff.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.kernel import require_kernel

FOLDER = Path(__file__).with_name("recorded")
# Floats are kept with so many digits.
_DIGITS = 6


def check_recorded(
    name: str, found: object, *, rel: float = 2e-4, least: float = 1e-9, without: Collection[str] = ()
) -> None:
    """Compares a result with the record of that name; floats may differ by `rel`, and below `least` by all. Values of
    the names `without` are others each time, as times and random ids are."""
    path, plain = FOLDER / f"{name}.json", _plain(found, without)
    if os.environ.get("EDGEINFER_TEST_RECORD"):
        require_kernel()  # with one that is refused these would be the figures of the portable operators
        path.parent.mkdir(exist_ok=True)
        path.write_text(_written(plain), "utf-8")
    differences = list(_differences(plain, json.loads(path.read_text("utf-8")), rel, least, ""))
    assert not differences, f"{len(differences)} differences from {path.name}: " + "; ".join(differences[:8])


def sums(values: NDArray[Any]) -> list[float]:
    """Three figures that tell an array from others: means of its values, of their squares, and weighted by place."""
    wide = values.astype(np.float64).ravel()
    return [float(wide.mean()), float(np.square(wide).mean()), float((wide * np.linspace(-1, 1, wide.size)).mean())]


def _plain(value: object, without: Collection[str]) -> Any:
    """What JSON has for a value."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, without)
    if isinstance(value, Mapping):
        return {str(key): _plain(part, without) for key, part in value.items() if key not in without}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist(), without)
    if isinstance(value, list | tuple):
        return [_plain(part, without) for part in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{_DIGITS}g}")
    return value if isinstance(value, str | int | float | None) else str(value)


def _written(plain: Any) -> str:
    """JSON with one line for each thing at the top."""
    if isinstance(plain, dict):
        lines = [f"{json.dumps(key)}: {json.dumps(part, ensure_ascii=False)}" for key, part in plain.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    if isinstance(plain, list):
        return "[\n" + ",\n".join(json.dumps(part, ensure_ascii=False) for part in plain) + "\n]\n"
    return json.dumps(plain, ensure_ascii=False) + "\n"


def _differences(found: Any, recorded: Any, rel: float, least: float, place: str) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(recorded, dict) and list(found) == list(recorded):
        for key in found:
            yield from _differences(found[key], recorded[key], rel, least, f"{place}.{key}")
    elif isinstance(found, list) and isinstance(recorded, list) and len(found) == len(recorded):
        for number, (new, old) in enumerate(zip(found, recorded, strict=True)):
            yield from _differences(new, old, rel, least, f"{place}[{number}]")
    elif isinstance(found, float) and isinstance(recorded, float):
        if not math.isclose(found, recorded, rel_tol=rel, abs_tol=least) and found != recorded:
            yield f"{place} is {found}, was {recorded}"
    elif type(found) is not type(recorded) or found != recorded:
        yield f"{place} is {found!r}, was {recorded!r}"
