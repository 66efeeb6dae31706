"""Heads in a bundle: written and read bit by bit, and refused where anything is wrong."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.bundle import opening, writing
from edgeinfer.bundle.additions import HEADS, Heads, add_heads, copy_with_heads, has_heads, heads_bytes, read_heads
from edgeinfer.bundle.array_file import decode_arrays, encode_arrays
from edgeinfer.bundle.manifest import FileEntry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.core.errors import BundleError, StorageError, UsageError
from tests.heads import random_heads


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(small_bundle, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


TYPES = ("F32", "F16", "I32")


def header_of(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def framed(header: Any, rest: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


@pytest.mark.parametrize("kind", HEADS)
def test_heads_come_back_bit_by_bit(bundle: Bundle, kind: str) -> None:
    assert not has_heads(bundle, kind) and read_heads(bundle, kind) is None and heads_bytes(bundle, kind) == 0
    first, second = random_heads(bundle, kind), random_heads(bundle, kind, seed=1)
    for heads in (first, second):
        added = add_heads(bundle.path, heads)
        added.verify()
        found = read_heads(added, kind)
        assert found is not None and (found.kind, found.notes) == (kind, {"made": "at random"})
        assert found.arrays.keys() == heads.arrays.keys()
        for name, array in heads.arrays.items():
            assert found.arrays[name].dtype == array.dtype and np.array_equal(found.arrays[name], array)
        wide = sum(4 * array.size for array in heads.arrays.values())
        assert heads_bytes(added, kind) >= wide
    assert open_bundle(bundle.path).manifest.geometry == bundle.manifest.geometry


def test_files_are_safetensors(bundle: Bundle) -> None:
    """Whoever has the library can look into them, and its files are read."""
    numpy_io = pytest.importorskip("safetensors.numpy")
    heads = random_heads(bundle, "medusa")
    loaded = numpy_io.load(heads.to_bytes())
    assert loaded.keys() == heads.arrays.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in heads.arrays.items())
    arrays, notes = decode_arrays(numpy_io.save(dict(heads.arrays), {"a": "b"}), TYPES)
    assert notes == {"a": "b"} and all(np.array_equal(arrays[name], array) for name, array in heads.arrays.items())


BROKEN: dict[str, Callable[[dict[str, Any], bytes], bytes]] = {
    "nothing": lambda header, rest: b"",
    "no header": lambda header, rest: b"\0" * 64,
    "a header longer than the file": lambda header, rest: (1 << 40).to_bytes(8, "little") + rest,
    "no JSON": lambda header, rest: framed(b"{]", rest),
    "deep JSON": lambda header, rest: framed(b"[" * 100_000, rest),
    "not an object": lambda header, rest: framed([1], rest),
    "an unknown type": lambda header, rest: framed(header | {"weight": header["weight"] | {"dtype": "I64"}}, rest),
    "no type": lambda header, rest: framed(header | {"weight": header["weight"] | {"dtype": [1]}}, rest),
    "an unknown field": lambda header, rest: framed(header | {"weight": header["weight"] | {"more": 1}}, rest),
    "no place": lambda header, rest: framed(header | {"weight": {"dtype": "F16", "shape": [2, 64]}}, rest),
    "an entry that is none": lambda header, rest: framed(header | {"weight": 7}, rest),
    "a negative shape": lambda header, rest: framed(header | {"weight": header["weight"] | {"shape": [-2, -64]}}, rest),
    "a true shape": lambda header, rest: framed(header | {"weight": header["weight"] | {"shape": [True, 64]}}, rest),
    "another shape": lambda header, rest: framed(header | {"weight": header["weight"] | {"shape": [4, 64]}}, rest),
    "an overlap": lambda header, rest: framed(
        header | {"weight": header["weight"] | {"data_offsets": header["bias"]["data_offsets"]}}, rest
    ),
    "cut off": lambda header, rest: framed(header, rest[:-2]),
    "more than it says": lambda header, rest: framed(header, rest + b"\0\0"),
    "not a number": lambda header, rest: framed(header, np.float16(np.nan).tobytes() + rest[2:]),
    "metadata that is not text": lambda header, rest: framed(
        header | {"__metadata__": header["__metadata__"] | {"a": 1}}, rest
    ),
    "notes that are a list": lambda header, rest: framed(header | {"__metadata__": ["a"]}, rest),
    "another version": lambda header, rest: framed(
        header | {"__metadata__": header["__metadata__"] | {"version": "2"}}, rest
    ),
    "another kind": lambda header, rest: framed(
        header | {"__metadata__": header["__metadata__"] | {"kind": "medusa"}}, rest
    ),
    "one array too many": lambda header, rest: encode_arrays(
        dict(decode_arrays(framed(header, rest), TYPES)[0]) | {"more": np.zeros(1, np.float32)},
        header["__metadata__"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file_is_refused_in_one_line(bundle: Bundle, name: str) -> None:
    """Also where whoever damaged it wrote its digest into the manifest."""
    header, rest = header_of(random_heads(bundle, "routers").to_bytes())
    broken = opening.add_file(bundle, "heads/routers.safetensors", BROKEN[name](header, rest))
    with pytest.raises(BundleError) as caught:
        read_heads(broken, "routers")
    assert "\n" not in caught.value.message and caught.value.hint


def changed(heads: Heads, name: str, array: Any) -> Heads:
    return replace(heads, arrays=dict(heads.arrays) | {name: array})


def test_heads_that_do_not_fit_are_refused(bundle: Bundle) -> None:
    medusa, hydra = random_heads(bundle, "medusa"), random_heads(bundle, "hydra")
    tokens = medusa.arrays["tokens"]
    wrong = [
        changed(medusa, "tokens", tokens + 320),
        changed(medusa, "tokens", tokens - 1),
        changed(medusa, "tokens", np.zeros_like(tokens)),
        changed(medusa, "tokens", tokens.astype(np.float32)),
        changed(medusa, "bias", np.zeros((9, 64), np.float32)),
        changed(medusa, "norm", np.zeros(63, np.float32)),
        changed(medusa, "rows", np.zeros((3, 64), np.float32)),
        changed(hydra, "weight.1", np.zeros((2, 64, 64), np.float32)),
        replace(medusa, arrays={}),
        replace(medusa, kind="eagle"),
        replace(hydra, kind="medusa"),
        changed(random_heads(bundle, "routers"), "bias", np.zeros(1, np.float32)),
    ]
    for heads in wrong:
        with pytest.raises(BundleError):
            add_heads(bundle.path, heads)
    assert not (bundle.path / "heads").exists()


def test_a_copy_with_heads_leaves_the_first_as_it_was(bundle: Bundle, tmp_path: Path) -> None:
    before = (bundle.path / MANIFEST).read_bytes()
    heads = random_heads(bundle, "hydra")
    made = copy_with_heads(bundle.path, tmp_path / "made", heads)
    made.verify()
    assert has_heads(made, "hydra") and (bundle.path / MANIFEST).read_bytes() == before
    with pytest.raises(StorageError, match="exists"):
        copy_with_heads(bundle.path, tmp_path / "made", heads)
    with pytest.raises(BundleError):
        copy_with_heads(bundle.path, tmp_path / "other", replace(heads, kind="medusa"))
    assert not (tmp_path / "other").exists()


def test_a_part_of_a_bundle_is_not_changed_alone(bundle: Bundle) -> None:
    """The outer bundle has its digests."""
    shutil.copytree(bundle.path, bundle.path / "drafter")
    with pytest.raises(UsageError, match="part of the bundle"):
        add_heads(bundle.path / "drafter", random_heads(bundle, "routers"))
    assert not (bundle.path / "drafter" / "heads").exists()


def test_heads_from_outside_are_not_read(bundle: Bundle, tmp_path: Path) -> None:
    data = random_heads(bundle, "routers").to_bytes()
    (tmp_path / "outside").write_bytes(data)
    (bundle.path / "heads").mkdir()
    (bundle.path / "heads" / "routers.safetensors").symlink_to(tmp_path / "outside")
    entry = FileEntry(len(data), "0" * 64)
    manifest = replace(bundle.manifest, files=bundle.manifest.files | {"heads/routers.safetensors": entry})
    (bundle.path / MANIFEST).write_text(manifest.to_json(), "utf-8")
    with pytest.raises(BundleError, match="leaves its directory"):
        open_bundle(bundle.path)


def add(bundle: Bundle, version: int) -> Bundle:
    heads = random_heads(bundle, "routers")
    return add_heads(bundle.path, dataclasses.replace(heads, notes={"made": str(version)}))


def read(bundle: Bundle) -> int:
    """The version that is there, and 0 where none is."""
    heads = read_heads(bundle, "routers")
    return 0 if heads is None else int(heads.notes["made"])


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_leaves_a_bundle_that_opens(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, before: bool, writes: int
) -> None:
    if before:
        add(bundle, 1)
    write, done = writing.write_file, iter(range(writes))

    def scarce(path: Path, data: bytes) -> None:
        if next(done, None) is None:
            raise StorageError("The disk is full.")
        write(path, data)

    monkeypatch.setattr(opening, "write_file", scarce)
    enough = writes >= 2 + before
    if enough:
        add(bundle, 2)
    else:
        with pytest.raises(StorageError):
            add(bundle, 2)
    left = open_bundle(bundle.path)
    left.verify()
    # What was there may have gone, as one that is replaced is taken out first; half of the new one is never there.
    assert read(left) in ({2} if enough else {0, int(before)})
