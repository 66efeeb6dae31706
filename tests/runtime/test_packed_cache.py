"""Mapped weights: the same bits as packed ones, in a cache that is made once, mended, capped and safe to remove."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edgeinfer.apps.bench.watch import resident_bytes
from edgeinfer.bundle.layouts import NATIVE, PORTABLE, WEIGHTS
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.errors import BundleError, StorageError
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import ForwardInput
from edgeinfer.runtime.backends.onnx import opening, packed_room
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.backends.onnx.opening import copies_of
from edgeinfer.runtime.backends.onnx.packed_cache import prepare_packed
from edgeinfer.runtime.backends.onnx.packed_graph import products, with_copies
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.system.memory import process_memory, release_freed, releases_pages, return_large_frees
from edgeinfer.runtime.weights.streaming import making_bytes, mapped_bytes, packed_bytes
from tests.cli import TIME_LIMIT
from tests.runtime.models import bundle_of
from tests.tables import each_row

TEXT = np.array([0, 40, 41, 42, 43, 44, 45])
linux = pytest.mark.skipif(sys.platform != "linux", reason="the cache lies elsewhere")
glibc = pytest.mark.skipif(not releases_pages(), reason="pages cannot be dropped here")
EXPORTS = {
    "4-bit": ExportConfig(4, 32, keep_small=False, layout=PORTABLE),
    "4-bit-asymmetric": ExportConfig(4, 32, keep_small=False, symmetric=False, layout=PORTABLE),
    "8-bit": ExportConfig(8, 64, keep_small=False, layout=PORTABLE),
    "2-bit": ExportConfig(2, 64, keep_small=False, layout=PORTABLE),
    "mixed": ExportConfig(4, 32, layout=PORTABLE),
    "float32": ExportConfig(32),
    "converted": ExportConfig(4, 32, keep_small=False, layout=NATIVE),
}
# A bundle of 20 MB, whose memory can be told from the rest of the process.
LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4}


def export(name: str) -> Bundle:
    """A small bundle of each kind."""
    return bundle_of("qwen2", EXPORTS[name], hidden_size=128)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def packed(cache: Path) -> list[Path]:
    """What lies where packed weights are kept."""
    return sorted((cache / "edgeinfer" / "packed").iterdir())


def logits(bundle: Bundle, weights: str) -> Floats:  # (S, V)
    """Of a text in passes of several shapes."""
    backend = OnnxBackend(bundle, 64, layout=PORTABLE, weights=weights)
    rows = [0, *range(4)], [0, 1], [0]
    parts = []
    for chunk, wanted in zip(np.split(TEXT, [4, 6]), rows, strict=True):
        positions = backend.cache.length + np.arange(len(chunk))
        parts.append(backend.forward(ForwardInput(chunk, positions, np.array(wanted))).logits.copy())
    backend.close()
    return np.concatenate(parts)


@linux
@pytest.mark.parametrize("name", list(EXPORTS))
def test_mapped_weights_give_the_same_bits(cache: Path, name: str) -> None:
    wanted = logits(export(name), "packed")
    np.testing.assert_array_equal(logits(export(name), "mapped"), wanted)
    made = [path.stat().st_mtime_ns for path in packed(cache)[0].iterdir()]
    np.testing.assert_array_equal(logits(export(name), "mapped"), wanted)
    assert [path.stat().st_mtime_ns for path in packed(cache)[0].iterdir()] == made


@linux
@pytest.mark.parametrize("name", ["4-bit", "4-bit-asymmetric", "8-bit", "float32"])
def test_every_matrix_has_a_packed_copy(cache: Path, name: str) -> None:
    bundle = export(name)
    graph = prepare_packed(bundle)
    assert graph.reads is not None
    inside = graph.weights.stat().st_size
    raw = bundle.manifest.files[WEIGHTS].bytes
    matrices = [t.name for t in bundle.manifest.tensors if len(t.shape) == 2 and t.name != "embed"]
    places = [graph.reads[name][0] for name in matrices]
    assert all(raw <= offset and offset + length <= inside and offset % 4096 == 0 for offset, length in places)
    assert all(offset + length <= raw for offset, length in graph.reads["embed"])
    tensors = [t for t in tensors_in(bundle.manifest, PORTABLE) if t.name in matrices]
    sizes = [graph.reads[t.name][0][1] for t in tensors]
    assert all(0.9 * packed_bytes(t) <= size <= packed_bytes(t) for t, size in zip(tensors, sizes, strict=True))
    largest = max(tensors, key=packed_bytes)
    assert making_bytes(tensors) == (packed_bytes(largest) + 2 * largest.nbytes, largest.nbytes)


@glibc
@pytest.mark.skipif(not hasattr(ort, "set_default_logger_callback"), reason="this onnxruntime compares no copies")
def test_opening_a_session_keeps_few_of_the_copies_that_it_compares(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "READ_BETWEEN", 0)
    graph = prepare_packed(export("4-bit"))
    drop, kept = copies_of(graph), {}
    assert drop is not None

    def drop_mapped() -> None:
        # Looking for what is not mapped yet takes long in a process of many libraries.
        if str(graph.weights) in Path("/proc/self/maps").read_text("utf-8"):
            drop()

    for name, step in (("all", None), ("few", drop_mapped)):
        session = OrtSession(str(graph.model), 1, step=step)
        kept[name] = resident_bytes(graph.weights)
        del session
    layers = [t for t in tensors_in(export("4-bit").manifest, PORTABLE) if t.name.startswith("layers.")]
    assert kept["all"] >= sum(length for _, length in graph.copies)
    assert kept["few"] <= kept["all"] - sum(map(packed_bytes, layers)) / 2


@linux
def test_it_says_what_it_does_once(cache: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    prepare_packed(export("4-bit"), lambda *step: steps.append(step))
    assert steps[0][:2] == ("packing", 0)
    assert steps[-1][1] == steps[-1][2] == 13
    steps.clear()
    prepare_packed(export("4-bit"), lambda *step: steps.append(step))
    assert steps == []


@pytest.mark.slow
@glibc
def test_memory(cache: Path) -> None:
    large = bundle_of("llama", EXPORTS["4-bit"], **LARGE)
    return_large_frees()
    prepare_packed(large)
    tensors = tensors_in(large.manifest, PORTABLE)
    weights = mapped_bytes(tensors)
    taken = {}
    for mode in ("packed", "mapped"):
        release_freed()
        before = process_memory()
        backend = OnnxBackend(large, 64, layout=PORTABLE, weights=mode)
        backend.forward(ForwardInput(TEXT, np.arange(len(TEXT)), np.array([6])))
        release_freed()
        after = process_memory()
        taken[mode] = after.anonymous - before.anonymous, after.file - before.file
        backend.close()
        del backend
    assert taken["packed"][0] > 0.8 * weights
    assert taken["mapped"][0] < 0.3 * weights
    assert 0.8 * weights < taken["mapped"][1] < weights + (4 << 20)


@linux
@pytest.mark.parametrize("damage", ["a byte", "shorter", "longer", "no table", "bad table", "no file", "a link"])
def test_damage_is_found_and_mended(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    bundle = export("4-bit")
    wanted = logits(bundle, "mapped")
    (folder,) = packed(cache)
    file, table = folder / "packed.bin", folder / "packed.json"
    whole = file.read_bytes()
    if damage == "a byte":
        file.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
    elif damage in ("shorter", "longer"):
        file.write_bytes(whole[:-1] if damage == "shorter" else whole + b"x")
    elif damage == "no table":
        table.unlink()
    elif damage == "bad table":
        table.write_text('{"size": []}')
    elif damage == "no file":
        file.unlink()
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    np.testing.assert_array_equal(logits(bundle, "mapped"), wanted)
    assert packed(cache) == [folder]
    assert not folder.is_symlink()
    assert file.read_bytes() == whole
    assert ("damaged" in caplog.text) == (damage in ("a byte", "shorter", "longer", "bad table"))


@linux
def test_a_copy_from_a_backup_is_whole(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepare_packed(export("4-bit"))
    (folder,) = packed(cache)
    os.utime(folder / "packed.bin", ns=(1, 1))
    inode = (folder / "packed.bin").stat().st_ino
    for _ in range(2):
        prepare_packed(export("4-bit"))
    assert (folder / "packed.bin").stat().st_ino == inode
    assert json.loads((folder / "packed.json").read_text())["changed"] == 1
    assert caplog.text == ""


@linux
def test_it_may_be_removed_while_it_is_used(cache: Path) -> None:
    bundle = export("4-bit")
    backend = OnnxBackend(bundle, 64, layout=PORTABLE, weights="mapped")
    shutil.rmtree(cache)
    assert backend.pages is not None
    backend.pages.release()
    mapped = backend.forward(ForwardInput(TEXT[:4], np.arange(4), np.arange(4))).logits.copy()
    np.testing.assert_array_equal(mapped, logits(bundle, "packed")[1:5])
    backend.close()
    np.testing.assert_array_equal(logits(bundle, "mapped")[1:5], mapped)


@linux
@pytest.mark.parametrize("fault", ["a file is in the way", "no permission"])
def test_a_cache_that_cannot_be_written(cache: Path, fault: str) -> None:
    if fault == "no permission":
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        cache.mkdir(mode=0o500)
    else:
        cache.write_text("not a folder")
    with pytest.raises(StorageError, match="Cannot write"):
        OnnxBackend(export("4-bit"), 64, layout=PORTABLE, weights="mapped")


@linux
def test_a_full_disk_is_refused_before_it_is_full(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(cache.parent)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(StorageError, match="may take") as caught:
        prepare_packed(export("4-bit"))
    assert "pack the weights in memory" in caught.value.hint
    assert packed(cache) == []


@linux
def test_a_disk_that_fills_while_it_is_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("edgeinfer.runtime.backends.onnx.packed_cache.append_copy", full)
        with pytest.raises(StorageError, match="disk is full"):
            prepare_packed(export("4-bit"))
    assert packed(cache) == []
    prepare_packed(export("4-bit"))


@linux
def test_the_least_recently_used_goes_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = [export(name) for name in ("4-bit", "8-bit", "2-bit")]
    folders = []
    for bundle in bundles[:2]:
        folders.append(prepare_packed(bundle).model.parent)
    size = sum(path.stat().st_size for folder in folders for path in folder.iterdir())
    os.utime(folders[0], (1000, 1000))
    os.utime(folders[1], (500, 500))
    prepare_packed(bundles[0])
    assert folders[0].stat().st_mtime > 1000
    room = 3 * bundles[2].manifest.files[WEIGHTS].bytes
    monkeypatch.setattr(packed_room, "_MOST_BYTES", size + room - 1)
    (cache / "edgeinfer" / "packed" / ".new-left").mkdir()
    os.utime(cache / "edgeinfer" / "packed" / ".new-left", (1000, 1000))
    newest = prepare_packed(bundles[2]).model.parent
    assert packed(cache) == sorted([folders[0], newest])


@linux
def test_several_processes_make_it_at_once(cache: Path) -> None:
    bundle = export("8-bit")
    program = (
        "import sys; from edgeinfer.bundle import open_bundle"
        "; from edgeinfer.runtime.backends.onnx.packed_cache import prepare_packed"
        "; graph = prepare_packed(open_bundle(sys.argv[1])); print(graph.weights.stat().st_size, graph.model.exists())"
    )
    command = [sys.executable, "-c", program, str(bundle.path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=TIME_LIMIT)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    (folder,) = packed(cache)
    assert said == {f"{(folder / 'packed.bin').stat().st_size} True\n"}
    np.testing.assert_array_equal(logits(bundle, "mapped"), logits(bundle, "packed"))


@linux
def test_what_a_failure_leaves(cache: Path, tmp_path: Path) -> None:
    shutil.copytree(export("4-bit").path, tmp_path / "damaged")
    with (tmp_path / "damaged" / WEIGHTS).open("r+b") as file:
        file.seek(1000)
        file.write(b"damage")
    with pytest.raises(BundleError, match="does not match its sha256"):
        prepare_packed(open_bundle(tmp_path / "damaged"))

    def stop(*step: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_packed(export("4-bit"), stop)
    assert packed(cache) == []


@linux
def test_others_processors_and_graphs_are_not_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = prepare_packed(export("4-bit")).model.parent
    with monkeypatch.context() as patch:
        patch.setattr("edgeinfer.runtime.backends.onnx.packed_cache.processor_key", lambda: ["another"])
        assert prepare_packed(export("4-bit")).model.parent != ours
    with monkeypatch.context() as patch:
        patch.setattr("edgeinfer.runtime.backends.onnx.packed_cache.ort.__version__", "1.31.99")
        assert prepare_packed(export("4-bit")).model.parent != ours
    assert len(packed(cache)) == 3


@each_row("bytes_", [b"", b"\xff" * 40, b"\x3a\x7f"])
def test_bytes_that_are_no_graph(bytes_: bytes) -> None:
    with pytest.raises(BundleError, match="not an ONNX graph"):
        list(products(bytes_))
    with pytest.raises(BundleError, match="not an ONNX graph"):
        with_copies(bytes_, "file", {})
