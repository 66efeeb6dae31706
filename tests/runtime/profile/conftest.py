"""A profile of this user's in an empty cache, and what tests keep in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.runtime.profile import device_profile as module
from edgeinfer.runtime.profile.costs import DraftCosts, PassCosts
from edgeinfer.runtime.profile.device_profile import DeviceProfile, stamped

COSTS = stamped(PassCosts(((1, 2.0), (2, 2.5)), 2), DraftCosts({"copy": 0.01}, 0.05))
TABLES: dict[str, NDArray[Any]] = {
    "counts": np.arange(12, dtype=np.uint16).reshape(3, 4),
    "file": np.array([0.5, -1.0], np.float32),
    "copy.seen": np.zeros((0, 3)),
    "mask": np.array([True, False]),
    "one": np.array(7),
}
FOUR = np.arange(4, dtype=np.int32)


def assert_same(found: dict[str, NDArray[Any]] | None, wanted: dict[str, NDArray[Any]]) -> None:
    assert found is not None and found.keys() == wanted.keys()
    for key, array in wanted.items():
        assert (found[key].dtype, found[key].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[key], array, equal_nan=array.dtype.kind == "f")
        assert found[key].flags.writeable


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a profile belongs, in an empty cache of this user."""
    monkeypatch.setattr(module, "user_cache", lambda: tmp_path)
    return tmp_path / "edgeinfer" / "speculation" / ("0" * 64)


@pytest.fixture
def kept(folder: Path) -> Path:
    """A profile with something in it."""
    profile = DeviceProfile.open(folder)
    profile.save_costs(COSTS)
    profile.save_arrays("ngram", TABLES)
    return folder


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "edgeinfer"):
        yield caplog
