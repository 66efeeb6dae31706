"""Stored rows and where they lie: codecs against their definition, pages against the contract's index formulas."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import Geometry, KVLayer
from edgeinfer.core.errors import BackendError, BudgetError, UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.paging.codecs import ROW_CODECS, RowCodec, find_row_codec, turn, turn_width
from edgeinfer.runtime.paging.layout import PAGE, LayerGroup, PageLayout
from edgeinfer.runtime.paging.pool import PagePool
from edgeinfer.runtime.system.memory import process_memory, releases_pages

# Of heads: powers of two, multiples of 16 and 32 alone, odd, less than a tile.
SIZES = (64, 128, 80, 96, 33, 6, 256)
# Of the largest channel as it is stored, what a type may be away by: half a step, and what rounding adds.
ERRORS = {"float32": 0.0, "float16": 2**-11, "int8": 0.51 / 127, "int4": 0.56 * 2 / 15}


def hadamard(size: int) -> Floats:
    """Sylvester's matrix, normed."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    normed: Floats = (matrix / np.sqrt(size)).astype(np.float32)
    return normed


def wild(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Rows of many sizes, some of them zero, tiny, huge or not finite."""
    rows = rng.standard_normal(shape).astype(np.float32) * np.float32(10.0) ** rng.integers(-3, 4, (*shape[:-1], 1))
    flat = rows.reshape(-1, shape[-1])
    flat[0] = 0
    flat[1] = 1e-38
    flat[2] = 3e38
    flat[3] = 7.25
    flat[4, -1] = np.nan
    flat[5, 0] = np.inf
    return rows.astype(np.float32)


def test_codecs_are_as_precise_as_their_steps_allow() -> None:
    with pytest.raises(UsageError, match=r"no KV type 'int2'.*float32, float16, int8, int4"):
        find_row_codec("int2")
    rng = np.random.default_rng(1)
    for codec, size in itertools.product(ROW_CODECS.values(), SIZES):
        rows = wild(rng, (5, 7, size))
        stored = codec.encode(rows)
        assert stored.shape == (5, 7, codec.width(size))
        assert stored.dtype == codec.dtype
        assert np.array_equal(codec.join(*codec.split(stored, size)), stored, equal_nan=stored.dtype.kind == "f")
        found, given = codec.decode(stored, size).reshape(-1, size), rows.reshape(-1, size)
        assert np.array_equal(found[0], given[0])
        # A row with one number that is none says so in every channel that was turned with it.
        assert np.isnan(found[4, size - (turn_width(size) if codec.turned else 1) :]).all()
        plain, back = given[6:], found[6:]
        if codec.name == "float16":
            plain = np.clip(plain, -65504, 65504)
        # The error of a turned row is turned too: its length stays, which is at most the root of the size times a step.
        length = np.sqrt(size) if codec.turned else 1.0
        step = np.abs(turn(plain) if codec.turned else plain).max(axis=1, keepdims=True)
        assert (np.abs(back - plain) <= ERRORS[codec.name] * step * length + 1e-7).all()


def test_int8_and_int4_follow_their_definition() -> None:
    assert_turning_is_a_hadamard_matrix_in_blocks()
    rng = np.random.default_rng(2)
    rows = rng.standard_normal((50, 48)).astype(np.float32)
    turned = turn(rows)
    levels, scales = ROW_CODECS["int8"].split(ROW_CODECS["int8"].encode(rows), 48)
    assert scales is not None
    for row, mine, scale in zip(turned, levels, scales, strict=True):
        largest = max(abs(float(x)) for x in row)
        assert scale == np.float32(np.float32(largest) / np.float32(127))
        inverse = np.float32(127) / np.float32(largest)
        assert mine.tolist() == [round(float(np.float32(x * inverse))) for x in row]
    levels, words = ROW_CODECS["int4"].split(ROW_CODECS["int4"].encode(rows), 48)
    assert words is not None
    assert words.shape == (50, 3)
    for row, mine, groups in zip(turned, levels, words, strict=True):
        for group, word in enumerate(groups):
            channels = slice(16 * group, 16 * group + 16)
            wanted = [sixteen_levels(row[channels], i, j) for i in range(3) for j in range(3)]
            best = min(wanted, key=lambda candidate: candidate[2])
            assert (mine[channels].tolist(), int(word)) == best[:2]


def sixteen_levels(x: Floats, i: int, j: int) -> tuple[list[int], int, float]:
    """One candidate of the contract for a group: its levels, its word and its error, number by number."""
    f = np.float32
    low = min(f(0), x.min())
    width = f(max(f(0), x.max()) - low)
    step = min(f(width * f((1 - 0.02 * (i + j)) / 15)), f(65472))
    bits = min(int(np.float16(step).view(np.uint16)) + 16, 0x7BE0) & 0x7FE0
    scale = f(np.uint16(bits).view(np.float16))
    inverse = f(f(1) / scale)
    zero = min(max(round(float(f(f(-f(low + f(width * f(0.02 * i))) * inverse) * f(4)))), 0), 63)
    shift = f(f(zero) * f(0.25))
    levels = [min(max(round(float(f(f(y * inverse) + shift))), 0), 15) for y in x]
    errors = [f(f(y - f((f(q) - shift) * scale)) ** 2) for y, q in zip(x, levels, strict=True)]
    while len(errors) > 1:
        half = len(errors) // 2
        errors = [f(a + b) for a, b in zip(errors[:half], errors[half:], strict=True)]
    return levels, bits << 1 | zero, float(errors[0])


def assert_turning_is_a_hadamard_matrix_in_blocks() -> None:
    rng = np.random.default_rng(3)
    for size, width in ((64, 64), (80, 16), (96, 32), (33, 1), (6, 2), (256, 128)):
        assert turn_width(size) == width
        rows = rng.standard_normal((4, size)).astype(np.float32)
        blocks = rows.reshape(4, -1, width) @ hadamard(width)
        np.testing.assert_allclose(turn(rows), blocks.reshape(4, size), atol=1e-5)
        np.testing.assert_allclose(turn(turn(rows)), rows, atol=1e-5)
        assert np.array_equal(turn(rows.T.copy().T), turn(rows))  # whatever the order in memory


def layouts() -> list[PageLayout]:
    """Each type with heads of all sizes, keys and values alike and not."""
    kinds = list(ROW_CODECS.values())
    pairs = [(size, size) for size in SIZES] + [(96, 64), (20, 48)]
    made = [PageLayout((KVLayer(3, *sizes),) * 2, kind, kind) for kind in kinds for sizes in pairs]
    made += [PageLayout((KVLayer(3, 20, 48),) * 2, kind, kind, weighed=True) for kind in kinds]
    return [*made, PageLayout((KVLayer(2, 64, 40),), find_row_codec("int8"), find_row_codec("float16"))]


def alike(layout: PageLayout) -> tuple[int, LayerGroup]:
    """How many layers there are, and what they are where all have heads of one size."""
    (group,) = layout.groups
    return len(layout.layers), group


def number(codec: RowCodec, part: NDArray[Any], channel: int, at: int, size: int, keys: bool) -> Any:
    """The number that a channel at a position is stored as, by the contract's formulas, from the bytes of a head."""
    tile, place = divmod(at, 16)
    if not keys:
        padded = -(-size // 16) * 16
        if codec.name == "int8":
            return part.view(np.int8)[(at // 4 * padded + channel) * 4 + (0, 2, 1, 3)[at % 4]]
        if codec.packed == 1:
            return part.view(codec.level_dtype)[at * padded + channel]
        run, inside = divmod(channel, 32)
        half = 16 if 32 * run + 32 <= padded else 8
        byte = part[at * (padded // 2) + 16 * run + inside % half]
        return byte >> 4 if inside >= half else byte & 15
    if codec.name in ("float32", "float16"):
        return part.view(codec.level_dtype)[(tile * size + channel) * 16 + place]
    if codec.name == "int8":
        return part.view(np.int8)[((tile * -(-size // 4) + channel // 4) * 16 + place) * 4 + channel % 4]
    byte = part[((tile * -(-size // 8) + channel // 8) * 16 + place) * 4 + channel % 4]
    return byte >> 4 if channel % 8 >= 4 else byte & 15


def test_rows_lie_where_the_contract_says() -> None:
    rng = np.random.default_rng(4)
    for layout in layouts():
        pool = PagePool(layout, 3)
        (layers, group), places = alike(layout), np.array([130, 5, 64, 77])
        key_size, value_size = group.kept.key_size, group.kept.value_size
        stored = [
            codec.encode(rng.standard_normal((layers, group.kept.heads, 4, size)).astype(np.float32))
            for codec, size in ((layout.keys, key_size), (layout.values, value_size))
        ]
        pool.rows.put_stored(places, list(stored[0]), list(stored[1]))
        assert np.array_equal(pool.rows.stored_keys(places), stored[0])
        assert np.array_equal(pool.rows.stored_values(places), stored[1])
        layer, head, row = layers - 1, 1, 3
        page, at = divmod(int(places[row]), PAGE)
        head_bytes = group.key_bytes + group.value_bytes + (256 if layout.weighed else 0)
        start = page * layout.page_bytes + int(layout.array[3 + layer]) + head * head_bytes
        memory = pool.memory[start : start + head_bytes]
        halves = (layout.keys, key_size, memory[: group.key_bytes], stored[0], True)
        for codec, size, part, rows, keys in (
            halves,
            (layout.values, value_size, memory[group.key_bytes :], stored[1], False),
        ):
            levels, scales = codec.split(rows[layer, head, row], size)
            assert [number(codec, part, c, at, size, keys) for c in range(size)] == levels.tolist()
            if scales is not None:
                before = {
                    ("int8", True): 256 * -(-size // 4),
                    ("int4", True): 256 * -(-size // 8),
                    ("int8", False): 64 * (-(-size // 16) * 16),
                    ("int4", False): 32 * (-(-size // 16) * 16),
                }[codec.name, keys]
                each = int(np.prod(scales.shape))
                found = part[before:].view(scales.dtype)[at * each : (at + 1) * each]
                assert np.array_equal(found, scales.ravel())
        assert layout.page_bytes % 4096 == 0
        assert all(offset % 64 == 0 for offset in layout.offsets)


def test_weights_go_with_rows_and_end_with_them() -> None:
    codec, sizes, rng = find_row_codec("int8"), ((2, 20, 48), (3, 16, 16)), np.random.default_rng(6)
    layout = PageLayout(tuple(KVLayer(*each) for each in sizes), codec, codec, weighed=True)
    pool, places = PagePool(layout, 3), np.array([130, 5, 64, 77])
    pool.memory[:] = 255

    def write() -> None:
        for layer, (heads, *widths) in enumerate(sizes):
            pool.rows.write(layer, places, *(rng.standard_normal((heads, 4, w)).astype(np.float32) for w in widths))

    def weights(layer: int, at: NDArray[np.int64]) -> NDArray[np.float32]:  # (n,) -> (n, H)
        return layout.groups[layer].weights(pool.memory.reshape(-1, layout.page_bytes))[at // PAGE, 0, :, at % PAGE]

    write()
    assert not weights(0, places).any() and not weights(1, places).any()
    given = rng.uniform(0, 3, (3, 4)).astype(np.float32)
    pool.rows.weigh(1, places, given)
    assert np.array_equal(weights(1, places), given.T) and not weights(0, places).any()
    pool.rows.copy(places[:2], places[2:])
    assert np.array_equal(weights(1, places[2:]), given.T[:2])
    stored = pool.rows.stored_keys(places), pool.rows.stored_values(places)
    pool.rows.put_stored(places, *stored)
    assert not weights(1, places).any()
    pool.rows.weigh(1, places, given)
    write()
    assert not weights(1, places).any()


def test_padding_is_zero_and_rows_are_copied_as_they_are() -> None:
    for layout in layouts():
        pool = PagePool(layout, 2)
        pool.memory[:] = 255
        layers, group = alike(layout)
        heads, sizes, n = group.kept.heads, (group.kept.key_size, group.kept.value_size), 2 * PAGE
        places = np.arange(n)
        for layer in range(layers):
            pool.rows.write(layer, places, *(np.zeros((heads, n, size), np.float32) for size in sizes))
        keys_of, values_of = group.head_parts(pool.memory.reshape(-1, layout.page_bytes))
        for part, shape, codec, size in (
            (keys_of, group.key_shape, layout.keys, sizes[0]),
            (values_of, group.value_shape, layout.values, sizes[1]),
        ):
            used = int(np.prod(shape)) * np.dtype(codec.level_dtype).itemsize
            if codec.scale_dtype:
                used += PAGE * int(np.prod(codec.scale_shape(size))) * np.dtype(codec.scale_dtype).itemsize
            assert not part[..., :used].any()
        rng = np.random.default_rng(5)
        for layer in range(layers):
            pool.rows.write(layer, places[:6], *(rng.standard_normal((heads, 6, s)).astype(np.float32) for s in sizes))
        both = (pool.rows.stored_keys, pool.rows.stored_values)
        before = [stored(places[:6]) for stored in both]
        pool.rows.copy(places[[1, 3, 5]], places[[0, 1, 100]])
        for stored, old in zip(both, before, strict=True):
            for now, then in zip(stored(places[[0, 1, 100, 2, 3, 4, 5]]), old, strict=True):
                assert np.array_equal(now, then[:, [1, 3, 5, 2, 3, 4, 5]])


def test_layers_of_unequal_heads_lie_beside_each_other() -> None:
    kinds, codec = (KVLayer(2, 48, 20), KVLayer(0, 0, 0), KVLayer(1, 96, 96)), find_row_codec("int8")
    layout = PageLayout((kinds[0], kinds[1], kinds[2], kinds[0]), codec, codec)
    pool, rng, places = PagePool(layout, 2), np.random.default_rng(6), np.array([70, 3])
    given = [
        [codec.encode(rng.standard_normal((kept.heads, 2, size)).astype(np.float32)) for size in sizes]
        if kept.heads
        else [np.zeros((0, 2, 0), np.int8)] * 2
        for kept in layout.layers
        for sizes in [(kept.key_size, kept.value_size)]
    ]
    pool.rows.put_stored(places, [layer[0] for layer in given], [layer[1] for layer in given])
    for part, stored in enumerate((pool.rows.stored_keys(places), pool.rows.stored_values(places))):
        for rows, layer in zip(stored, given, strict=True):
            assert np.array_equal(rows, layer[part])
    keys, values = pool.rows.read(1, places)
    assert keys.shape == values.shape == (0, 2, 0)
    pool.rows.write(3, places, np.zeros((2, 2, 48), np.float32), np.zeros((2, 2, 20), np.float32))
    assert np.array_equal(pool.rows.stored_keys(places)[2], given[2][0]) and not pool.rows.stored_keys(places)[3].any()


def test_a_pool_loses_no_page_and_counts_its_holders() -> None:
    layout = layouts()[5]
    pool, rng = PagePool(layout, 12), np.random.default_rng(6)
    held: list[list[int]] = []
    for _ in range(400):
        what = rng.integers(4)
        if what == 0:
            count = int(rng.integers(1, 5))
            if count > pool.free:
                with pytest.raises(BackendError, match="has no"):
                    pool.take(count)
            else:
                held.append(pool.take(count))
        elif what == 1 and held:
            pages = held[rng.integers(len(held))]
            pool.share(pages)
            held.append(list(pages))
        elif what == 2 and held:
            pool.release(held.pop(rng.integers(len(held))))
        elif what == 3 and held and (pages := held[rng.integers(len(held))]) and pool.free:
            pool.memory.reshape(12, -1)[pages[0], :7] = rng.integers(256)
            mine = pool.own(pages[0])
            assert np.array_equal(pool.memory.reshape(12, -1)[mine], pool.memory.reshape(12, -1)[pages[0]])
            pages[0] = mine
            assert pool.holders(mine) == 1
        counts = [sum(pages.count(page) for pages in held) for page in range(12)]
        assert [pool.holders(page) for page in range(12)] == counts
        assert pool.used == sum(count > 0 for count in counts)
        assert pool.used * layout.page_bytes <= pool.nbytes <= 12 * layout.page_bytes
    for pages in held:
        pool.release(pages)
    pool.trim()
    assert (pool.used, pool.free, pool.nbytes) == (0, 12, 0)
    assert sorted(pool.take(12)) == list(range(12))
    with pytest.raises(BudgetError, match="The KV cache needs"):
        PagePool(PageLayout.of(Geometry(8, 8, 2048, 64, 256, 64), "float32"), 1 << 20)


@pytest.mark.skipif(not releases_pages(), reason="only Linux tells what is in memory, and takes pages back at once")
def test_memory_is_taken_as_pages_are_written_and_goes_back() -> None:
    layout = PageLayout.of(Geometry(8, 8, 24, 4, 64, 64), "float32")
    before = process_memory().anonymous
    pool = PagePool(layout, 1000)
    assert len(pool.memory) == 1000 * layout.page_bytes > 3_000_000_000
    pages = pool.take(20)
    used = 20 * layout.page_bytes
    pool.memory[: max(pages) * layout.page_bytes + layout.page_bytes] = 1
    filled = process_memory().anonymous
    assert used <= filled - before + 4_000_000 <= 1.1 * used + 8_000_000
    pool.release(pages)
    pool.trim()
    assert filled - process_memory().anonymous > 0.9 * used
    assert not pool.memory[:used].any()
