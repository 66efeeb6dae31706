"""edgeinfer.Mamba2 in sessions of ONNX Runtime: right to numpy, the same bits however cut, refusing faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import StateLayer
from edgeinfer.bundle.parts import Mamba2Spec, RopeSpec
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.nn import recurrent
from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel
from edgeinfer.runtime.paging.states import StateLayout
from tests.runtime.native.graphs import make_model, open_session, run_in_place
from tests.tables import each_row

COMMON_NAMES = ("x", "rows", "extras", "pool", "layout", "sequences", "layer_mask", "weights", "bias")
NAMES = (*COMMON_NAMES, "dt_bias", "a_log", "d", "norm")
EPSILON, ROWS = 1e-5, 11
# Sizes that no vector divides, and what a norm, and the clipping of time steps, may be like.
PLAIN = Mamba2Spec(heads=6, head_size=20, groups=2, state_size=18, width=4)
SPECS = {
    "plain": PLAIN,
    "no-norm": dataclasses.replace(PLAIN, normed=False, conv_bias=False),
    "norm-first": dataclasses.replace(PLAIN, norm_first=True, groups=1, head_size=16),
    "clipped": dataclasses.replace(PLAIN, least_step=0.6, most_step=0.8, width=2, state_size=3),
}
Floats = NDArray[np.float32]


class Text:
    """A layer of random weights, the rows of a text, and the memory of its state."""

    def __init__(self, spec: Mamba2Spec) -> None:
        chance = np.random.default_rng(0)
        self.spec, self.layout = spec, StateLayout((StateLayer(), spec.state))
        # What the rows' first product gives. (1, ROWS, read).
        self.x = chance.standard_normal((1, ROWS, spec.read_size), np.float32)
        shapes: dict[str, tuple[int, ...]] = {"weights": (spec.conv_size, 1, spec.width)}
        shapes |= {"bias": (spec.conv_size,)} if spec.conv_bias else {}
        shapes |= dict.fromkeys(("dt_bias", "a_log", "d"), (spec.heads,))
        shapes |= {"norm": (spec.inner_size,)} if spec.normed else {}
        self.known = {name: chance.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        memory = np.zeros(self.layout.slot_bytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        self.pool = memory[start : start + self.layout.slot_bytes]

    def run(self, kernel: NativeKernel, first: int, last: int, threads: int = 1, /, **changes: Any) -> Floats:
        """A pass over rows first..last-1, which takes the state to where it begins."""
        given: dict[str, Any] = {
            "x": self.x[:, first:last],
            "rows": np.array([(0, row + 1, 0, 0) for row in range(first, last)], np.int32),
            "extras": np.zeros(1, np.int32),
            "pool": self.pool,
            "layout": self.layout.array,
            "sequences": np.array([[0, first]], np.int64),
            "layer_mask": np.array([True, True, True]),
        } | {name: value for name, value in changes.items() if name in NAMES}
        values = dataclasses.asdict(self.spec.state) | {"layer": 1, "part": 2, "norm_epsilon": EPSILON}
        values |= {name: getattr(self.spec, name) for name in ("norm_first", "least_step", "most_step")}
        values |= {name: value for name, value in changes.items() if name not in NAMES}
        model = make_model("Mamba2", NAMES, given, self.known, **values)
        return run_in_place(open_session(kernel, model, threads), **given)

    def expected(self) -> Floats:  # (ROWS, inner)
        spec = self.spec
        decoder = DecoderSpec(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_heads=1,
            num_kv_heads=1,
            num_layers=1,
            head_dim=8,
            max_positions=8,
            norm_eps=EPSILON,
            rope=RopeSpec("default", 1e4, 8),
            mixers=("mamba2",),
            mamba2=spec,
        )
        weights = {{"weights": "conv", "bias": "conv_bias"}.get(name, name): v for name, v in self.known.items()}
        gates, kept = np.split(self.x[0], [spec.inner_size], axis=1)
        return recurrent.mix(decoder, "mamba2", weights, kept, gates)


@pytest.fixture
def isas(kernel: NativeKernel, binding: Binding) -> Iterator[Binding]:
    """Selects instruction sets; the best is selected again afterwards."""
    yield binding
    binding.select(kernel.isa)


@pytest.mark.every_case
@pytest.mark.parametrize("name", SPECS)
def test_rows_equal_numpys_and_any_cut_gives_the_same_bits(name: str, kernel: NativeKernel, isas: Binding) -> None:
    whole = Text(SPECS[name]).run(kernel, 0, ROWS)
    np.testing.assert_allclose(whole, Text(SPECS[name]).expected(), atol=2e-5)
    for isa in isas.isas():
        isas.select(isa)
        text = Text(SPECS[name])
        parts = [text.run(kernel, first, last, 2) for first, last in ((0, 3), (3, 4), (4, 5), (5, ROWS))]
        assert np.array_equal(np.concatenate(parts), whole), isa


def test_a_masked_layer_keeps_nothing_and_gives_zeros(kernel: NativeKernel) -> None:
    text = Text(PLAIN)
    assert not text.run(kernel, 0, ROWS, layer_mask=np.array([True, True, False])).any()
    assert not text.pool.any()


@each_row(
    ("name", "value", "fault"),
    [
        ("x", np.zeros((1, ROWS, 3), np.float32), "last dimension of X"),
        ("value_size", 21, "x, B and C"),
        ("heads", 5, "multiple of key_heads"),
        ("layout", np.zeros(3, np.int64), "does not have the layer"),
        ("sequences", np.array([[4, 0]], np.int64), "outside the pool"),
        ("sequences", np.array([[0, ROWS + 1]], np.int64), "beyond its rows"),
    ],
)
def test_malformed_inputs_are_refused_before_anything_is_written(
    name: str, value: Any, fault: str, kernel: NativeKernel
) -> None:
    text = Text(PLAIN)
    with pytest.raises(Exception, match=fault):
        text.run(kernel, 0, ROWS, **{name: value})
    assert not text.pool.any()
