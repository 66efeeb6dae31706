"""Our operators on rows in GGUF's types: right to numpy, segments and pairs to the bit what separate matrices give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgeinfer.bundle.kinds import KINDS, pack_blocks
from edgeinfer.runtime.native.library import NativeKernel
from tests.gguf_blocks import Bytes, random_rows, values_of
from tests.runtime.native.graphs import make_model, open_session, run
from tests.runtime.native.matrices import Floats, linear, swiglu
from tests.tables import each_row

NAMES = ("x", "data", "low", "scales", "zeros", "bias", "norm", "residual", "planes")
ALL = sorted(name for name, kind in KINDS.items() if not kind.floats)
Parts = list[tuple[str, Bytes]]  # kinds and rows


def packed(parts: Parts, k: int, *, paired: bool = False) -> Bytes:
    """The bytes of segments one after the other."""
    tiles = [pack_blocks(kind, rows, k, paired=paired, name="") for kind, rows in parts]
    return np.concatenate([run.reshape(-1) for runs in tiles for run in runs])


def attributes(parts: Parts, k: int) -> dict[str, Any]:
    values: dict[str, Any] = {"N": sum(len(rows) for _, rows in parts), "K": k}
    for index, (kind, rows) in enumerate(parts):
        suffix = f"_{index}" if index else ""
        values |= {f"kind{suffix}": KINDS[kind].number, f"rows{suffix}": len(rows)}
    return values


def product(
    kernel: NativeKernel, parts: Parts, x: Floats, threads: int = 1, *, paired: bool = False, **more: Any
) -> Floats:
    """The operator's output; arrays among the arguments are inputs."""
    arrays = {name: value for name, value in more.items() if isinstance(value, np.ndarray)}
    rest = {name: value for name, value in more.items() if name not in arrays} | {"paired": int(paired)}
    known, k = {"data": packed(parts, x.shape[1], paired=paired)}, x.shape[1]
    model = make_model("LinearLowBit", NAMES, {"x": x} | arrays, known, **attributes(parts, k), **rest)
    return run(open_session(kernel, model, threads), x=x, **arrays)


def block_of(kind: str) -> int:
    return KINDS[kind].block


def close(got: Floats, wanted: Floats) -> bool:
    return got.shape == wanted.shape and bool(np.abs(got - wanted).max() <= 1e-4 * max(1e-3, np.abs(wanted).max()))


@given(
    seed=st.integers(0, 2**32 - 1),
    kinds=st.lists(st.sampled_from(ALL), min_size=1, max_size=3),
    m=st.integers(1, 20),
    threads=st.sampled_from([1, 2]),
    extras=st.sets(st.sampled_from(["bias", "residual"])),
    factor=st.sampled_from([0.0, 0.25, -3.5]),
)
@settings(max_examples=60, deadline=None)
def test_segments_are_what_each_gives_alone(
    kernel: NativeKernel, seed: int, kinds: list[str], m: int, threads: int, extras: set[str], factor: float
) -> None:
    rng = np.random.default_rng(seed)
    k = 256 * int(rng.integers(1, 4))
    parts = [(kind, random_rows(rng, kind, int(rng.integers(1, 90)), k, tame=True)) for kind in kinds]
    ends = np.cumsum([0, *(len(rows) for _, rows in parts)])
    x = rng.standard_normal((m, k), np.float32)
    sizes = {"bias": (ends[-1],), "residual": (m, ends[-1])}
    more: dict[str, Any] = {name: rng.standard_normal(sizes[name], np.float32) for name in sorted(extras)}
    got = product(kernel, parts, x, threads, factor=factor, **more)
    for (kind, rows), start, stop in zip(parts, ends[:-1], ends[1:], strict=True):
        columns = slice(start, stop)
        own: dict[str, Any] = {name: np.ascontiguousarray(array[..., columns]) for name, array in more.items()}
        np.testing.assert_array_equal(product(kernel, [(kind, rows)], x, factor=factor, **own), got[:, columns])
        plain = linear(x, values_of(kind, rows), block_of(kind)) * np.float32(factor or 1)
        assert close(got[:, columns], plain + own.get("bias", np.float32(0)) + own.get("residual", np.float32(0)))
    first = {name: array[:1] if name == "residual" else array for name, array in more.items()}
    np.testing.assert_array_equal(product(kernel, parts, x[:1], factor=factor, **first), got[:1])


@each_row("kind", ALL)
def test_pairs_are_gated_in_the_product(kernel: NativeKernel, kind: str) -> None:
    rng, k = np.random.default_rng(1), 512
    rows = random_rows(rng, kind, 2 * 40, k, tame=True)
    x = rng.standard_normal((5, k), np.float32)
    gate_up = product(kernel, [(kind, rows)], x)
    np.testing.assert_array_equal(product(kernel, [(kind, rows)], x, paired=True), gate_up)
    assert close(product(kernel, [(kind, rows)], x, paired=True, swiglu=1), swiglu(gate_up))


def test_planes_are_of_segments_of_8_bits(kernel: NativeKernel) -> None:
    rng, k = np.random.default_rng(2), 512
    parts = [(kind, random_rows(rng, kind, 50, k, tame=True)) for kind in ("Q4_K", "Q8_0")]
    x = rng.standard_normal((3, k), np.float32)
    both, high = (product(kernel, parts, x, planes=np.array([count], np.int32)) for count in (2, 1))
    np.testing.assert_array_equal(both, product(kernel, parts, x))
    np.testing.assert_array_equal(high[:, :50], both[:, :50])
    codes = parts[1][1].reshape(50, -1, 34)
    middle = (codes[..., 2:].view(np.int8) & -16) + 7.5
    dense = (middle * codes[..., :2].copy().view("<f2").astype(np.float32)).reshape(50, k).astype(np.float32)
    assert close(high[:, 50:], linear(x, dense, 32))


@each_row("kind", sorted(KINDS))
def test_rows_are_looked_up(kernel: NativeKernel, kind: str) -> None:
    rng, k = np.random.default_rng(3), 512
    rows, ids = random_rows(rng, kind, 70, k, tame=True), rng.integers(0, 70, (2, 9))
    names, values = ("ids", "data"), attributes([(kind, rows)], k)
    for factor in (0.0, 27.5):
        known = {"data": packed([(kind, rows)], k)}
        model = make_model("EmbeddingLowBit", names, {"ids": ids}, known, **values, factor=factor)
        wanted = values_of(kind, rows)[ids] * np.float32(factor or 1)
        np.testing.assert_allclose(run(open_session(kernel, model), ids=ids), wanted, rtol=1e-6, atol=1e-7)


@each_row("kind", ["F16", "BF16"])
def test_floats_of_16_bits_are_the_floats_that_they_are(kernel: NativeKernel, kind: str) -> None:
    rng, names = np.random.default_rng(5), ("x", "weight", "bias", "norm", "residual", "layer_mask", "halves")
    for n, k, m, heads in ((1, 1, 1, 1), (70, 100, 7, 1), (300, 1030, 40, 1), (96, 48, 5, 3)):
        rows, x = random_rows(rng, kind, n, k, tame=True), rng.standard_normal((m, heads * k), np.float32)
        given = {"x": x} | ({} if heads > 1 else {"residual": rng.standard_normal((m, n), np.float32)})
        sizes: dict[str, Any] = {"N": n, "K": k, "heads": heads, "factor": 0.75}
        known = {"halves": packed([(kind, rows)], k)}
        own = make_model("LinearFloat", names, given, known, **sizes, kind=KINDS[kind].number)
        plain = make_model("LinearFloat", names, given, {"weight": values_of(kind, rows)}, **sizes, by_output=1)
        got, wanted = (run(open_session(kernel, model, 2), **given) for model in (own, plain))
        np.testing.assert_array_equal(got, wanted)


@given(seed=st.integers(0, 2**32 - 1), kinds=st.tuples(st.sampled_from(ALL), st.sampled_from(ALL)))
@settings(max_examples=25, deadline=None)
def test_experts_are_products_of_their_kinds(kernel: NativeKernel, seed: int, kinds: tuple[str, str]) -> None:
    rng, count, width, inner = np.random.default_rng(seed), 3, 256, 256
    blobs, directory, end = [], [], 0
    parts: list[tuple[Bytes, Bytes]] = []
    for _ in range(count):
        into, out = (
            random_rows(rng, kind, n, 256, tame=True) for kind, n in zip(kinds, (2 * inner, width), strict=True)
        )
        parts.append((into, out))
        row = [inner]
        for kind, rows, paired in ((kinds[0], into, True), (kinds[1], out, False)):
            blobs.append(packed([(kind, rows)], 256, paired=paired))
            row += [-100 - KINDS[kind].number, 32, end, -1, -1, -1]
            end += len(blobs[-1])
        directory.append(row)
    x, ids = rng.standard_normal((6, width), np.float32), rng.integers(0, count, (6, 2))
    given: dict[str, NDArray[Any]] = {"x": x, "ids": ids, "weights": rng.random((6, 2), np.float32)}
    known: dict[str, NDArray[Any]] = {"experts": np.concatenate(blobs), "directory": np.array(directory, np.int64)}
    model = make_model("MoELowBit", (*given, *known), given, known, D=width)
    got = run(open_session(kernel, model, 2), **given)
    wanted = np.zeros_like(x)
    for token, slot in np.ndindex(ids.shape):
        into, out = parts[ids[token, slot]]
        hidden = product(kernel, [(kinds[0], into)], x[token : token + 1], paired=True, swiglu=1)
        wanted[token] += given["weights"][token, slot] * product(kernel, [(kinds[1], out)], hidden)[0]
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"kind": 4}, "GGUF type 4 is not known"),
        ({"rows": 80}, "rows must be from 1"),
        ({"rows": 30, "kind_1": 0}, "GGUF type 0 is not known"),
        ({"K": 511}, "multiple"),
        ({"N": 65}, "instead of"),
        ({"heads": 2, "factor": 1.5}, "plain product"),
        ({"rows": 30, "kind_1": 12, "paired": 1}, "rows of one type"),
    ],
)
def test_damaged_attributes_are_refused(kernel: NativeKernel, change: dict[str, Any], what: str) -> None:
    x = np.zeros((1, 512), np.float32)
    rows = random_rows(np.random.default_rng(4), "Q4_K", 64, 512)
    values = {"N": 64, "K": 512, "kind": 12} | change
    with pytest.raises(Exception, match=what):
        open_session(
            kernel, make_model("LinearLowBit", NAMES, {"x": x}, {"data": packed([("Q4_K", rows)], 512)}, **values)
        )
