"""Layouts of weights: converted bundles are those that an export would have made, and how experts lie."""

from __future__ import annotations

import itertools
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
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.packing import (
    QuantizedMatrix,
    QuantizedShape,
    common_format,
    dense_rows,
    expert_tensor,
    find_expert,
    pack,
    unpack,
    widen,
)
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.tables import Outline, convert_table, file_bytes, lay_out
from edgeinfer.bundle.writing import MANIFEST, seal
from edgeinfer.core.errors import BundleError, StorageError, UsageError
from edgeinfer.export import exporter
from edgeinfer.export.options import ExportConfig
from edgeinfer.nn.arithmetic import route
from tests.cache import export_checkpoint, made
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
        return open_bundle(
            export_checkpoint(checkpoint(architecture), out, ExportConfig(**options, layout=layout, calibration="none"))
        )

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


PAGE = 4096
MIXED = (("*.experts.1.*", 2), ("*.experts.[24].*", 8), ("*.experts.3.down", 8))
formats = st.tuples(st.sampled_from([2, 3, 4, 8]), st.sampled_from([32, 64, 128]), st.booleans())


def random_matrix(rng: np.random.Generator, shape: QuantizedShape) -> QuantizedMatrix:
    values = rng.integers(0, 1 << shape.bits, (shape.n, shape.blocks, shape.block_size), np.uint8)
    points = rng.integers(0, 1 << shape.bits, (shape.n, shape.blocks), np.uint8)
    scales = rng.random((shape.n, shape.blocks), np.float32)
    zeros = pack(points, shape.bits) if shape.zero_points else None
    return QuantizedMatrix(pack(values, shape.bits), scales, zeros)


def dense(rows: QuantizedMatrix, shape: QuantizedShape) -> np.ndarray:
    return dense_rows(rows, shape)


@given(seed=st.integers(0, 2**32 - 1), all_=st.lists(formats, min_size=1, max_size=4), k=st.integers(1, 300))
def test_widening_changes_no_value(seed: int, all_: list[tuple[int, int, bool]], k: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [QuantizedShape(3, k, *each) for each in all_]
    bits, block, zeros = common_format(shapes)
    target = QuantizedShape(3, k, bits, block, zeros)
    for shape in shapes:
        rows = random_matrix(rng, shape)
        wide = widen(rows, shape, target)
        assert wide.data.shape == (3, target.blocks, block * bits // 8) and wide.scales.shape == (3, target.blocks)
        np.testing.assert_array_equal(dense(wide, target), dense(rows, shape))
        if zeros:
            assert wide.zero_points is not None and unpack(wide.zero_points, bits, target.blocks).max() < 1 << bits


def test_names() -> None:
    found = find_expert(expert_tensor(12, 34, "gate_up"))
    assert found is not None and (found.layer, found.expert, found.part) == (12, 34, "gate_up")
    for other in ("layers.1.mlp.gate_up", "layers.1.mlp.experts.2.router", "xlayers.1.mlp.experts.2.up", "embed"):
        assert find_expert(other) is None


def outlines(widths: list[int], f: int = 64, d: int = 128) -> list[Outline]:
    made = [Outline("embed", (100, d))]
    for expert, bits in enumerate(widths):
        for part, (n, k) in (("gate_up", (2 * f, d)), ("down", (d, f))):
            shape = QuantizedShape(n, k, bits, 64, zero_points=False, paired=part == "gate_up")
            made.append(Outline(expert_tensor(0, expert, part), (n, k), shape if bits < 32 else None))
    return [*made, Outline("head", (100, d), shares="embed")]


def parts_of(table: tuple[TensorEntry, ...], part: str) -> list[TensorEntry]:
    return [t for t in table if t.name.endswith(part) and ".experts." in t.name]


@each_row(("widths", "bits", "zeros"), [([4, 4, 4], 4, False), ([2, 8, 4], 8, True)])
def test_portable_experts_lie_back_to_back_in_one_format(widths: list[int], bits: int, zeros: bool) -> None:
    table = lay_out(outlines(widths), PORTABLE)
    assert [t.name for t in table] == [o.name for o in outlines(widths)]
    for part in ("gate_up", "down"):
        entries = parts_of(table, part)
        assert {(t.bits, t.block_size, t.zero_points is not None) for t in entries} == {(bits, 64, zeros)}
        for blob in ("data", "scales", *(["zero_points"] if zeros else [])):
            blobs = [getattr(t, blob) for t in entries]
            assert [b.offset - blobs[0].offset for b in blobs] == [i * blobs[0].nbytes for i in range(3)]
        assert all(t.interleaved == (part == "gate_up") for t in entries)


def test_native_experts_start_on_pages_of_their_own() -> None:
    table = lay_out(outlines([4, 2, 8]), NATIVE)
    experts = [t for t in table if ".experts." in t.name]
    assert [t.bits for t in experts] == [4, 4, 2, 2, 8, 8]
    assert not any(t.interleaved for t in experts)
    large = [t for t in experts if t.data.nbytes >= PAGE]
    assert large and all(t.data.offset % PAGE == 0 for t in large)


def test_no_two_tensors_share_a_byte() -> None:
    for layout in (NATIVE, PORTABLE):
        spans = sorted(
            (b.offset, b.offset + b.nbytes) for t in lay_out(outlines([2, 4, 8]), layout)[:-1] for b in t.blobs
        )
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_a_portable_table_of_one_width_is_what_a_native_one_converts_to() -> None:
    for widths in ([4, 4], [2, 8], [32, 32]):
        native, portable = (lay_out(outlines(widths), layout) for layout in (NATIVE, PORTABLE))
        assert convert_table(native, PORTABLE) == portable
        assert convert_table(convert_table(portable, NATIVE), PORTABLE) == portable


def test_experts_must_be_quantized_all_or_none() -> None:
    with pytest.raises(UsageError, match="Some experts of layer 0"):
        lay_out(outlines([4, 32]), NATIVE)


def test_experts_of_different_shapes_are_refused() -> None:
    wrong = outlines([4, 4])
    wrong[3] = replace(wrong[3], shape=(64, 128), quantized=QuantizedShape(64, 128, 4, 64, False, True))
    with pytest.raises(BundleError, match="different shapes"):
        lay_out(wrong, PORTABLE)


def test_rows_that_cannot_take_turns_are_refused() -> None:
    portable = parts_of(lay_out(outlines([4, 4]), PORTABLE), "gate_up")[0]
    native = parts_of(lay_out(outlines([4, 4]), NATIVE), "gate_up")[0]
    floats = parts_of(lay_out(outlines([32, 32]), NATIVE), "gate_up")[0]
    assert floats.interleaved
    for entry, change in (
        (native, {"interleaved": True}),
        (portable, {"paired": False}),
        (floats, {"transposed": True, "data": replace(floats.data, shape=floats.data.shape[::-1])}),
    ):
        with pytest.raises(BundleError, match="no halves to interleave"):
            replace(entry, **change)


def make_mixed(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "qwen3-moe")
    config = ExportConfig(bits=4, keep_small=False, bits_for=MIXED, calibration="none")
    exporter.export_checkpoint(folder / "checkpoint", folder / "native", config)


@pytest.fixture(scope="module")
def mixed() -> Bundle:
    """A native bundle whose experts have all widths."""
    return open_bundle(made(make_mixed) / "native")


def test_converting_mixed_widths_keeps_every_value(mixed: Bundle, tmp_path: Path) -> None:
    convert_bundle(mixed, PORTABLE, tmp_path / "portable")
    portable = open_bundle(tmp_path / "portable")
    convert_bundle(portable, NATIVE, tmp_path / "back")
    back = open_bundle(tmp_path / "back")
    assert {t.bits for t in mixed.manifest.tensors if ".experts." in t.name} == {2, 4, 8}
    assert {t.bits for t in back.manifest.tensors if ".experts." in t.name} == {8}
    for tensor in mixed.manifest.tensors:
        wanted = mixed.tensor(tensor.name)
        np.testing.assert_array_equal(portable.tensor(tensor.name), wanted)
        np.testing.assert_array_equal(back.tensor(tensor.name), wanted)


def test_exporting_mixed_widths_in_the_portable_layout_is_converting_them(tmp_path: Path) -> None:
    # All but those of 2 bits, which are vectors in the native layout and 4 bits once converted.
    config = ExportConfig(bits=4, keep_small=False, bits_for=MIXED[1:], calibration="none")
    checkpoint = made(make_mixed) / "checkpoint"
    exported = open_bundle(export_checkpoint(checkpoint, tmp_path / "portable", replace(config, layout=PORTABLE)))
    convert_bundle(
        open_bundle(export_checkpoint(checkpoint, tmp_path / "native", config)), PORTABLE, tmp_path / "converted"
    )
    assert (exported.path / "weights.bin").read_bytes() == (tmp_path / "converted" / "weights.bin").read_bytes()


def test_rows_of_halves_that_take_turns(mixed: Bundle, tmp_path: Path) -> None:
    convert_bundle(mixed, PORTABLE, tmp_path / "portable")
    portable = open_bundle(tmp_path / "portable")
    entry = portable.manifest.tensor(expert_tensor(0, 2, "gate_up"))
    whole = portable.rows(entry, 0, 64)
    for start, stop in ((0, 32), (32, 64), (5, 9), (40, 41), (20, 50), (7, 7)):
        part = portable.rows(entry, start, stop)
        np.testing.assert_array_equal(part.data, whole.data[start:stop])
        np.testing.assert_array_equal(part.scales, whole.scales[start:stop])


def test_a_bundle_without_an_expert_is_refused(mixed: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(mixed.path, tmp_path / "copy")
    manifest = json.loads((copy / MANIFEST).read_text())
    name = expert_tensor(1, 3, "down")
    manifest["tensors"] = [t for t in manifest["tensors"] if t["name"] != name]
    (copy / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=name):
        open_bundle(copy)


def test_sigmoid_shares_choose_within_the_best_groups() -> None:
    random = np.random.default_rng(0)
    moe = MoESpec(
        experts=16, top_k=4, expert_size=8, router="sigmoid", choice_bias=True, groups=4, group_top_k=2, scale=2.5
    )
    scores = random.normal(size=(50, 16)).astype(np.float32)
    bias = (random.random(16) * 0.3).astype(np.float32)
    chosen, weights = route(scores, moe, choice_bias=bias)
    for row, ids, values in zip(scores, chosen, weights, strict=True):
        shares = 1 / (1 + np.exp(-row.astype(np.float64)))
        judged = shares + bias
        ranks = [sum(sorted(judged[start : start + 4])[-2:]) for start in range(0, 16, 4)]
        groups = sorted(range(4), key=lambda group: -ranks[group])[:2]
        expected = sorted((e for e in range(16) if e // 4 in groups), key=lambda e: -judged[e])[:4]
        assert ids.tolist() == expected
        np.testing.assert_allclose(values, shares[expected] / shares[expected].sum() * 2.5, atol=1e-5)
