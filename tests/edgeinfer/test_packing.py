"""The bytes of numbers: packed values, bfloat16, blocks of cached rows, and the native layout, against plain loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.bundle.codecs import CODECS, Rows
from edgeinfer.bundle.geometry import (
    FLOAT16,
    KV,
    LLAMA_KV,
    PAGED_KV,
    Geometry,
    find_kv_type,
    from_blocks,
    load,
    store,
    to_blocks,
)
from edgeinfer.bundle.layouts import (
    LAYOUTS,
    NATIVE,
    PORTABLE,
    Layout,
    NativeTiles,
    native_parts,
    pack_tiles,
    tile_rows,
    tiles_of,
    unpack_tiles,
)
from edgeinfer.bundle.manifest import TensorEntry
from edgeinfer.bundle.packing import (
    QuantizedMatrix,
    QuantizedShape,
    blocks_per_row,
    dequantize,
    midpoint,
    pack,
    packed_bytes,
    unpack,
)
from edgeinfer.bundle.tables import Outline, file_bytes, lay_out
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.options.load import ONNX_KV_TYPES
from tests.tables import each_row


@given(data=st.data(), bits=st.sampled_from([2, 3, 4, 8]), rows=st.integers(0, 5), count=st.integers(1, 70))
def test_unpack_reverses_pack(data: st.DataObject, bits: int, rows: int, count: int) -> None:
    elements = st.integers(0, 2**bits - 1)
    values = data.draw(hnp.arrays(np.uint8, (rows, count), elements=elements))
    packed = pack(values, bits)
    assert packed.shape == (rows, packed_bytes(count, bits))
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(unpack(packed, bits, count), values)


@each_row(
    ("bits", "values", "packed"),
    [
        (4, [1, 2, 15], [0x21, 0x0F]),
        (2, [1, 2, 3, 0, 1], [0b00111001, 0b01]),
        (3, [1, 2, 7], [0b11010001, 0b1]),
        (8, [7, 200], [7, 200]),
    ],
)
def test_first_value_lies_in_the_lowest_bits(bits: int, values: list[int], packed: list[int]) -> None:
    assert pack(np.array(values, np.uint8), bits).tolist() == packed


def bit(packed: NDArray[np.uint8], bits: int, index: int) -> int:
    """Value `index` of a packed row, read bit by bit."""
    stream = np.unpackbits(packed, bitorder="little")
    return int(sum(int(b) << i for i, b in enumerate(stream[index * bits : (index + 1) * bits])))


@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([2, 3, 4, 8]),
    block=st.sampled_from([32, 64]),
    n=st.integers(1, 3),
    k=st.integers(1, 70),
    zeros=st.booleans(),
)
def test_dequantize_agrees_with_a_loop(seed: int, bits: int, block: int, n: int, k: int, zeros: bool) -> None:
    rng, blocks = np.random.default_rng(seed), blocks_per_row(k, block)
    data = rng.integers(0, 256, (n, blocks, packed_bytes(block, bits))).astype(np.uint8)
    scales = rng.standard_normal((n, blocks)).astype(np.float32)
    points = rng.integers(0, 256, (n, packed_bytes(blocks, bits))).astype(np.uint8) if zeros else None
    actual = dequantize(data, scales, points, bits=bits, block_size=block, k=k)
    assert actual.shape == (n, k)
    for row in range(n):
        for column in range(k):
            b, inner = divmod(column, block)
            zero = midpoint(bits) if points is None else bit(points[row], bits, b)
            assert actual[row, column] == np.float32(bit(data[row, b], bits, inner) - zero) * scales[row, b]


ALL = bfloat16.from_bits(np.arange(0x7F80, dtype=np.uint16))  # every bfloat16 from 0 up, in order


def array(*values: float) -> NDArray[np.float32]:
    return np.array(values, np.float32)


@given(st.floats(0, float(ALL[-1]), width=32))
def test_rounds_to_the_nearest_and_ties_to_even(value: float) -> None:
    rounded = bfloat16.round_nearest(array(value))
    assert bfloat16.is_representable(rounded)
    distances = np.abs(ALL.astype(np.float64) - value)
    nearest = np.flatnonzero(distances == distances.min())
    assert int(bfloat16.to_bits(rounded)[0]) == (nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0])
    np.testing.assert_array_equal(bfloat16.round_nearest(array(-value)), -rounded)


def test_representable_values_stay() -> None:
    np.testing.assert_array_equal(bfloat16.round_nearest(ALL), ALL)
    np.testing.assert_array_equal(bfloat16.from_bits(bfloat16.to_bits(-ALL)), -ALL)
    assert bfloat16.is_representable(ALL)
    assert not bfloat16.is_representable(array(1.0, 1.001))


@given(st.integers(6, len(ALL) - 7), st.integers(-6, 6))
def test_steps_move_away_from_zero(index: int, count: int) -> None:
    for sign in (1, -1):
        stepped = bfloat16.step(sign * ALL[index : index + 1], count)
        np.testing.assert_array_equal(stepped, sign * ALL[index + count : index + count + 1])


numbers = st.floats(-100, 100, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3)


@pytest.mark.gguf
@settings(deadline=None)
@given(rows=arrays(np.float32, (1, 2, 64), elements=numbers), bits=st.sampled_from([8, 4]))
def test_blocks_are_llamas(rows: np.ndarray, bits: int) -> None:
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    kind = {8: gguf.GGMLQuantizationType.Q8_0, 4: gguf.GGMLQuantizationType.Q4_0}[bits]
    stored = to_blocks(rows, bits)
    assert stored.shape == (1, 2, LLAMA_KV["q8_0" if bits == 8 else "q4_0"].width(64))
    # Halves between two integers: numpy rounds them to even, llama.cpp's plain C away from zero.
    wanted = gguf.quants.quantize(rows, kind)
    differing = stored.view(np.int8).astype(np.int16) - wanted.view(np.int8)
    assert np.abs(differing).max() <= 1 if bits == 8 else np.array_equal(stored, wanted)
    assert np.array_equal(from_blocks(stored, bits), gguf.quants.dequantize(stored, kind))


def test_the_types_and_their_meanings() -> None:
    assert list(LLAMA_KV) == ["float32", "float16", "q8_0", "q4_0"] and set(LLAMA_KV) & set(KV) == {"float32"}
    assert [kind.row_bytes(64) for kind in LLAMA_KV.values()] == [256, 128, 68, 36]
    rows = np.linspace(-2, 2, 128, dtype=np.float32).reshape(1, 2, 64)
    half = find_kv_type(FLOAT16)
    assert store(half, rows).dtype == np.float16
    for name, kind in LLAMA_KV.items():
        near = {"q4_0": 0.2, "q8_0": 0.01}.get(name, 1e-3)
        assert np.abs(load(kind, store(kind, rows)) - rows).max() < near


def test_float32_needs_no_copy() -> None:
    rows = np.ones((1, 2, 4), np.float32)
    assert store(KV["float32"], rows) is rows and load(KV["float32"], rows) is rows


def test_every_type_that_can_be_asked_for_is_there() -> None:
    assert PAGED_KV == ONNX_KV_TYPES and set(KV) <= {*PAGED_KV}
    assert tuple(LLAMA_KV) == ("float32", "float16", "q8_0", "q4_0")
    assert [kind.row_bytes(64) for kind in KV.values()] == [256, 64, 32]
    with pytest.raises(UsageError, match=r"no KV type 'int3'.*float32, int8, int4"):
        find_kv_type("int3")


def test_bytes_of_a_token() -> None:
    geometry = Geometry(10, 16, num_layers=3, num_kv_heads=2, head_dim=8, max_positions=10)
    assert geometry.kv_bytes_per_token() == 2 * 3 * 2 * 8 * 4
    assert geometry.kv_bytes_per_token("int8") == 2 * 3 * 2 * 8
    assert geometry.kv_bytes_per_token("int4") == 2 * 3 * 2 * 4


Bytes = NDArray[np.uint8]


@st.composite
def shapes(draw: st.DrawFn, most_rows: int = 100) -> QuantizedShape:
    """Matrices of every remainder of tiles and blocks."""
    block = draw(st.sampled_from([32, 64, 128]))
    paired = draw(st.booleans())
    n = draw(st.integers(1, most_rows // 2)) * 2 if paired else draw(st.integers(1, most_rows))
    k = draw(st.integers(1, 2 * block + 5))
    bits, zeros, inline = draw(st.sampled_from([2, 3, 4, 8])), draw(st.booleans()), draw(st.booleans())
    return QuantizedShape(n, k, bits, block, zeros, paired, inline_scales=inline)


def random_matrix(shape: QuantizedShape, seed: int) -> QuantizedMatrix:
    """As the quantizer makes it: whatever fills up a row's last block stands for zero."""
    rng, top = np.random.default_rng(seed), 1 << shape.bits
    values = rng.integers(0, top, (shape.n, shape.blocks, shape.block_size)).astype(np.uint8)
    zeros = rng.integers(0, top, (shape.n, shape.blocks)).astype(np.uint8)
    if not shape.zero_points:
        zeros[:] = midpoint(shape.bits)
    flat = values.reshape(shape.n, -1)
    flat[:, shape.k :] = zeros[:, -1:]
    scales = bfloat16.round_nearest(rng.standard_normal((shape.n, shape.blocks)).astype(np.float32))
    return QuantizedMatrix(pack(values, shape.bits), scales, pack(zeros, shape.bits) if shape.zero_points else None)


def place(shape: QuantizedShape, n: int) -> tuple[int, int]:
    """Tile and column of row n, as runtime/native/lowbit.h says."""
    if not shape.paired:
        return n // 32, n % 32
    half, row = divmod(n, shape.n // 2)
    return row // 16, half * 16 + row % 16


def literal(matrix: QuantizedMatrix, shape: QuantizedShape) -> NativeTiles:
    """The formulas of runtime/native/lowbit.h, one value at a time."""
    tiles, blocks = tiles_of(shape), shape.blocks
    B = shape.block_size
    bits = min(shape.bits, 4)
    S = B * bits // 8
    values = unpack(matrix.data, shape.bits, B).reshape(shape.n, -1)
    planes = [np.zeros(tiles * blocks * 32 * S, np.uint8) for _ in range(2)]
    for n in range(shape.n):
        t, c = place(shape, n)
        for k in range(shape.k):
            b, j = k // B, k % B
            if shape.bits == 3:
                i, value = j % 32, int(values[n, k])
                h, s, run = i // 16, i % 16 // 4, ((t * blocks + b) * B // 32 + j // 32) * 384 + c * 4 + i % 4
                planes[0][run + 128 * h] |= (value & 3) << 2 * s
                planes[0][run + 256] |= (value >> 2) << (s // 2 * 4 + 2 * h + s % 2)
                continue
            r = j % S
            byte, shift = (t * blocks + b) * 32 * S + r // 4 * 128 + c * 4 + r % 4, j // S * bits
            value = int(values[n, k])
            planes[0][byte] |= (value >> 4 if shape.bits == 8 else value) << shift
            planes[1][byte] |= (value & 15) << shift
    scales, zeros = np.zeros((tiles, blocks, 32), np.uint16), np.zeros((tiles, blocks, 32), np.uint8)
    points = None if matrix.zero_points is None else unpack(matrix.zero_points, shape.bits, blocks)
    for n in range(shape.n):
        t, c = place(shape, n)
        scales[t, :, c] = matrix.scales[n].view(np.uint32) >> 16
        if points is not None:
            zeros[t, :, c] = points[n]
    data, low = (p.reshape(tiles, blocks, 32 * S) for p in planes)
    if shape.inline_scales:
        data = np.concatenate([scales.view(np.uint8), data], axis=2)
    own = None if shape.inline_scales else scales
    return NativeTiles(data, low if shape.bits == 8 else None, own, zeros if points is not None else None)


def fields(tiles: NativeTiles) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """The arrays that are there, by name."""
    yield from ((name, array) for name, array in vars(tiles).items() if array is not None)


def assert_same(actual: QuantizedMatrix, expected: QuantizedMatrix) -> None:
    np.testing.assert_array_equal(actual.data, expected.data)
    np.testing.assert_array_equal(actual.scales, expected.scales)
    assert (actual.zero_points is None) == (expected.zero_points is None)
    if actual.zero_points is not None and expected.zero_points is not None:
        np.testing.assert_array_equal(actual.zero_points, expected.zero_points)


def rows_of(matrix: QuantizedMatrix) -> Rows:
    """The matrix, as a codec asks for it."""

    def rows(start: int, stop: int) -> QuantizedMatrix:
        assert 0 <= start <= stop <= len(matrix.data)
        zeros = None if matrix.zero_points is None else matrix.zero_points[start:stop]
        return QuantizedMatrix(matrix.data[start:stop], matrix.scales[start:stop], zeros)

    return rows


def write_tensor(path: Path, matrix: QuantizedMatrix, shape: QuantizedShape, layout: Layout) -> TensorEntry:
    """Writes the matrix as the only tensor of a weights file."""
    (entry,) = lay_out([Outline("matrix", (shape.n, shape.k), shape)], layout)
    with path.open("wb") as file:
        CODECS[layout].write(file, entry, rows_of(matrix))
    assert path.stat().st_size == file_bytes([entry])
    return entry


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 2**32 - 1))
def test_bytes_are_where_the_formula_says(shape: QuantizedShape, seed: int) -> None:
    matrix = random_matrix(shape, seed)
    packed, expected = pack_tiles(matrix, shape), literal(matrix, shape)
    parts = native_parts(shape)
    assert {name: (a.dtype.name, a.shape) for name, a in fields(packed)} == parts
    for (name, actual), (_, wanted) in zip(fields(packed), fields(expected), strict=True):
        np.testing.assert_array_equal(actual, wanted, err_msg=name)
    assert_same(unpack_tiles(packed, shape, 0), matrix)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_kind_of_matrix(bits: int, block: int, zeros: bool, paired: bool) -> None:
    shape = QuantizedShape(70, block + 3, bits, block, zeros, paired)
    matrix = random_matrix(shape, 0)
    packed = pack_tiles(matrix, shape)
    for (_, actual), (_, wanted) in zip(fields(packed), fields(literal(matrix, shape)), strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert_same(unpack_tiles(packed, shape, 0), matrix)


@settings(max_examples=60, deadline=None)
@given(shape=shapes(300), seed=st.integers(0, 2**32 - 1), data=st.data())
def test_a_run_of_tiles_is_that_run_of_the_whole(shape: QuantizedShape, seed: int, data: st.DataObject) -> None:
    matrix = random_matrix(shape, seed)
    whole = pack_tiles(matrix, shape)
    first = data.draw(st.integers(0, tiles_of(shape) - 1))
    last = data.draw(st.integers(first + 1, tiles_of(shape)))
    rows = np.concatenate([np.arange(*run) for run in tile_rows(shape, first, last)])
    zeros = None if matrix.zero_points is None else matrix.zero_points[rows]
    part = QuantizedMatrix(matrix.data[rows], matrix.scales[rows], zeros)
    packed = pack_tiles(part, shape)
    for (_, actual), (_, wanted) in zip(fields(packed), fields(whole), strict=True):
        np.testing.assert_array_equal(actual, wanted[first:last])
    assert_same(unpack_tiles(packed, shape, first), part)


def test_packing_leaves_the_rows_alone() -> None:
    shape = QuantizedShape(5, 40, 8, 32, False)
    matrix = random_matrix(shape, 0)
    before = matrix.data.copy()
    pack_tiles(matrix, shape)
    np.testing.assert_array_equal(matrix.data, before)


@settings(max_examples=60, deadline=None)
@given(shape=shapes(300), seed=st.integers(0, 2**32 - 1), layout=st.sampled_from(LAYOUTS), data=st.data())
def test_any_rows_come_back_from_a_file(shape: QuantizedShape, seed: int, layout: Layout, data: st.DataObject) -> None:
    if layout == PORTABLE and shape.bits == 3:
        shape = replace(shape, bits=4)  # there are no 3 bits in that layout
    matrix = random_matrix(shape, seed)
    start = data.draw(st.integers(0, shape.n - 1))
    stop = data.draw(st.integers(start + 1, shape.n))
    with TemporaryDirectory() as folder:
        path = Path(folder, "weights.bin")
        entry = write_tensor(path, matrix, shape, layout)
        assert_same(CODECS[layout].read(path, entry, start, stop), rows_of(matrix)(start, stop))


@each_row("layout", LAYOUTS)
def test_runs_shorter_than_the_matrix_join(layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.bundle.codecs._RUN_VALUES", 4096)
    for paired in (False, True):
        shape = QuantizedShape(330, 100, 4, 32, True, paired)
        matrix = random_matrix(shape, 1)
        entry = write_tensor(tmp_path / "weights.bin", matrix, shape, layout)
        assert_same(CODECS[layout].read(tmp_path / "weights.bin", entry, 0, 330), matrix)


@each_row("layout", LAYOUTS)
def test_scales_between_two_bfloat16_are_refused(layout: Layout, tmp_path: Path) -> None:
    shape = QuantizedShape(40, 64, 4, 32, False)
    matrix = random_matrix(shape, 0)
    matrix.scales[39, 1] = np.float32(1.001)
    with pytest.raises(BundleError, match=r"matrix has scales that are not bfloat16\. Export"):
        write_tensor(tmp_path / "weights.bin", matrix, shape, layout)


def test_tables_of_both_layouts_place_blobs_on_pages_and_lines() -> None:
    large, small = QuantizedShape(128, 128, 8, 32, True, True), QuantizedShape(3, 5, 2, 32, False)
    outlines = [
        Outline("small", (3, 5), small),
        Outline("embed", (128, 128), large),
        Outline("norm", (7,)),
        Outline("head", (128, 128), shares="embed"),
    ]
    for layout in (NATIVE, PORTABLE):
        table = {t.name: t for t in lay_out(outlines, layout)}
        assert list(table) == ["small", "embed", "norm", "head"]
        assert table["head"].blobs == table["embed"].blobs
        blobs = [b for name in ("small", "embed", "norm") for b in table[name].blobs]
        assert all(b.offset % (4096 if b.nbytes >= 4096 else 64) == 0 for b in blobs)
        spans = sorted((b.offset, b.offset + b.nbytes) for b in blobs)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert file_bytes(table.values()) == spans[-1][1]
