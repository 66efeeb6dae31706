"""Session files: what is written comes back, other readers agree on it, and no damage gets past the checks."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import stat
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from edgeinfer.bundle.geometry import KVLayer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.kv_cache.session_file import Origin, is_session, open_session, origin_of, write_session
from edgeinfer.runtime.paging.codecs import ROW_CODECS, ROW_SCALES
from edgeinfer.runtime.paging.layout import PageLayout
from edgeinfer.runtime.paging.pool import PagePool
from tests.speculation import random_bundle
from tests.tables import each_row
from tests.waiting import TIME_LIMIT

MINE = Origin("a" * 64, "b" * 64)
TYPES: dict[str, tuple[type[Any], int]] = {"float32": (np.float32, 6), "int8": (np.uint8, 8), "q8_0": (np.uint8, 34)}


def rows(kv: str, count: int) -> Callable[[int, int], CacheSnapshot]:
    """A cache of two layers whose rows all differ, by its copies."""
    dtype, width = TYPES[kv]
    chance = np.random.default_rng(3)
    arrays = [chance.integers(0, 100, (2, count, width)).astype(dtype) for _ in range(4)]

    def copy(start: int, stop: int) -> CacheSnapshot:
        parts = [array[:, start:stop].copy() for array in arrays]
        return CopiedRows(stop - start, tuple(parts[:2]), tuple(parts[2:]), kv, ROW_SCALES if kv == "int8" else "")

    return copy


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.kv_cache.session_file._PIECE_BYTES", 700)


def joined(pieces: list[CacheSnapshot]) -> CacheSnapshot:
    halves = [piece.keys for piece in pieces], [piece.values for piece in pieces]
    keys, values = ([np.concatenate(a, axis=1) for a in zip(*half, strict=True)] for half in halves)
    return CopiedRows(sum(p.length for p in pieces), keys, values, pieces[0].kv, pieces[0].scales)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("text", ["", "Grüß \ud83d Gott 👍"])
def test_what_is_written_comes_back(tmp_path: Path, kv: str, count: int, text: str) -> None:
    path, copy = tmp_path / "talk", rows(kv, count)
    write_session(path, MINE, range(count), copy, text)
    with open_session(path) as session:
        pieces = list(session.pieces())
        assert (session.origin, session.tokens, session.text) == (MINE, tuple(range(count)), text)
        assert (session.kv, session.scales) == (copy(0, 0).kv, copy(0, 0).scales)
    assert len(pieces) == (0 if count == 0 else 1 if count == 1 else pytest.approx(10, abs=8))
    if pieces:
        found, expected = joined(pieces), copy(0, count)
        for mine, theirs in zip((*found.keys, *found.values), (*expected.keys, *expected.values), strict=True):
            assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype
        assert (found.length, found.kv, found.scales) == (count, kv, expected.scales)
    assert [p.name for p in tmp_path.iterdir()] == ["talk"]


@pytest.mark.usefixtures("small_pieces")
def test_the_library_reads_it(tmp_path: Path) -> None:
    path, copy = tmp_path / "talk", rows("float32", 33)
    write_session(path, MINE, range(33), copy, "Hello")
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["format"] == "edgeinfer-session"
        assert file.get_tensor("tokens").tolist() == list(range(33))
        assert file.get_tensor("text").tobytes() == b"Hello"
        starts = sorted(int(name.removeprefix("rows.")) for name in set(file.keys()) if name.startswith("rows."))
        found = np.concatenate([file.get_tensor(f"rows.{start}") for start in starts], axis=2)
    snapshot = copy(0, 33)
    assert np.array_equal(found, np.stack([*snapshot.keys, *snapshot.values]))


@pytest.mark.usefixtures("small_pieces")
def test_rows_of_pages_come_back_as_they_are_stored(tmp_path: Path) -> None:
    chance = np.random.default_rng(5)
    alike, unlike = (KVLayer(3, 24, 24),) * 2, (KVLayer(3, 24, 20), KVLayer(0, 0, 0), KVLayer(1, 0, 40))
    for codec, layers in itertools.product(ROW_CODECS.values(), (alike, unlike)):
        layout = PageLayout(layers, codec, codec)
        cache, other = PagedCache(PagePool(layout, 4), 200), PagedCache(PagePool(layout, 4), 200)
        cache.prepare(150)
        for layer, kept in enumerate(layers):
            sizes = kept.key_size, kept.value_size
            cache.write(layer, 0, *(chance.standard_normal((kept.heads, 150, size), np.float32) for size in sizes))
        cache.length = 150
        write_session(tmp_path / "talk", MINE, range(150), cache.snapshot)
        with open_session(tmp_path / "talk") as session:
            assert (session.kv, session.scales) == (codec.name, codec.scales)
            for piece in session.pieces():
                other.append(piece)
        written, found = cache.snapshot(), other.snapshot()
        for mine, theirs in zip((*found.keys, *found.values), (*written.keys, *written.values), strict=True):
            assert np.array_equal(mine, theirs)


@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX systems")
def test_nobody_else_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "talk"
    path.write_text("readable by all")
    path.chmod(0o644)
    write_session(path, MINE, [1], rows("float32", 1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "talk"
    path.write_text("what was there")

    def copy(start: int, stop: int) -> CacheSnapshot:
        if stop > start:
            raise MemoryError
        return rows("float32", 1)(0, 0)

    with pytest.raises(MemoryError):
        write_session(path, MINE, [1], copy)
    assert path.read_text() == "what was there"
    assert [p.name for p in tmp_path.iterdir()] == ["talk"]
    with pytest.raises(StorageError):
        write_session(path / "below", MINE, [1], rows("float32", 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A good file."""
    path = tmp_path_factory.mktemp("good") / "talk"
    write_session(path, MINE, range(7), rows("float32", 7), "Hello")
    return path.read_bytes()


def read(path: Path) -> tuple[Any, ...]:
    with open_session(path) as session:
        return session.origin, session.tokens, session.text, [p.keys[0].tolist() for p in session.pieces()]


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_no_damage_is_overlooked(tmp_path_factory: pytest.TempPathFactory, data: bytes, chance: st.DataObject) -> None:
    damaged = bytearray(data)
    kind = chance.draw(st.sampled_from(["flip", "cut", "longer", "overwrite", "delete"]))
    place = chance.draw(st.integers(0, len(data) - 1))
    if kind == "flip":
        damaged[place] ^= 1 << chance.draw(st.integers(0, 7))
    elif kind == "cut":
        del damaged[place:]
    elif kind == "longer":
        damaged += chance.draw(st.binary(min_size=1, max_size=50))
    else:
        end = place + chance.draw(st.integers(1, 200))
        damaged[place:end] = chance.draw(st.binary(max_size=200)) if kind == "overwrite" else b""
    path = tmp_path_factory.mktemp("damaged") / "talk"
    path.write_bytes(damaged)
    if damaged == data:
        read(path)
    else:
        with pytest.raises(UsageError, match="talk"):
            read(path)


def forged(data: bytes, edit: Callable[[dict[str, Any]], object], payload: bytes | None = None) -> bytes:
    """The file with its header changed and a digest that is right again."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    if "sha256" in header.get("__metadata__", {}):
        header["__metadata__"]["sha256"] = "0" * 64
    text = json.dumps(header).encode()
    blank = len(text).to_bytes(8, "little") + text + (data[8 + length :] if payload is None else payload)
    return blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)


def with_metadata(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["__metadata__"].update(fields)


def with_tensor(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].update(fields)


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no metadata": lambda header: header.pop("__metadata__"),
    "metadata is a list": lambda header: header.update(__metadata__=[]),
    "format": with_metadata(format="other"),
    "a version to come": with_metadata(version="3"),
    "a field of the version after": with_metadata(version="1"),
    "sampling that is no number": with_metadata(sampling="-1"),
    "version is a number": with_metadata(version=1),
    "a missing field": lambda header: header["__metadata__"].pop("scales"),
    "one more field": with_metadata(other="x"),
    "a field that is no text": with_metadata(model=5),
    "an unknown type of cache": with_metadata(kv="int3"),
    "another type of cache than the rows": with_metadata(kv="int8"),
    "scales of rows of a type that has none": with_metadata(kv="q8_0", scales="rows"),
    "no tokens": lambda header: header.pop("tokens"),
    "a tensor is a number": lambda header: header.update(tokens=5),
    "a type that does not exist": with_tensor("tokens", dtype="F13"),
    "another type of the same size": with_tensor("tokens", dtype="F32"),
    "vast": with_tensor("rows.0", shape=[4, 2, 10**18, 6]),
    "negative": with_tensor("rows.0", shape=[4, -2, -7, 6]),
    "truths for numbers": with_tensor("text", shape=[True]),
    "fractions": with_tensor("tokens", shape=[7.0]),
    "a shape that is no list": with_tensor("tokens", shape=7),
    "one offset": with_tensor("tokens", data_offsets=[0]),
    "offsets behind the end": with_tensor("text", data_offsets=[10**9, 10**9 + 5]),
    "offsets before the beginning": with_tensor("tokens", data_offsets=[-28, 0]),
    "overlapping": with_tensor("rows.0", data_offsets=[0, 1344]),
    "another rank": with_tensor("rows.0", shape=[4, 2, 42]),
    "an odd number of arrays": with_tensor("rows.0", shape=[1, 8, 7, 6]),
    "fewer rows than tokens": with_tensor("rows.0", shape=[4, 2, 6, 7]),
    "another name": lambda header: header.update({"rows.1": header.pop("rows.0")}),
    "a header without end": lambda header: header.update(x=" " * (5 << 20)),
}


@each_row("name", FORGERIES)
def test_a_forged_header_is_refused(tmp_path: Path, data: bytes, name: str) -> None:
    path = tmp_path / "talk"
    path.write_bytes(forged(data, with_metadata(model="d" * 64)))
    assert read(path)[0].model == "d" * 64  # without a fault it is read
    path.write_bytes(forged(data, FORGERIES[name]))
    with pytest.raises(UsageError, match="update" if name == "a version to come" else "talk"):
        read(path)


@each_row("layers", ['[["object", 1, 1], ["object", 1, 1]]', '[["float32", 1.5, 2]]', '[["uint8", 1, 5]]', "[", "[1]"])
def test_layers_that_the_rows_are_not_of_are_refused(layers: str, tmp_path: Path) -> None:
    path, arrays = tmp_path / "talk", (np.zeros((1, 4, 2), np.float32), np.zeros((1, 4, 1), np.float32))
    write_session(path, MINE, range(4), lambda a, b: CopiedRows(b - a, (arrays[0][:, a:b],), (arrays[1][:, a:b],)))
    path.write_bytes(forged(path.read_bytes(), with_metadata(layers=layers)))
    with pytest.raises(UsageError, match="not of these layers"), open_session(path):
        pass


def test_negative_tokens_and_text_of_no_encoding_are_refused(tmp_path: Path, data: bytes) -> None:
    payload = data[8 + int.from_bytes(data[:8], "little") :]
    path = tmp_path / "talk"
    for damaged in (b"\xff" * 4 + payload[4:], payload[:-1] + b"\xff"):
        path.write_bytes(forged(data, lambda header: None, damaged))
        with pytest.raises(UsageError, match="damaged"):
            read(path)


OTHER = save({"weight": np.zeros(3, np.float32)})  # looks like one


@each_row("content", [b"", b"{}", b"\x01", b"\xff" * 100, b'{"format": "edgeinfer-chat"}', OTHER])
def test_what_is_no_session_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "talk"
    path.write_bytes(content)
    assert is_session(path) == (content is OTHER)
    with pytest.raises(UsageError, match="not a session file"):
        read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused: list[str] = []

    def attempt() -> None:
        for path in (tmp_path / "pipe", tmp_path, tmp_path / "missing", tmp_path / "a\0b"):
            with pytest.raises(UsageError):
                read(path)
            refused.append(path.name)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(TIME_LIMIT)
    assert len(refused) == 4, "opening one of them does not end"


def test_the_origin_tells_models_and_ways_to_run_them_apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    bundles: list[Bundle] = []
    for seed in (0, 1):
        bundles.append(open_bundle(random_bundle(tmp_path_factory.mktemp("model"), seed=seed)))
    mine = origin_of(bundles[0], "native", "onnx", True)
    assert mine == origin_of(open_bundle(bundles[0].path), "native", "onnx", True)
    other = origin_of(bundles[1], "native", "onnx", True)
    assert other.model != mine.model and other.run == mine.run
    ways = [mine]
    ways += [origin_of(bundles[0], "portable", "onnx", True), origin_of(bundles[0], "native", "reference", True)]
    ways += [origin_of(bundles[0], "native", "onnx", False)]
    assert all(a.model == b.model and a.run != b.run for a, b in pairwise(ways))
