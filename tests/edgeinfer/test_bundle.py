"""Bundles on disk: malformed ones are refused with a BundleError, and writing is whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgeinfer.bundle.layouts import MODEL, NATIVE, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.manifest import Blob, CacheQuality, Capabilities, Manifest, QualityRecord, TensorEntry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.parts import RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.writing import MANIFEST, seal, write_bundle, write_file
from edgeinfer.core.errors import BundleError, StorageError
from tests.tables import each_row

SPEC = DecoderSpec(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=64,
    norm_eps=1e-5,
    rope=RopeSpec("default", 1e4, 4),
)


def make_manifest(layout: Layout = PORTABLE) -> Manifest:
    norm = TensorEntry("final_norm", (8,), 32, Blob(0, "float32", (8,)))
    vocabulary = [replace(EMBED[layout], name=name) for name in ("embed", "head")]
    qkv = [TensorEntry(f"layers.{i}.attn.qkv", (16, 8), 32, Blob(384, "float32", (16, 8))) for i in range(2)]
    return Manifest(
        name="tiny",
        architecture="LlamaForCausalLM",
        backend="onnx",
        geometry=SPEC.geometry,
        parameters=88,
        capabilities=Capabilities(layer_skip=True, hidden=True, tree=True, paged=layout == NATIVE),
        decoder=SPEC,
        tensors=(norm, *vocabulary, *qkv),
        layout=layout,
        exits=(1, 2),
        export={"bits": 4},
        figures={"perplexity": 5.5},
        quality=QualityRecord(512, 0.01, 0.95, (CacheQuality("int8", 0.001),), 0.25),
    )


# The vocabulary's matrix in either layout, both within the 896 bytes of the weights file.
EMBED = {
    PORTABLE: TensorEntry(
        "embed",
        (10, 8),
        4,
        Blob(64, "uint8", (10, 1, 16)),
        32,
        Blob(256, "float32", (10, 1)),
        Blob(320, "uint8", (10, 1)),
    ),
    NATIVE: TensorEntry(
        "embed",
        (10, 8),
        2,
        Blob(64, "uint8", (1, 1, 256)),
        32,
        Blob(320, "uint16", (1, 1, 32)),
        Blob(384, "uint8", (1, 1, 32)),
    ),
}


def fill(folder: Path) -> None:
    (folder / MODEL).write_bytes(b"graph")
    (folder / WEIGHTS).write_bytes(np.arange(8, dtype=np.float32).tobytes() + bytes(864))
    (folder / "tokenizer.json").write_text('{"a": "é"}', "utf-8")
    seal(folder, make_manifest())


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    with write_bundle(tmp_path / "tiny") as work:
        fill(work)
    return tmp_path / "tiny"


def edit(bundle: Path, change: Any) -> None:
    """Applies a change to the parsed manifest on disk."""
    data = json.loads((bundle / MANIFEST).read_text())
    change(data)
    (bundle / MANIFEST).write_text(json.dumps(data))


def test_a_written_bundle_opens_as_it_was(bundle: Path) -> None:
    opened = open_bundle(bundle)
    assert opened.manifest.decoder == SPEC
    assert set(opened.manifest.files) == {MODEL, WEIGHTS, "tokenizer.json"}
    assert opened.read_text("tokenizer.json") == '{"a": "é"}'
    np.testing.assert_array_equal(opened.tensor("final_norm"), np.arange(8))
    assert opened.tensor("embed").shape == (10, 8)
    opened.verify()


@each_row("layout", [NATIVE, PORTABLE])
def test_manifest_survives_json(layout: Layout) -> None:
    manifest = make_manifest(layout)
    assert Manifest.from_json(manifest.to_json()) == manifest


def paths(data: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in parsed JSON."""
    found = [prefix] if prefix else []
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        found += paths(value, (*prefix, key))
    return found


MANIFEST_PATHS = [
    (layout, path) for layout in (NATIVE, PORTABLE) for path in paths(json.loads(make_manifest(layout).to_json()))
]
JUNK = st.sampled_from([None, -1, 0, 3, 1.5, True, "x", "../x", [], [1], {}, {"a": 1}, 2**70, float("nan")])


@settings(max_examples=300, deadline=None)
@example(where=(NATIVE, ("decoder", "num_layers")), value=2**70, remove=False)
@given(where=st.sampled_from(MANIFEST_PATHS), value=JUNK, remove=st.booleans())
def test_a_mutated_manifest_is_read_or_refused(where: tuple[Layout, tuple[Any, ...]], value: Any, remove: bool) -> None:
    layout, path = where
    data = json.loads(make_manifest(layout).to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    if remove:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    try:
        Manifest.from_json(json.dumps(data))
    except BundleError as error:
        assert error.message and error.hint


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_is_refused_with_a_bundle_error(text: str) -> None:
    with pytest.raises(BundleError):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d.pop("geometry"), "geometry"),
        (lambda d: d.update(format_version=99), "99"),
        (lambda d: d.update(format="other"), "not an edgeinfer manifest"),
        (lambda d: d["geometry"].update(num_layers=3), "disagree"),
        (lambda d: d["tensors"].append(d["tensors"][0]), "twice"),
        (lambda d: d["tensors"][1].update(block_size=24), "24"),
        (lambda d: d["tensors"][0]["data"].update(offset=880), "past the end"),
        (lambda d: d.update(layout="native"), "embed is not in the native layout"),
        (lambda d: d.update(layout="upright"), "must be one of native, portable"),
        (lambda d: d.update(layout_version=2), "version 2 of the portable layout"),
        (lambda d: d["capabilities"].update(row_multiple=2), "capabilities and tensors disagree"),
        (lambda d: d["capabilities"].update(high_planes=True), "capabilities and tensors disagree"),
        (lambda d: d["tensors"][0].update(paired=True), "final_norm has parts that float32 has not"),
        (lambda d: d["tensors"][1].update(transposed=True), "quantized and transposed"),
        (lambda d: d["tensors"][1].update(shape=[9, 8], paired=True), "halves of different sizes"),
        (lambda d: d["files"][WEIGHTS].update(bytes=5), "896 bytes"),
        (lambda d: d["quality"].pop("top1"), "lacks 'top1'"),
        (lambda d: d["quality"].update(divergence=-1.0), "impossible figures"),
        (lambda d: d["quality"].update(caches=2 * d["quality"]["caches"]), "a cache twice"),
        (lambda d: d["quality"]["caches"][0].update(kv_type="int9"), "must be one of float32"),
    ],
)
def test_what_is_wrong_is_named(bundle: Path, change: Any, says: str) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=says):
        open_bundle(bundle)


def part(name: str, **changes: Any) -> TensorEntry:
    """The native embedding with a part of it changed."""
    blob = getattr(EMBED[NATIVE], name)
    return replace(EMBED[NATIVE], **{name: replace(blob, **changes)})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: part("data", shape=(1, 1, 128)), "inconsistent data"),
        (lambda: part("data", shape=(256,)), "inconsistent data"),
        (lambda: part("scales", shape=(1, 1, 10)), "inconsistent scales"),
        (lambda: part("zero_points", shape=(1, 1, 8)), "inconsistent zero points"),
        (lambda: replace(EMBED[NATIVE], bits=4), "inconsistent data"),
        (lambda: replace(EMBED[NATIVE], bits=8, data=Blob(64, "uint8", (1, 1, 512))), "inconsistent low"),
        (lambda: replace(EMBED[NATIVE], low=EMBED[NATIVE].data), "inconsistent low"),
        (lambda: replace(EMBED[NATIVE], scales=None), "inconsistent scales"),
        (lambda: replace(EMBED[PORTABLE], low=EMBED[PORTABLE].data), "inconsistent low"),
        (lambda: replace(EMBED[PORTABLE], scales=None), "inconsistent data"),
        (lambda: replace(EMBED[PORTABLE], block_size=16), "block 16"),
    ],
)
def test_parts_that_do_not_fit_their_layout_are_refused(make: Callable[[], TensorEntry], says: str) -> None:
    with pytest.raises(BundleError, match=says):
        make()


@pytest.mark.parametrize("name", ["../outside.bin", "/etc/hostname", "a/../../outside.bin", "..\\outside.bin", ""])
def test_paths_that_leave_the_bundle_are_refused(bundle: Path, name: str) -> None:
    (bundle.parent / "outside.bin").write_bytes(b"secret")
    edit(bundle, lambda d: d["files"].update({name: {"bytes": 6, "sha256": "0" * 64}}))
    with pytest.raises(BundleError, match="leaves its directory"):
        open_bundle(bundle)


def test_a_linked_folder_that_leaves_the_bundle_is_refused(bundle: Path) -> None:
    outside = bundle.parent / "outside"
    outside.mkdir()
    (outside / "data.bin").write_bytes(b"secret")
    (bundle / "inside").symlink_to(outside)
    edit(bundle, lambda d: d["files"].update({"inside/data.bin": {"bytes": 6, "sha256": "0" * 64}}))
    with pytest.raises(BundleError, match="leaves its directory"):
        open_bundle(bundle)


def test_changed_contents_are_found_when_read_or_verified(bundle: Path) -> None:
    (bundle / "tokenizer.json").write_bytes(b'{"a": "xy"}')
    opened = open_bundle(bundle)
    with pytest.raises(BundleError, match="sha256"):
        opened.read_text("tokenizer.json")
    with pytest.raises(BundleError, match="sha256"):
        opened.verify()


def test_names_the_bundle_does_not_have(bundle: Path) -> None:
    opened = open_bundle(bundle)
    with pytest.raises(BundleError):
        opened.file("chat_template.jinja")
    with pytest.raises(BundleError):
        opened.tensor("layers.0.mlp.down")


@each_row("failure", [RuntimeError, KeyboardInterrupt])
def test_a_crash_while_replacing_leaves_the_old_bundle(bundle: Path, failure: type[BaseException]) -> None:
    before = (bundle / MANIFEST).read_bytes()
    with pytest.raises(failure), write_bundle(bundle, replace_existing=True) as work:
        (work / MODEL).write_bytes(b"half")
        raise failure
    assert (bundle / MANIFEST).read_bytes() == before
    open_bundle(bundle).verify()
    assert [p.name for p in bundle.parent.iterdir()] == ["tiny"]


def test_a_crash_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), write_bundle(tmp_path / "new") as work:
        (work / MODEL).write_bytes(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_replacing_swaps_the_whole_bundle(bundle: Path) -> None:
    (bundle / "old-only").write_bytes(b"")
    with write_bundle(bundle, replace_existing=True) as work:
        fill(work)
    assert not (bundle / "old-only").exists()
    assert [p.name for p in bundle.parent.iterdir()] == ["tiny"]


def test_what_is_there_is_not_overwritten_unasked(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="already exists"), write_bundle(bundle):
        pass
    other = tmp_path / "notes"
    other.mkdir()
    with pytest.raises(StorageError, match="not a bundle"), write_bundle(other, replace_existing=True):
        pass


@each_row(("code", "says"), [(errno.ENOSPC, "full"), (errno.EACCES, "Cannot write")])
def test_disk_errors_become_storage_errors(tmp_path: Path, code: int, says: str) -> None:
    with pytest.raises(StorageError, match=says), write_bundle(tmp_path / "new"):
        raise OSError(code, os.strerror(code))
    assert list(tmp_path.iterdir()) == []


def test_write_file_replaces_whole(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_file(target, b"one")
    write_file(target, b"two")
    assert target.read_bytes() == b"two"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]
    with pytest.raises(StorageError):
        write_file(tmp_path / "missing" / "state.json", b"x")
    # What is no file is not replaced by one: a device would be lost to everybody.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, b"told")
    assert os.read(reading, 8) == b"told" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reading)
    # A link is not replaced either: the file at its end is, by a temporary file in its folder.
    link = tmp_path / "link"
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere" / "report")
    for data in (b"new", b"newer"):
        write_file(link, data)
        assert link.is_symlink() and (tmp_path / "elsewhere" / "report").read_bytes() == data
