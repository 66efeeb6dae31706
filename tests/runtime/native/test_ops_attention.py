"""edgeinfer.Attention in sessions of ONNX Runtime: right to numpy, refusing what is malformed before it writes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.codecs import ROW_CODECS
from edgeinfer.runtime.paging.layout import PAGE, PageRows
from tests.runtime.native.attention_oracle import Doubles, Floats, Shape, Weights, attend, make_layout, prepared
from tests.runtime.native.attention_runs import PLAIN, Node, Runner, Store, make_weights, small
from tests.runtime.native.graphs import run
from tests.tables import each_row

TYPES = tuple(ROW_CODECS)
# What a row of each type may lose of its length, times the root of its channels: half a step of its greatest channel.
# Of int4, whose zero point is rounded too, 0.0611 was the most of 1.8 million rows of two channels.
LOSS = {"float32": 1e-7, "float16": 5e-4, "int8": 0.51 / 127, "int4": 0.065}


def check_stored(
    store: Store, shape: Shape, nodes: list[Node], runner: Runner, rows: list[tuple[Doubles, Doubles, Doubles]]
) -> None:
    """The pool holds the keys and values of every row, up to the rounding of its types."""
    tables, types = runner.tables(store, nodes), (store.layout.keys.name, store.layout.values.name)
    places = np.concatenate([tables.places(row, tables.path(row)[-1:]) for row in range(len(nodes))])
    held = PageRows(store.layout, store.memory).read(shape.layer, places)
    for part, kind, wanted in zip(held, types, zip(*(row[1:] for row in rows), strict=True), strict=True):
        rows_wanted = np.stack(wanted, axis=1)  # (kv_heads, S, size)
        lost, length = (np.linalg.norm(each, axis=2) for each in (part - rows_wanted, rows_wanted))
        # Scales of int4 have few bits: below 2e-6 they are 0, as are the numbers of a group that small.
        least = 2e-5 if kind == "int4" else 1e-6
        assert (lost <= LOSS[kind] * np.sqrt(part.shape[2]) * length + least).all(), kind


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Shape, str, bool]:
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 7]))
    key = draw(st.sampled_from([1, 2, 7, 16, 20, 40, 64, 80]))
    rotary = draw(st.sampled_from([0, key // 2 * 2, key // 4 * 2]))
    shape = Shape(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        key_size=key,
        value_size=draw(st.sampled_from([1, 3, 16, 24, 48, 64, 72])),
        layer=draw(st.sampled_from([0, 1])),
        rotary=rotary,
        interleaved=draw(st.booleans()),
        window=draw(st.sampled_from([0, 0, 1, 30, 64, 200])),
        scale=draw(st.sampled_from([0.0, 0.2])),
        softcap=draw(st.sampled_from([0.0, 0.0, 2.0])),
    )
    return shape, draw(st.sampled_from(["", "head", "whole"])), draw(st.booleans())


def drawn_rows(rng: np.random.Generator, store: Store, width: int, lengths: list[int]) -> list[list[Node]]:
    """Passes that fill each sequence to its length, then a pass of trees, its rows in any order."""
    passes: list[list[Node]] = []
    for sequence, length in enumerate(lengths):
        done = 0
        while done < length:
            stop = min(length, done + int(rng.integers(1, 200)))
            values = rng.standard_normal((stop - done, width), np.float32)
            passes.append([Node(sequence, tuple(range(s + 1)), values[s - done], s) for s in range(done, stop)])
            done = stop
    tree: list[Node] = []
    for sequence, length in enumerate(lengths):
        paths: list[tuple[int, ...]] = [tuple(range(length))]
        for slot in range(length, min(length + int(rng.integers(1, 9)), store.pages.shape[1] * PAGE)):
            path = (*paths[rng.integers(len(paths))], slot)
            paths.append(path)
            tree.append(Node(sequence, path, rng.standard_normal(width, np.float32), len(path) - 1))
    return [*passes, [tree[i] for i in rng.permutation(len(tree))]]


def compare(
    kernel: NativeKernel,
    seed: int,
    drawn: tuple[Shape, str, bool],
    types: tuple[str, str],
    lengths: list[int],
    threads: int,
) -> None:
    """Passes that fill sequences, then one of trees, whose results are numpy's."""
    rng = np.random.default_rng(seed)
    shape, norm, sinks = drawn
    weights = make_weights(rng, shape, norm, sinks)
    layout = make_layout(shape, *types, layers=2, weighed=seed % 2 > 0)
    store = Store.of(layout, len(lengths), 320, rng)
    runner = Runner(kernel, shape, weights, threads)
    for nodes in drawn_rows(rng, store, shape.width, lengths):
        if layout.weighed:
            # What rows weighed before counts for those that are not written by this pass.
            store.weights[...] = rng.uniform(0, 3, store.weights.shape)
        got = runner(store, nodes)
        rows = list(prepared(shape, weights, np.stack([n.values for n in nodes]), [n.position for n in nodes]))
        check_stored(store, shape, nodes, runner, rows)
    wanted = attend(shape, weights, layout, store.memory, runner.tables(store, nodes), [q for q, _, _ in rows])
    assert got.shape == wanted.shape
    # Sums are in float32, what int8 values are multiplied by has 16 bits, and a channel of a query that differs in its
    # last bit may be rounded to another int8.
    limit = 1e-3 if types[1] == "int8" else 5e-6
    limit = 2e-2 if types[0] == "int8" and (norm or shape.rotary) else limit
    assert np.abs(got - wanted).max() <= limit * max(1, np.abs(wanted).max())
    assert not np.isnan(got).any()


cases = given(
    seed=st.integers(0, 2**32 - 1),
    drawn=shapes(),
    types=st.tuples(st.sampled_from(TYPES), st.sampled_from(TYPES)),
    lengths=st.lists(st.sampled_from([0, 1, 63, 64, 65, 190, 300]), min_size=1, max_size=3),
    threads=st.sampled_from([1, 2]),
)


@each_row("kind", TYPES)
def test_shared_caches_are_read_and_not_written(kernel: NativeKernel, kind: str) -> None:
    rng = np.random.default_rng(1)
    shape = replace(PLAIN, rotary=16, window=30)
    weights = make_weights(rng, shape, "head")
    store = Store.of(make_layout(shape, kind, kind), 1, 128, rng)
    values = rng.standard_normal((70, shape.width), np.float32)
    nodes = [Node(0, tuple(range(row + 1)), values[row], row) for row in range(70)]
    wanted, written = Runner(kernel, shape, weights)(store, nodes), store.memory.copy()
    queries = [replace(node, values=node.values[: shape.heads * shape.key_size]) for node in nodes]
    reader = Runner(kernel, replace(shape, shared=True), replace(weights, k_norm=None), threads=2)
    assert np.array_equal(reader(store, queries), wanted) and np.array_equal(store.memory, written)


@cases
@settings(max_examples=15, deadline=None)
def test_agrees_with_numpy(kernel: NativeKernel, **drawn: Any) -> None:
    compare(kernel, **drawn)


@pytest.mark.slow
@cases
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_agrees_with_numpy_in_many_cases(kernel: NativeKernel, **drawn: Any) -> None:
    compare(kernel, **drawn)


def test_rows_are_stored_with_the_bits_of_the_codecs(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(4)
    for kind, key, value in [
        (kind, *sizes) for kind in TYPES for sizes in ((1, 1), (20, 24), (64, 80), (128, 40), (64, 512))
    ]:
        shape = Shape(heads=1, kv_heads=1, key_size=key, value_size=value)
        rows = rng.standard_normal((130, key + shape.width), np.float32)[:, key:]
        rows[::7] *= np.exp(rng.uniform(-90, 86, (19, 1))).astype(np.float32)  # denormal to beyond any half
        rows[::11] = np.rint(rows[::11] * 4)  # ties
        rows[5], rows[6, -3:], rows[7, key] = 0, 1e-38, np.inf
        rows[8, -1], rows[9, key], rows[12] = np.nan, -np.inf, 3
        store = Store.of(make_layout(shape, kind, kind), 1, 130)
        wanted = store.copy()
        Runner(kernel, shape)(store, [Node(0, tuple(range(s + 1)), row) for s, row in enumerate(rows)])
        keys, values = rows[None, :, key : 2 * key], rows[None, :, 2 * key :]
        PageRows(wanted.layout, wanted.memory).write(0, np.arange(130), keys, values)
        assert np.array_equal(store.memory, wanted.memory), (kind, key, value)


@each_row("interleaved", (False, True))
def test_keys_of_few_bits_are_stored_without_what_their_bias_gives_all(kernel: NativeKernel, interleaved: bool) -> None:
    rng, shape = np.random.default_rng(12), replace(PLAIN, key_size=24, rotary=16, interleaved=interleaved)
    speeds = np.array([2, 1, 0.5, 0.3, 0.1, 0.05, 1e-6, 1e-7])
    angles = np.arange(80)[:, None] * speeds
    plain = Weights(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))
    channels = [12, 13, 14, 15] if interleaved else [6, 7, 14, 15]
    keys = np.zeros((shape.kv_heads, shape.key_size), np.float32)
    keys[:, [*channels, *range(16, 24)]] = rng.uniform(-300, 300, (shape.kv_heads, 12))
    bias = np.zeros(shape.width, np.float32)
    start = shape.heads * shape.key_size
    bias[start : start + keys.size] = keys.ravel()
    biased = replace(plain, qkv_bias=bias)
    values = rng.standard_normal((80, shape.width), np.float32) + bias
    nodes = [Node(0, tuple(range(s + 1)), values[s], s) for s in range(80)]
    whole, lost = Store.of(make_layout(shape, "float32", "float32"), 1, 80), {}
    wanted = Runner(kernel, shape, plain)(whole, nodes)
    written = PageRows(whole.layout, whole.memory).read_keys(0, np.arange(80))
    for kind, (still, weights) in product(TYPES, ((6, biased), (0, plain))):
        store = Store.of(make_layout(shape, kind, kind), 1, 80)
        got = Runner(kernel, replace(shape, still=still), weights)(store, nodes)
        lost[kind, still] = np.abs(got - wanted).max()
        centres = {0: keys[:, None]} if still else {}
        rows = PageRows(store.layout, store.memory, centres)
        read, same = rows.read_keys(0, np.arange(80)), store.memory.copy()
        rows.write_keys(0, np.arange(80), written)
        if kind != "float16":  # read and written again, rows are the kernel's to the last bit
            assert np.array_equal(store.memory, same), kind
        assert np.abs(read - written).max() < (0.6 if still else 60), kind
    assert lost["float32", 6] == 0 and lost["float16", 6] == lost["float16", 0]
    assert lost["int8", 6] < lost["int8", 0] / 4 and lost["int4", 6] < lost["int4", 0] / 2, lost


def test_a_weighed_row_counts_as_so_many_equal_ones(kernel: NativeKernel) -> None:
    rng, shape = np.random.default_rng(8), Shape(6, 2, 20, 24)
    values = rng.standard_normal((12, shape.width), np.float32)
    counts = np.array([1, 3, 1, 5, 1, 1, 2, 1, 1, 4, 1, 1])  # of the last, which is asked, one
    for kind in ROW_CODECS:
        layout = make_layout(shape, kind, kind, weighed=True)
        many, few = Store.of(layout, 1, 64), Store.of(layout, 1, 64)
        runner = Runner(kernel, shape)
        every = np.repeat(np.arange(12), counts)
        whole = runner(many, [Node(0, tuple(range(i + 1)), values[row], i) for i, row in enumerate(every)])
        runner(few, [Node(0, tuple(range(i + 1)), values[i], i) for i in range(11)])
        few.weights[0, 0, :, :11] = np.log(counts[:11])
        (last,) = runner(few, [Node(0, tuple(range(12)), values[11], 11)])
        np.testing.assert_allclose(last, whole[-1], atol=1e-3 if kind == "int8" else 5e-6)


def test_what_is_not_finite_reaches_only_the_rows_that_see_it(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(6)
    shape = replace(PLAIN, window=40)
    runner = Runner(kernel, shape)
    values = rng.standard_normal((100, shape.width), np.float32)
    start = shape.heads * 16
    # A key of row 20, a value of row 21, both in kv head 1; a query of row 90, head 0.
    values[20, start + 16 + 3], values[21, start + 48 + 3], values[90, 2] = np.inf, np.nan, np.nan
    for kind in TYPES:
        store = Store.of(make_layout(shape, kind, kind), 2, 200)
        y = runner(store, [Node(0, tuple(range(s + 1)), values[s]) for s in range(100)]).reshape(100, 4, 16)
        hurt: NDArray[np.bool_] = np.any(~np.isfinite(y), axis=2)
        wanted = np.zeros((100, 4), bool)
        wanted[20 : 21 + 40, 2:] = True
        wanted[90, 0] = True
        # A score of minus infinity is nothing, and float16 stores its greatest number for infinity.
        if kind in ("float32", "float16"):
            hurt[20] = wanted[20]
        np.testing.assert_array_equal(hurt, wanted, err_msg=kind)


def adversarial(rng: np.random.Generator, shape: Shape) -> dict[str, Floats]:
    """Rows (S, width) whose scores or values are hard on floating point."""
    rows, keys = 120, shape.heads * shape.key_size
    plain = rng.standard_normal((rows, shape.width), np.float32)
    huge, tiny, apart = plain.copy(), plain.copy(), plain.copy()
    huge[:, :keys] *= np.float32(1e15)  # one position takes all
    tiny[:, keys:] *= np.float32(1e-38)
    apart[::2, keys:] *= np.float32(-3e4)
    # Positions of one block lie far below those of the next, and the other way round.
    steps = plain * np.float32(0.1) + np.repeat([0, 90, -90], 40)[:, None].astype(np.float32)
    return {
        "zeros": np.zeros_like(plain),
        "equal": np.full_like(plain, 2.5),
        "signs": np.sign(plain) * np.float32(7),
        **{"huge": huge, "tiny": tiny, "apart": apart, "steps": steps, "outlier": plain * (1 + 2000 * (plain > 2.5))},
    }


def test_adversarial_values_are_as_right_as_others(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(8)
    shape = replace(PLAIN, key_size=24, value_size=20)
    positions = range(120)
    for sinks in (None, np.array([1e30, -1e30, -np.inf, 0], np.float32)):
        weights = Weights(sinks=sinks)
        runner = Runner(kernel, shape, weights)
        for (name, qkv), kind in product(adversarial(rng, shape).items(), TYPES):
            if kind == "int8" and name in ("huge", "apart", "steps", "outlier"):
                continue  # a query rounded to int8 may prefer another position then
            store = Store.of(make_layout(shape, kind, kind), 1, 120)
            nodes = [Node(0, tuple(range(s + 1)), qkv[s], s) for s in positions]
            got, queries = runner(store, nodes)[::9], [q for q, _, _ in prepared(shape, weights, qkv, positions)]
            tables = runner.tables(store, nodes[::9])
            wanted = attend(shape, weights, store.layout, store.memory, tables, queries[::9])
            greatest = np.abs(qkv[:, -shape.kv_heads * shape.value_size :]).max()
            assert np.isfinite(got).all(), (name, kind)
            # Scores of thousands are known to a few ten-thousandths in float32.
            worst, limit = np.abs(got - wanted).max(), 1e-2 if name in ("apart", "steps", "outlier") else 1e-4
            assert worst <= limit * greatest + 1e-37, (name, kind, worst, greatest)


def test_a_pass_that_was_ended_leaves_nothing_torn(kernel: NativeKernel) -> None:
    runner, store, inputs = small(kernel)
    clean = store.copy()
    wanted = run(runner.session, **inputs)
    options = ort.RunOptions()
    options.terminate = True
    with pytest.raises(Exception, match="terminate"):
        runner.session.run(None, inputs | {"qkv": inputs["qkv"] + 1}, options)
    # Whatever the ended pass had written, its rows are written again.
    np.testing.assert_array_equal(run(runner.session, **inputs), wanted)
    np.testing.assert_array_equal(store.memory, clean.memory)
