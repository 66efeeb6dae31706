"""Bundles converted between the layouts are those that an export would have made, and nothing half-made stays."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.codecs import CODECS, NativeCodec
from edgeinfer.bundle.conversion import convert_bundle, convert_weights, is_converted, relocate
from edgeinfer.bundle.layouts import LAYOUTS, NATIVE, PORTABLE, WEIGHTS, Layout
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.packing import QuantizedMatrix, QuantizedShape
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import Outline, convert_table, file_bytes, lay_out
from edgeinfer.bundle.writing import MANIFEST, seal
from edgeinfer.errors import BundleError, StorageError, UsageError
from edgeinfer.export.options import ExportConfig
from tests.cache import export_checkpoint
from tests.cli import contents, edgeinfer, refuses
from tests.factories import make_checkpoint
from tests.tables import each_row

# Tied and untied heads, biases, odd sizes, some layers float32, with and without zero points, one and two planes. Two
# bits are vectors in native exports alone, so one layout's export is not the other's there.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied-4": ("llama-tied", {"bits": 4, "keep_small": False}),
    "tied-8": ("llama-tied", {"bits": 8, "keep_small": False}),
    "mixed-8": ("qwen2", {"bits": 8, "head_bits": 4}),
    "odd-sizes-4": ("llama-mha-odd-sizes", {"bits": 4, "keep_small": False, "group_size": 64, "symmetric": True}),
    "biases-8": ("llama-biases", {"bits": 8, "keep_small": False, "group_size": 128, "symmetric": True}),
    "experts-4": ("qwen2-moe-dense-layers", {"bits": 4, "keep_small": False}),
    "float-experts": ("qwen3-moe-tied-odd", {"bits": 8, "keep_small": False}),
}

OTHER: dict[Layout, Layout] = {NATIVE: PORTABLE, PORTABLE: NATIVE}

Make = Callable[[str, Layout], Bundle]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Exports a kind in a layout, once."""

    @cache
    def checkpoint(architecture: str) -> Path:
        folder = tmp_path_factory.mktemp("conversion") / "tiny"
        make_checkpoint(folder, architecture)
        return folder

    @cache
    def export(kind: str, layout: Layout) -> Bundle:
        architecture, options = KINDS[kind]
        out = tmp_path_factory.mktemp(kind) / layout
        return open_bundle(export_checkpoint(checkpoint(architecture), out, ExportConfig(**options, layout=layout)))

    return export


@pytest.fixture
def bundle(make: Make, tmp_path: Path) -> Bundle:
    """A native bundle that may be damaged."""
    return open_bundle(shutil.copytree(make("tied-8", NATIVE).path, tmp_path / "given" / "bundle"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_bundle_is_the_exported_one(make: Make, kind: str, layout: Layout, tmp_path: Path) -> None:
    convert_bundle(make(kind, OTHER[layout]), layout, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(make(kind, layout).path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_made_on_the_device_are_the_exported_ones(
    make: Make, kind: str, layout: Layout, tmp_path: Path
) -> None:
    given, target = make(kind, OTHER[layout]), tmp_path / "weights.bin"
    steps: list[tuple[str, int, int]] = []
    convert_weights(given, layout, target, lambda *step: steps.append(step))
    exported = make(kind, layout)
    expected = (exported.path / WEIGHTS).read_bytes()
    assert target.read_bytes()[: len(expected)] == expected
    assert [entry.name for entry in tmp_path.iterdir()] == [target.name]
    assert target.stat().st_mode == (given.path / WEIGHTS).stat().st_mode
    assert [step[1] for step in steps] == list(range(len(steps))) and steps[-1][1] == steps[-1][2]
    # The other graph finds every blob where the other layout's own bundle has it.
    assert convert_table(given.manifest.tensors, layout) == exported.manifest.tensors


def test_what_was_converted_is_known_again(make: Make, tmp_path: Path) -> None:
    given, target = make("tied-4", NATIVE), tmp_path / "weights.bin"
    assert not is_converted(given, PORTABLE, target)
    convert_weights(given, PORTABLE, target)
    assert is_converted(given, PORTABLE, target)
    whole = target.read_bytes()
    for other in (whole[:-1], whole[:-8] + bytes(8), whole + b"x", b""):
        target.write_bytes(other)
        assert not is_converted(given, PORTABLE, target)


def test_weights_of_another_model_of_the_same_size_are_not_taken(bundle: Bundle, tmp_path: Path) -> None:
    convert_weights(bundle, PORTABLE, tmp_path / "weights.bin")
    other = tmp_path / "other"
    shutil.copytree(bundle.path, other)
    with (other / WEIGHTS).open("r+b") as file:
        file.write(b"\x55")
    text = (other / MANIFEST).read_text("utf-8")
    (other / MANIFEST).write_text(text.replace(bundle.manifest.files[WEIGHTS].sha256, "0" * 64), "utf-8")
    assert not is_converted(open_bundle(other), PORTABLE, tmp_path / "weights.bin")


@each_row("whole", [False, True])
def test_damaged_weights_are_not_converted(bundle: Bundle, tmp_path: Path, whole: bool) -> None:
    with (bundle.path / WEIGHTS).open("r+b") as file:
        file.write(b"\x55\xaa\x55\xaa")
    with pytest.raises(BundleError, match=r"weights\.bin does not match its sha256"):
        if whole:
            convert_bundle(bundle, PORTABLE, tmp_path / "out")
        else:
            convert_weights(bundle, PORTABLE, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@each_row("failure", [OSError(28, os.strerror(28)), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    portable = tmp_path / "portable"
    convert_bundle(bundle, PORTABLE, portable)
    (tmp_path / "weights.bin").write_bytes(b"old")
    before = contents(tmp_path)

    def fail(*_: Any) -> None:
        raise failure

    monkeypatch.setattr(NativeCodec, "write", fail)
    expected = StorageError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        convert_weights(open_bundle(portable), NATIVE, tmp_path / "weights.bin")
    with pytest.raises(expected):
        convert_bundle(open_bundle(portable), NATIVE, portable, replace_existing=True)
    assert contents(tmp_path) == before


def test_nothing_to_convert(bundle: Bundle, make: Make, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already has the native layout"):
        convert_bundle(bundle, NATIVE, tmp_path / "out")
    make_checkpoint(tmp_path / "checkpoint", "llama")
    plain = open_bundle(export_checkpoint(tmp_path / "checkpoint", tmp_path / "plain", ExportConfig(bits=32)))
    with pytest.raises(UsageError, match="no quantized weights"):
        convert_weights(plain, NATIVE, tmp_path / "out")


def test_nested_bundles_come_along(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(bundle.path, bundle.path / "drafter")
    sealed = seal(bundle.path, bundle.manifest)
    text = replace(sealed, drafters=("drafter",)).to_json()
    (bundle.path / MANIFEST).write_text(text, "utf-8")
    convert_bundle(open_bundle(bundle.path), PORTABLE, tmp_path / "out")
    assert open_bundle(tmp_path / "out").manifest.drafters == ("drafter",)
    assert contents(tmp_path / "out" / "drafter") == contents(bundle.path / "drafter")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("paired", [False, True])
def test_memory_does_not_grow_with_the_matrix(tmp_path: Path, layout: Layout, paired: bool) -> None:
    stored = OTHER[layout]
    n, k = 16384, 1024
    shape = QuantizedShape(n, k, 4, 32, True, paired)
    outlines = [Outline("matrix", (n, k), shape)]
    (source,), (target,) = lay_out(outlines, stored), lay_out(outlines, layout)
    with (tmp_path / "given").open("wb") as file:
        file.truncate(file_bytes([source]))

    def rows(start: int, stop: int) -> QuantizedMatrix:
        return CODECS[stored].read(tmp_path / "given", source, start, stop)

    tracemalloc.start()
    try:
        with (tmp_path / "made").open("wb") as file:
            CODECS[layout].write(file, target, rows)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "made").stat().st_size == file_bytes([target])
    # A million values at a time, in a handful of arrays; the packed matrix alone has eight million bytes.
    assert peak < 6_500_000


def graph_with(names: list[str]) -> onnx.ModelProto:
    """A model with an initializer in each of these files, a large one inside, and a branch."""
    tensors = []
    for index, name in enumerate(names):
        tensor = TensorProto(name=f"t{index}", data_type=TensorProto.FLOAT, dims=[2])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", "0"), ("length", "8")):
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
    tensors.append(helper.make_tensor("inside", TensorProto.FLOAT, [300], np.arange(300.0)))
    nodes = [helper.make_node("Identity", ["t0"], ["y"], name="weights.bin")]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])
    graph = helper.make_graph(nodes, "weights.bin", [], [output], tensors)
    return helper.make_model(graph, producer_name="weights.bin", ir_version=11)


@each_row("new", ["w", "weights.native.bin", "x" * 300])
def test_only_the_named_file_of_initializers_is_renamed(new: str) -> None:
    model = graph_with(["weights.bin", "other.bin", "weights.bin"]).SerializeToString(deterministic=True)
    expected = graph_with([new, "other.bin", new]).SerializeToString(deterministic=True)
    assert relocate(model, "weights.bin", new) == expected


@given(st.binary(max_size=60), st.integers(0, 400))
def test_bytes_that_are_no_model_are_refused_or_kept(junk: bytes, cut: int) -> None:
    whole = graph_with(["weights.bin"]).SerializeToString()
    for data in (junk, whole[:cut] + junk):
        try:
            relocate(data, "weights.bin", "new.bin")
        except BundleError as error:
            assert "not an ONNX graph" in error.message and error.hint


def test_the_command(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, out = make("tied-4", NATIVE), tmp_path / "out"
    assert main(["convert", str(given.path), str(out), "--to", "portable", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["bundle"], data["layout"]) == (str(out), "portable")
    assert data["bytes"] == sum(f.stat().st_size for f in out.iterdir()) and data["seconds"] >= 0
    assert contents(out) == contents(make("tied-4", PORTABLE).path)
    assert main(["convert", str(out), str(out), "--to", "native", "--force"]) == 0
    stdout, stderr = capsys.readouterr()
    assert stdout == "" and f"edgeinfer run -m {out}" in stderr
    assert contents(out) == contents(given.path)


@each_row(
    ("arguments", "code", "says"),
    [
        ("{bundle} {bundle} --to portable", 5, "already exists"),
        ("{bundle} {out} --to upright", 2, "--to cannot be 'upright'"),
        ("{out} {out} --to native", 3, "No model at"),
    ],
)
def test_the_command_refuses_in_one_line(bundle: Bundle, tmp_path: Path, arguments: str, code: int, says: str) -> None:
    words = arguments.format(bundle=bundle.path, out=tmp_path / "out").split()
    refuses(code, says, edgeinfer("convert", *words))
    assert not list(tmp_path.iterdir())
