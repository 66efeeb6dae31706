"""Heads and scales that are added to a bundle: whole or not at all, and refused when they were changed."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from edgeinfer.bundle import Bundle, KVScales, open_bundle, opening, writing
from edgeinfer.bundle.heads import add_heads, read_heads
from edgeinfer.bundle.kv_scales import KV_SCALES, LayerScales, add_kv_scales, read_kv_scales
from edgeinfer.errors import BundleError, StorageError
from tests.heads import random_heads


class Added(NamedTuple):
    """What can be added; `read` tells which version is there, and 0 where none is."""

    file: str
    add: Callable[[Bundle, int], Bundle]
    read: Callable[[Bundle], int]


def add_some_heads(bundle: Bundle, version: int) -> Bundle:
    heads = random_heads(bundle, "prompt")
    return add_heads(bundle.path, dataclasses.replace(heads, notes={"made": str(version)}))


def version_of_heads(bundle: Bundle) -> int:
    heads = read_heads(bundle, "prompt")
    return 0 if heads is None else int(heads.notes["made"])


def add_some_scales(bundle: Bundle, version: int) -> Bundle:
    geometry = bundle.manifest.geometry
    ones = np.ones(geometry.num_kv_heads * geometry.head_dim, np.float32)
    layers = (LayerScales(ones, ones),) * geometry.num_layers
    return add_kv_scales(bundle.path, KVScales(dict.fromkeys(("int8", "int4"), layers), tokens=version))


def version_of_scales(bundle: Bundle) -> int:
    scales = read_kv_scales(bundle)
    return 0 if scales is None else scales.tokens


ADDED = {
    "heads": Added("heads/prompt.safetensors", add_some_heads, version_of_heads),
    "scales": Added(KV_SCALES, add_some_scales, version_of_scales),
}


@pytest.fixture(params=ADDED)
def added(request: pytest.FixtureRequest) -> Added:
    return ADDED[request.param]


@pytest.fixture
def bundle(small_bundle: Path, tmp_path: Path) -> Bundle:
    shutil.copytree(small_bundle, tmp_path / "bundle")
    return open_bundle(tmp_path / "bundle")


def test_what_is_added_can_be_replaced(bundle: Bundle, added: Added) -> None:
    assert added.read(bundle) == 0
    for version in (1, 2):
        sealed = added.add(bundle, version)
        sealed.verify()
        assert added.read(open_bundle(bundle.path)) == version
        assert sealed.manifest.files.keys() == bundle.manifest.files.keys() | {added.file}
    modes = {path.stat().st_mode & 0o777 for path in bundle.path.rglob("*") if path.is_file()}
    assert len(modes) == 1


@pytest.mark.parametrize("before", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_leaves_a_bundle_that_opens(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, added: Added, before: bool, writes: int
) -> None:
    if before:
        added.add(bundle, 1)
    write, done = writing.write_file, iter(range(writes))

    def scarce(path: Path, data: bytes) -> None:
        if next(done, None) is None:
            raise StorageError("The disk is full.")
        write(path, data)

    monkeypatch.setattr(opening, "write_file", scarce)
    enough = writes >= 2 + before
    if enough:
        added.add(bundle, 2)
    else:
        with pytest.raises(StorageError):
            added.add(bundle, 2)
    left = open_bundle(bundle.path)
    left.verify()
    # What was there may have gone, as one that is replaced is taken out first; half of the new one is never there.
    assert added.read(left) in ({2} if enough else {0, int(before)})


def test_what_differs_from_its_digest_is_refused(bundle: Bundle, added: Added) -> None:
    added.add(bundle, 1)
    path = bundle.path / added.file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(BundleError, match="does not match its sha256"):
        added.read(open_bundle(bundle.path))
