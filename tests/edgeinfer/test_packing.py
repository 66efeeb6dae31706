"""Packed values come back, and dequantization agrees with a loop that reads bit by bit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from edgeinfer.bundle.packing import blocks_per_row, dequantize, midpoint, pack, packed_bytes, unpack
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
