"""Heads that are added to a bundle: whole or not at all, and refused when they were changed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from edgeinfer.bundle import opening, writing
from edgeinfer.bundle.additions import add_heads, read_heads
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import BundleError, StorageError
from tests.heads import random_heads

FILE = "heads/prompt.safetensors"


def add(bundle: Bundle, version: int) -> Bundle:
    heads = random_heads(bundle, "prompt")
    return add_heads(bundle.path, dataclasses.replace(heads, notes={"made": str(version)}))


def read(bundle: Bundle) -> int:
    """The version that is there, and 0 where none is."""
    heads = read_heads(bundle, "prompt")
    return 0 if heads is None else int(heads.notes["made"])


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(small_bundle, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


def test_what_is_added_can_be_replaced(bundle: Bundle) -> None:
    assert read(bundle) == 0
    for version in (1, 2):
        sealed = add(bundle, version)
        sealed.verify()
        assert read(open_bundle(bundle.path)) == version
        assert sealed.manifest.files.keys() == bundle.manifest.files.keys() | {FILE}
    modes = {path.stat().st_mode & 0o777 for path in bundle.path.rglob("*") if path.is_file()}
    assert len(modes) == 1


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


def test_what_differs_from_its_digest_is_refused(bundle: Bundle) -> None:
    add(bundle, 1)
    path = bundle.path / FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(BundleError, match="does not match its sha256"):
        read(open_bundle(bundle.path))
