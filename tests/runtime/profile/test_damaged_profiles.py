"""Files of a profile that are damaged, changed or of another version are dropped, and nothing of them is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.runtime.profile import device_profile as module
from edgeinfer.runtime.profile.device_profile import DeviceProfile
from tests.runtime.profile.conftest import COSTS, FOUR, TABLES, assert_same

pytestmark = pytest.mark.usefixtures("log")


def as_npz(*members: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return buffer.getvalue()


def as_npy(array: NDArray[Any], **changes: Any) -> bytes:
    """A .npy file, with a header that may say something else."""
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | changes
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, header)
    return buffer.getvalue() + (pickle.dumps(array.tolist()) if array.dtype.hasobject else array.tobytes())


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self._path),)


DAMAGE = {
    "empty": b"",
    "garbage": b"\x00\xff" * 200,
    "json": b"{}",
    "no zip": as_npy(FOUR),
    "a member that is no array": as_npz(("a.npy", b"garbage")),
    "an empty member": as_npz(("a.npy", b"")),
    "a foreign member": as_npz(("../a.npy", as_npy(FOUR))),
    "another suffix": as_npz(("a.txt", as_npy(FOUR))),
    "compressed": as_npz(("a.npy", as_npy(FOUR)), compression=zipfile.ZIP_DEFLATED),
    "objects": as_npz(("a.npy", as_npy(np.array([None], object)))),
    "texts": as_npz(("a.npy", as_npy(np.array(["abc"])))),
    "other byte order": as_npz(("a.npy", as_npy(FOUR.astype(">i4")))),
    "fortran order": as_npz(("a.npy", as_npy(FOUR.reshape(2, 2), fortran_order=True))),
    "wider numbers": as_npz(("a.npy", as_npy(FOUR, descr="<i8"))),
    "a fifth number": as_npz(("a.npy", as_npy(FOUR, shape=(5,)))),
    "a number less": as_npz(("a.npy", as_npy(FOUR, shape=(3,)))),
    "a shape beyond memory": as_npz(("a.npy", as_npy(FOUR, shape=(1 << 40, 1 << 20)))),
    "a negative shape": as_npz(("a.npy", as_npy(FOUR, shape=(-4,)))),
    "a shape of texts": as_npz(("a.npy", as_npy(FOUR, shape=("4",)))),
    "an odd byte": as_npz(("a.npy", as_npy(FOUR) + b"x")),
    "format 2": as_npz(("a.npy", b"\x93NUMPY\x02\x00" + as_npy(FOUR)[8:])),
    "truths beyond 1": as_npz(("a.npy", as_npy(np.full(4, 7, np.uint8), descr="|b1"))),
    "many members": as_npz(*((f"a{i}.npy", as_npy(FOUR)) for i in range(65))),
}


def test_a_damaged_table_is_dropped_and_made_again(kept: Path, log: pytest.LogCaptureFixture) -> None:
    for damage, data in DAMAGE.items():
        log.clear()
        (kept / "ngram.npz").write_bytes(data)
        profile = DeviceProfile.open(kept)
        assert profile.arrays("ngram") is None, damage
        assert len(log.messages) == 1 and "is discarded" in log.messages[0], damage
        assert not (kept / "ngram.npz").exists(), damage
        assert profile.costs() == COSTS, damage
        profile.save_arrays("ngram", TABLES)
        assert_same(profile.arrays("ngram"), TABLES)


def test_a_pickle_is_never_loaded(kept: Path, tmp_path: Path) -> None:
    trap = np.array([Trap(tmp_path / "sprung")], object)
    np.savez(kept / "ngram.npz", a=trap, allow_pickle=True)
    (kept / "bare.npz").write_bytes(pickle.dumps(trap))
    assert [DeviceProfile.open(kept).arrays(name) for name in ("ngram", "bare")] == [None, None]
    assert not (tmp_path / "sprung").exists()


def test_a_file_cut_anywhere_is_no_crash(kept: Path) -> None:
    for name in ("costs.json", "ngram.npz"):
        whole = (kept / name).read_bytes()
        for length in range(0, len(whole) - 1, max(1, len(whole) // 60)):
            (kept / name).write_bytes(whole[:length])
            profile = DeviceProfile.open(kept)
            assert (profile.costs() if name == "costs.json" else profile.arrays("ngram")) is None


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_changed_byte_is_no_crash(kept: Path, data: st.DataObject) -> None:
    DeviceProfile.open(kept).save_arrays("ngram", TABLES)
    whole = bytearray((kept / "ngram.npz").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (kept / "ngram.npz").write_bytes(whole)
    found = DeviceProfile.open(kept).arrays("ngram")
    assert found is None or all(array.dtype.kind in "biuf" for array in found.values())


def test_damaged_costs_are_dropped(kept: Path, log: pytest.LogCaptureFixture) -> None:
    texts = (
        "",
        "null",
        "[]",
        '{"format": 2}',
        '{"passes": 1',
        "[" * 100_000,
        '{"format": 2, "a": NaN}',
        "1" * 10_000,
        "\ud800",
        " " * 70_000,
    )
    for text in texts:
        log.clear()
        (kept / "costs.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        assert DeviceProfile.open(kept).costs() is None, text[:20]
        assert len(log.messages) == 1 and not (kept / "costs.json").exists(), text[:20]


def test_costs_with_other_fields_are_dropped(kept: Path, log: pytest.LogCaptureFixture) -> None:
    whole = json.loads((kept / "costs.json").read_text("utf-8"))
    less = {name: value for name, value in whole["drafts"].items() if name != "token_ms"}
    for number, data in enumerate((whole | {"more": 1}, whole | {"drafts": less}), 1):
        (kept / "costs.json").write_text(json.dumps(data), "utf-8")
        assert DeviceProfile.open(kept).costs() is None and not (kept / "costs.json").exists()
        assert len(log.messages) == number


def test_costs_of_another_version_are_measured_again_without_a_word(kept: Path, log: pytest.LogCaptureFixture) -> None:
    for data in (COSTS.to_dict(), {"format": 3, "passes": {"more": 1}}):
        (kept / "costs.json").write_text(json.dumps(data), "utf-8")
        profile = DeviceProfile.open(kept)
        assert profile.costs() is None and not log.messages
        profile.save_costs(COSTS)
        assert profile.costs() == COSTS


def test_a_file_larger_than_any_is_not_read(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_ARRAYS_BYTES", 100)
    assert DeviceProfile.open(kept).arrays("ngram") is None
