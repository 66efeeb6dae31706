"""The experts of a layer: how they lie in a weights file, one format for all that changes no value, routing."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.bundle.arithmetic import route
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.layouts import NATIVE, PORTABLE
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
from edgeinfer.bundle.tables import Outline, convert_table, lay_out
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from tests.cache import made
from tests.factories import make_checkpoint
from tests.tables import each_row

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
    config = ExportConfig(bits=4, keep_small=False, bits_for=MIXED)
    export_checkpoint(folder / "checkpoint", folder / "native", config)


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
    config = ExportConfig(bits=4, keep_small=False, bits_for=MIXED[1:])
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
