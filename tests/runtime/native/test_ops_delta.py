"""edgeinfer.GatedDelta in sessions of ONNX Runtime: masked it does nothing, what is malformed it refuses unwritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import Geometry, KVLayer, StateLayer
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.states import StatePool
from tests.runtime.native.graphs import make_model, open_session, run_in_place
from tests.tables import each_row

NAMES = (
    *("x", "rows", "extras", "state_pool", "state_layout", "state_rows", "layer_mask", "weights", "bias", "gates"),
    *("dt_bias", "a_log", "norm"),
)
STATE = StateLayer(heads=4, key_heads=2, key_size=6, value_size=20, channels=104, width=3)
SIZES: dict[str, Any] = {"heads": 4, "key_heads": 2, "key_size": 6, "value_size": 20, "channels": 104, "width": 3}
GEOMETRY = Geometry(32, 16, 2, 1, 8, 64, (KVLayer(1, 8, 8), KVLayer(0, 0, 0)), (StateLayer(), STATE))
# Three rows of one text, the last a sibling of the second, and two of another.
ROWS = [(0, 1, 0, 0), (0, 2, 0, 0), (0, 1, 0, 1), (1, 1, 0, 0), (1, 2, 0, 0)]
SLOTS = [[2, 0], [0, 0]]


class Pass:
    """Random inputs of texts that begin."""

    def __init__(self) -> None:
        chance, size = np.random.default_rng(0), len(ROWS)
        self.pool = StatePool(GEOMETRY)
        for slot in range(3):
            self.pool.empty(slot)
        self.given: dict[str, Any] = {
            "x": chance.standard_normal((1, size, 184), np.float32),
            "rows": np.array(ROWS, np.int32),
            "extras": np.array([2], np.int32),
            "state_pool": self.pool.memory[: 3 * self.pool.layout.slot_bytes],
            "state_layout": self.pool.array,
            "state_rows": np.array(SLOTS, np.int64),
            "layer_mask": np.array([True, True, True]),
            "gates": chance.standard_normal((1, size, 8), np.float32),
        }
        shapes = {"weights": (104, 1, 3), "dt_bias": (4,), "a_log": (4,), "norm": (20,)}
        self.known = {name: chance.standard_normal(shape, np.float32) for name, shape in shapes.items()}

    def run(self, kernel: NativeKernel, threads: int = 1, /, **changes: Any) -> NDArray[np.float32]:  # (S, heads v)
        given = self.given | changes
        model = make_model("GatedDelta", NAMES, given, self.known, **SIZES, layer=1, part=2, norm_epsilon=1e-6)
        return run_in_place(open_session(kernel, model, threads), **given)


def test_threads_and_company_leave_every_bit(kernel: NativeKernel) -> None:
    together, step = Pass().run(kernel, 2), Pass()
    cuts = [(0, 3), (3, 5)]
    alone = [
        step.run(kernel, **{name: step.given[name][:, a:b] for name in ("x", "gates")}, rows=step.given["rows"][a:b])
        for a, b in cuts
    ]
    assert np.array_equal(np.concatenate(alone), together) and np.isfinite(together).all()


def test_a_masked_layer_writes_nothing_and_gives_zeros(kernel: NativeKernel) -> None:
    step = Pass()
    before = step.given["state_pool"].copy()
    assert not step.run(kernel, layer_mask=np.array([True, True, False])).any()
    assert np.array_equal(step.given["state_pool"], before)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("x", np.zeros((1, len(ROWS), 3), np.float32), "last dimension of X"),
        ("gates", np.zeros((1, len(ROWS), 7), np.float32), "gates has 35 elements"),
        ("state_layout", np.array([4096, 32, 0], np.int64), "does not have the layer"),
        ("state_layout", np.array([4096, 32, 0, 0], np.int64), "does not fit into a slot"),
        ("state_layout", np.array([1 << 20, 2, 0, 0], np.int64), "too few or too many rows"),
        ("state_rows", np.array([[3, 0], [0, 0]], np.int64), "outside the pool"),
        ("state_rows", np.array([[0, 0], [0, 0]], np.int64), "another sequence has"),
        ("state_rows", np.array([[2, 0]], np.int64), "no state|lie apart"),
        ("state_rows", np.array([[2, 2], [0, 0]], np.int64), "into a tree"),
        ("state_rows", np.array([[2, 0], [0, 3]], np.int64), "beyond its rows"),
        ("rows", np.array([(0, 1, 0, 0)] * 5, np.int32), "behind the row before it"),
        ("rows", np.array([(0, 40, 0, 0), *ROWS[1:]], np.int32), "too far behind|row before it"),
        ("extras", np.array([0], np.int32), "behind the row before it"),
    ],
)
def test_malformed_tables_are_refused_before_anything_is_written(
    name: str, value: NDArray[Any], fault: str, kernel: NativeKernel
) -> None:
    step = Pass()
    before = step.given["state_pool"].copy()
    with pytest.raises(Exception, match=fault):
        step.run(kernel, 1, **{name: value})
    assert np.array_equal(step.given["state_pool"], before)


@each_row("position", [-1, 1, 1 << 40])
def test_a_state_at_another_position_is_refused(position: int, kernel: NativeKernel) -> None:
    step, offset = Pass(), int(Pass().pool.array[3])
    slot = step.pool.slot(2)
    slot[offset : offset + 8] = np.array([position], "<i8").view(np.uint8)
    with pytest.raises(Exception, match=r"leaves out what its state holds|too far behind"):
        step.run(kernel)
