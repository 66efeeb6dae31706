"""edgeinfer.ShortConv in sessions of ONNX Runtime: right to numpy along any path, refusing what is malformed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import KVLayer
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.codecs import find_row_codec
from edgeinfer.runtime.paging.layout import PageLayout, PageRows
from tests.runtime.native.graphs import make_model, open_session, run_in_place
from tests.tables import each_row

NAMES = ("x", "pool", "layout", "pages", "rows", "extras", "weights", "bias", "layer_mask")
CHANNELS, WIDTH, PAGES = 20, 3, 4
LAYOUT = PageLayout((KVLayer(2, 16, 16), KVLayer(1, 0, CHANNELS)), find_row_codec("int8"), find_row_codec("int8"))
# Two sequences: the first one's slots 0 to 65 and then a tree on the 66th, the second one's first two.
ROWS = [(0, 66, 0, 0), (0, 67, 0, 0), (0, 66, 0, 1), (0, 67, 1, 1), (0, 67, 1, 2), (1, 1, 0, 0), (1, 2, 0, 0)]
EXTRAS = [67, 68, 69]
TABLE = [[2, 0], [3, -1]]


def paths() -> list[list[tuple[int, int]]]:
    """The sequence and slot of each token that the rows see."""
    return [
        [(sequence, slot) for slot in (*range(prefix), *EXTRAS[first : first + count])]
        for sequence, prefix, first, count in ROWS
    ]


class Pass:
    """Random inputs over pages in which the slots before the pass are filled."""

    def __init__(self, *, bias: bool = True) -> None:
        chance = np.random.default_rng(0)
        memory = np.zeros(PAGES * LAYOUT.page_bytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        pool = memory[start : start + PAGES * LAYOUT.page_bytes]
        # What is kept of the first sequence's first tokens. (65, D).
        self.past = chance.standard_normal((65, CHANNELS), np.float32)
        places = np.array([2 * 64 + slot if slot < 64 else slot - 64 for slot in range(65)])
        PageRows(LAYOUT, pool).write(1, places, np.zeros((1, 65, 0), np.float32), self.past[None])
        # By name, the weights included.
        self.given: dict[str, Any] = {
            "x": chance.standard_normal((1, len(ROWS), 3 * CHANNELS), np.float32),
            "pool": pool,
            "layout": LAYOUT.array,
            "pages": np.array(TABLE, np.int32),
            "rows": np.array(ROWS, np.int32),
            "extras": np.array(EXTRAS, np.int32),
            "layer_mask": np.array([True, True, True]),
        }
        self.known = {"weights": chance.standard_normal((CHANNELS, 1, WIDTH), np.float32)}
        if bias:
            self.known["bias"] = chance.standard_normal(CHANNELS, np.float32)

    def run(self, kernel: NativeKernel, threads: int = 1, /, **changes: Any) -> NDArray[np.float32]:  # (S, D)
        given = self.given | changes
        values: dict[str, Any] = {"channels": CHANNELS, "width": WIDTH, "layer": 1, "part": 2}
        model = make_model("ShortConv", NAMES, given, self.known, **values)
        return run_in_place(open_session(kernel, model, threads), **given)

    def expected(self) -> NDArray[np.float32]:  # (S, D)
        before, after, values = np.split(self.given["x"][0], 3, axis=1)
        kept = {(0, slot): row for slot, row in enumerate(self.past)}
        kept |= {path[-1]: row for path, row in zip(paths(), before * values, strict=True)}
        mixed = np.zeros((len(ROWS), CHANNELS), np.float32) + self.known.get("bias", np.float32(0))
        for row, path in enumerate(paths()):
            for place, token in zip(range(WIDTH - 1, -1, -1), reversed(path), strict=False):
                mixed[row] += self.known["weights"][:, 0, place] * kept[token]
        result: NDArray[np.float32] = after * mixed
        return result


@each_row("bias", [False, True])
def test_rows_are_mixed_along_their_paths(bias: bool, kernel: NativeKernel) -> None:
    step = Pass(bias=bias)
    np.testing.assert_allclose(step.run(kernel), step.expected(), atol=1e-5)
    places = np.array([2, 3, 4, 5])  # of the slots 66 to 69, in page 0
    before, _, values = np.split(step.given["x"][0], 3, axis=1)
    _, held = PageRows(LAYOUT, step.given["pool"]).read(1, places[:2])
    assert np.array_equal(held[0], (before * values)[[1, 2]])


def test_threads_and_company_leave_every_bit(kernel: NativeKernel) -> None:
    together = Pass().run(kernel, 2)
    step = Pass()
    alone = [
        step.run(kernel, x=step.given["x"][:, row : row + 1], rows=step.given["rows"][row : row + 1])
        for row in range(len(ROWS))
    ]
    assert np.array_equal(np.concatenate(alone), together)


def test_a_masked_layer_writes_nothing_and_gives_zeros(kernel: NativeKernel) -> None:
    step = Pass()
    before = step.given["pool"].copy()
    assert not step.run(kernel, layer_mask=np.array([True, True, False])).any()
    assert np.array_equal(step.given["pool"], before)


@each_row(
    ("name", "value", "fault"),
    [
        ("x", np.zeros((1, len(ROWS), 3), np.float32), "last dimension of X"),
        ("layout", LAYOUT.array[:4], "layer"),
        ("pages", np.array([[2, 9], [3, -1]], np.int32), "outside the pool"),
        ("pages", np.array([2, 0], np.int32), "2 dimensions"),
        ("rows", np.array([(2, 1, 0, 0)] * len(ROWS), np.int32), "no table"),
        ("rows", np.array([(0, 66, 0, 0)] * len(ROWS), np.int32), "another row writes"),
        ("extras", np.array([67, 68, 400], np.int32), "no page"),
    ],
)
def test_malformed_tables_are_refused_before_anything_is_written(
    name: str, value: NDArray[Any], fault: str, kernel: NativeKernel
) -> None:
    step = Pass()
    before = step.given["pool"].copy()
    with pytest.raises(Exception, match=fault):
        step.run(kernel, 1, **{name: value})
    assert np.array_equal(step.given["pool"], before)
