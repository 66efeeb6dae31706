"""MoELowBit in sessions of ONNX Runtime: right to numpy, rows on their own, and cold experts left on disk."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from edgeinfer.nn.arithmetic import gate_up, inner_values
from edgeinfer.runtime.native.binding import PackedMatrix
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.system.memory import MappedFile
from tests.runtime.native.graphs import make_model, open_session, run
from tests.runtime.native.matrices import Floats, RandomMatrix, linear, make_matrix, silu, swiglu
from tests.tables import each_row

NAMES = ("x", "expert_ids", "expert_weights", "experts", "directory", "residual", "planes", "up_bias", "down_bias")
ALIGNMENT = 64
Given = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Experts:
    """Experts as matrices, and as the operator takes them."""

    width: int
    matrices: list[tuple[RandomMatrix, RandomMatrix]]  # gate_up (2 F, D), or up (F, D), and down (D, F)
    blob: NDArray[np.uint8]
    directory: NDArray[np.int64]  # (E, 13)
    gated: bool = True

    @property
    def known(self) -> Given:
        """The constants."""
        return {"experts": self.blob, "directory": self.directory}


def make_experts(
    rng: np.random.Generator,
    width: int,
    inner: list[int],
    alignment: int = ALIGNMENT,
    *,
    gated: bool = True,
    e2m1: bool = False,
    vectors: bool = False,
) -> Experts:
    """Experts of these inner widths, each with bits and blocks of its own, or all of E2M1 or of vectors."""
    matrices, directory, parts, end = [], [], [], 0

    def append(array: NDArray[Any] | None) -> int:
        nonlocal end
        if array is None:
            return -1
        data = array.view(np.uint8)
        parts.append(np.zeros(-end % alignment, np.uint8))
        start = end + len(parts[-1])
        parts.append(data)
        end = start + len(data)
        return start

    def describe(packed: PackedMatrix) -> list[int]:
        offsets = [append(array) for array in (packed.data, packed.low, packed.scales, packed.zeros)]
        return [-4 if e2m1 else -2 if packed.vectors else packed.bits, packed.block, *offsets]

    for f in inner:
        formats = [(int(rng.choice([2, 4, 8])), int(rng.choice([32, 64, 128])), bool(rng.integers(2))) for _ in "ab"]
        (bits, block, zeros), (bits2, block2, zeros2) = _alike(e2m1, vectors) or formats
        rows = 2 * f if gated else f
        gate_up = make_matrix(rng, rows, width, bits=bits, block=block, zeros=zeros, paired=gated, e2m1=e2m1)
        down = make_matrix(rng, width, f, bits=bits2, block=block2, zeros=zeros2, e2m1=e2m1)
        matrices.append((gate_up, down))
        directory.append([f, *describe(gate_up.packed), *describe(down.packed)])
    return Experts(width, matrices, np.concatenate(parts), np.array(directory, np.int64), gated)


def _alike(e2m1: bool, vectors: bool) -> list[tuple[int, int, bool]]:
    """The format of both matrices, of every expert; nothing where each has its own."""
    return [(4, 32, False)] * 2 if e2m1 else [(-2, 32, False)] * 2 if vectors else []


def expected(
    experts: Experts, given: Given, *, clamped: bool = False, squared: bool = False, gelu: bool = False
) -> Floats:
    """The mixture, token by token and slot by slot."""
    high = given.get("planes", np.array([2]))[0] == 1
    x, ids, weights = given["x"], given["expert_ids"], given["expert_weights"]
    y = np.zeros_like(x)
    alone = partial(inner_values, "relu2") if squared else silu
    paired = clamped_swiglu if clamped else gated_gelu if gelu else swiglu
    for token in range(len(x)):
        for slot in range(ids.shape[1]):
            if weights[token, slot] == 0:
                continue
            expert = ids[token, slot]
            gate_up, down = experts.matrices[expert]
            into, out = (m.high if high and m.packed.bits == 8 else m.dense for m in (gate_up, down))
            inner = linear(x[token : token + 1], into, gate_up.packed.block) + bias_of(given, "up_bias", expert)
            hidden = paired(inner) if experts.gated else alone(inner)
            result = linear(hidden, out, down.packed.block) + bias_of(given, "down_bias", expert)
            y[token] += weights[token, slot] * result[0]
    return y + given.get("residual", np.float32(0))


def bias_of(given: Given, name: str, expert: int) -> Any:
    return given[name][expert] if name in given else 0


def clamped_swiglu(inner: Floats) -> Floats:  # (M, 2 F) -> (M, F)
    return gate_up("swiglu_oai", *np.split(inner, 2, axis=1))


def gated_gelu(inner: Floats) -> Floats:  # (M, 2 F) -> (M, F)
    return gate_up("gelu_tanh", *np.split(inner, 2, axis=1))


def draw(rng: np.random.Generator, experts: Experts, tokens: int, slots: int) -> Given:
    """Tokens with what a router says of them."""
    x = rng.standard_normal((tokens, experts.width), np.float32)
    ids = rng.integers(0, len(experts.matrices), (tokens, slots))
    return {"x": x, "expert_ids": ids, "expert_weights": rng.random((tokens, slots), np.float32)}


def model_of(experts: Experts, given: Given, **more: Any) -> onnx.ModelProto:
    """A model of one mixture."""
    return make_model("MoELowBit", NAMES, given, experts.known, D=experts.width, ungated=int(not experts.gated), **more)


@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 150),
    inner=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    tokens=st.integers(1, 20),
    slots=st.integers(1, 4),
    residual=st.booleans(),
    kind=st.sampled_from(["gated", "gelu", "silu", "relu2"]),
    planes=st.sampled_from([0, 1, 2]),
    threads=st.sampled_from([1, 3]),
)
@settings(max_examples=60, deadline=None)
def test_agrees_with_numpy(
    kernel: NativeKernel,
    seed: int,
    width: int,
    inner: list[int],
    tokens: int,
    slots: int,
    residual: bool,
    kind: str,
    planes: int,
    threads: int,
) -> None:
    rng, kinds = np.random.default_rng(seed), {"squared": kind == "relu2", "gelu": kind == "gelu"}
    experts = make_experts(rng, width, inner, gated=kind in ("gated", "gelu"))
    given = draw(rng, experts, tokens, slots)
    if planes:
        given["planes"] = np.array([planes], np.int32)
    if residual:
        given["residual"] = rng.standard_normal(given["x"].shape, np.float32)
    model = model_of(experts, given, **{name: int(chosen) for name, chosen in kinds.items()})
    got = run(open_session(kernel, model, threads), **given)
    wanted = expected(experts, given, **kinds)
    # A hidden value a rounding apart may be quantized to the neighbouring integer.
    assert np.abs(got - wanted).max() <= 2e-2 * max(1, np.abs(wanted).max())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("gated", ["", "inner", "outer"])
def test_a_row_does_not_depend_on_its_company(kernel: NativeKernel, threads: int, gated: str) -> None:
    rng = np.random.default_rng(1)
    experts = make_experts(rng, 300, [200, 120, 64, 33, 250])
    given = draw(rng, experts, 31, 3)
    session = open_session(kernel, model_of(experts, given, gated=gated), threads)
    runs = {"runs": np.array([True])} if gated else {}
    together = run(session, **given, **runs)
    assert np.abs(together - expected(experts, given)).max() <= 2e-2 * np.abs(together).max()
    for start, stop in ((0, 1), (1, 3), (3, 31)):
        part = {name: array[start:stop] for name, array in given.items()}
        np.testing.assert_array_equal(run(session, **part, **runs), together[start:stop])
    order = rng.permutation(31)
    shuffled = {name: array[order] for name, array in given.items()}
    np.testing.assert_array_equal(run(session, **shuffled, **runs), together[order])


@each_row(("clamped", "e2m1"), [(False, False), (True, False), (True, True)])
def test_experts_add_biases(kernel: NativeKernel, clamped: bool, e2m1: bool) -> None:
    rng = np.random.default_rng(7)
    experts = make_experts(rng, 70, [45] * 5, e2m1=e2m1)
    given = draw(rng, experts, 12, 3)
    given["x"] *= 8  # Far enough that both factors are clamped.
    given["up_bias"] = rng.standard_normal((5, 90), np.float32)
    given["down_bias"] = rng.standard_normal((5, 70), np.float32)
    got = run(open_session(kernel, model_of(experts, given, clamped=int(clamped))), **given)
    wanted = expected(experts, given, clamped=clamped)
    assert np.abs(got - wanted).max() <= 2e-2 * np.abs(wanted).max()
    wrong = given | {"up_bias": given["up_bias"][:, 1:]}
    with pytest.raises(Exception, match="up_bias has 445 elements instead of 450"):
        run(open_session(kernel, model_of(experts, wrong)), **wrong)


def test_experts_of_vectors(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(11)
    experts = make_experts(rng, 64, [96, 64, 32, 128], vectors=True)
    given = draw(rng, experts, 12, 3)
    got, wanted = run(open_session(kernel, model_of(experts, given)), **given), expected(experts, given)
    assert np.abs(got - wanted).max() <= 2e-2 * np.abs(wanted).max()
    experts.directory[1, 6] = 0
    with pytest.raises(Exception, match="expert 1 has parts that do not fit its bits"):
        run(open_session(kernel, model_of(experts, given)), **given)


def test_pairs_of_no_weight_are_skipped_whatever_their_ids(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(6)
    experts = make_experts(rng, 64, [96, 64, 32, 128])
    given = draw(rng, experts, 17, 4)
    given["residual"] = rng.standard_normal(given["x"].shape, np.float32)
    given["expert_weights"][rng.random((17, 4)) < 0.6] = 0
    given["expert_weights"][3] = 0
    session = open_session(kernel, model_of(experts, given))
    whole = run(session, **given)
    np.testing.assert_array_equal(whole[3], given["residual"][3])
    for wrong in (-1, 4, -(2**62)):
        ids = np.where(given["expert_weights"] == 0, wrong, given["expert_ids"])
        np.testing.assert_array_equal(run(session, **given | {"expert_ids": ids}), whole)
    # A slot that is used gives the same bits wherever it stands among slots that are not.
    used = given["expert_weights"] != 0
    assert used.any(axis=1).sum() > 5
    order = np.argsort(~used, axis=1, kind="stable")
    moved = {name: np.take_along_axis(given[name], order, axis=1) for name in ("expert_ids", "expert_weights")}
    np.testing.assert_array_equal(run(session, **given | moved), whole)


def test_leading_dimensions_are_kept_and_none_may_be_empty(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(2)
    experts = make_experts(rng, 40, [30, 20])
    given = draw(rng, experts, 6, 2)
    shaped = {name: array.reshape(1, 6, -1) for name, array in given.items()}
    session = open_session(kernel, model_of(experts, shaped))
    y = run(session, **shaped)
    assert y.shape == (1, 6, 40)
    np.testing.assert_array_equal(y[0], run(open_session(kernel, model_of(experts, given)), **given))
    assert run(session, **{name: array[:, :0] for name, array in shaped.items()}).shape == (1, 0, 40)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, 0, "has a width of 0"),
        (0, 2**62, "has a width of"),
        (1, 5, "bits must be"),
        (2, 16, "block_size must be"),
        (3, -1, "lies outside"),
        (3, 2**62, "lies outside"),
        (4, 0, "do not fit its bits"),
        (5, 1, "do not fit its bits"),
        (6, 2**62, "lies outside"),
        (11, -2, "lies outside"),
    ],
)
@pytest.mark.parametrize("gated", ["", "outer"])
def test_a_directory_that_does_not_fit_is_refused(
    kernel: NativeKernel, column: int, value: int, message: str, gated: str
) -> None:
    rng = np.random.default_rng(3)
    gate_up, down = make_matrix(rng, 40, 50, paired=True), make_matrix(rng, 50, 20)
    arrays = [array for m in (gate_up, down) for array in (m.packed.data, m.packed.scales)]
    parts = [array.view(np.uint8) for array in arrays if array is not None]
    a, b, c, d = np.cumsum([0, *(len(part) for part in parts)])[:4]
    directory = np.array([[20, 4, 32, a, -1, b, -1, 4, 32, c, -1, d, -1]])
    experts = Experts(50, [(gate_up, down)], np.concatenate(parts), directory)
    given = draw(rng, experts, 2, 1)
    runs = {"runs": np.array([True])} if gated else {}
    run(open_session(kernel, model_of(experts, given, gated=gated)), **given, **runs)
    directory[0, column] = value
    with pytest.raises(Exception, match=f"MoELowBit: .*{message}"):
        run(open_session(kernel, model_of(experts, given, gated=gated)), **given, **runs)


def test_inputs_that_do_not_fit_are_refused(kernel: NativeKernel) -> None:
    rng = np.random.default_rng(4)
    experts = make_experts(rng, 40, [30, 20])
    given = draw(rng, experts, 3, 2)
    session = open_session(kernel, model_of(experts, given))
    for wrong in (-1, 2):
        ids = given["expert_ids"].copy()
        ids[2, 1] = wrong
        with pytest.raises(Exception, match=f"expert id {wrong} is outside 2 experts"):
            run(session, **given | {"expert_ids": ids})
    with pytest.raises(Exception, match="4 expert ids do not fit 3 tokens"):
        run(session, **given | {"expert_ids": given["expert_ids"][:2]})
    with pytest.raises(Exception, match="expert_weights has 3 elements instead of 6"):
        run(session, **given | {"expert_weights": given["expert_weights"][:, :1]})
    planes = given | {"planes": np.array([3], np.int32)}
    with pytest.raises(Exception, match="planes must be 1 or 2, not 3"):
        run(open_session(kernel, model_of(experts, planes)), **planes)
    with pytest.raises(Exception, match="last dimension of X must be D = 40"):
        run(session, **given | {"x": given["x"][:, :39]})


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages of a file are in memory")
def test_only_chosen_experts_are_read(kernel: NativeKernel, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    experts = make_experts(rng, 512, [256] * 8, alignment=mmap.PAGESIZE)
    given = draw(rng, experts, 2, 2) | {"expert_ids": np.array([[1, 6], [6, 1]])}
    model = model_of(experts, given)
    (blob,) = (t for t in model.graph.initializer if t.name == "experts")
    blob.ClearField("raw_data")
    blob.data_location = TensorProto.EXTERNAL
    blob.external_data.add(key="location", value="experts.bin")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with (tmp_path / "experts.bin").open("wb", buffering=0) as file:
        # Page by page: what is written in one piece is kept in one, and mapped whole at the first touch.
        for start in range(0, len(experts.blob), mmap.PAGESIZE):
            file.write(experts.blob[start : start + mmap.PAGESIZE].data)
    session = open_session(kernel, tmp_path / "model.onnx")
    drop_pages(tmp_path / "experts.bin")
    run(session, **given)
    resident = resident_pages(tmp_path / "experts.bin", len(experts.blob))
    starts = [*(int(row[3]) // mmap.PAGESIZE for row in experts.directory), len(resident)]
    chosen = [resident[starts[e] : starts[e + 1]] for e in (1, 6)]
    assert all(part.all() for part in chosen)
    # The system maps 64 KB around a page that is touched.
    assert resident.sum() - sum(len(part) for part in chosen) <= 4 * 65536 // mmap.PAGESIZE


def drop_pages(path: Path) -> None:
    """Forgets what this process has seen of a mapped file."""
    MappedFile(path).release()


def resident_pages(path: Path, size: int) -> NDArray[np.bool_]:
    """Pages of the file that are mapped into this process now, by /proc/self/pagemap."""
    pages = -(-size // mmap.PAGESIZE)
    found = np.zeros(pages, np.bool_)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(f" {path}"):
            span, _, offset = line.split()[:3]
            start, end = (int(address, 16) for address in span.split("-"))
            count, first = (end - start) // mmap.PAGESIZE, int(offset, 16) // mmap.PAGESIZE
            with Path("/proc/self/pagemap").open("rb") as file:
                file.seek(start // mmap.PAGESIZE * 8)
                entries = np.frombuffer(file.read(count * 8), np.uint64)
            stop = min(first + count, pages)
            found[first:stop] |= (entries >> np.uint64(63)).astype(np.bool_)[: stop - first]
    return found
