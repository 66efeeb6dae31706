"""Activation in sessions of ONNX Runtime: right, the same bits in every path and any pass, bad input refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgeinfer.nn.arithmetic import cut_off, deviations, gate_up, inner_values
from edgeinfer.runtime.native.binding import ACTIVATIONS, Binding
from edgeinfer.runtime.native.library import NativeKernel, load_kernel
from tests.runtime.native.graphs import make_model, open_session, run
from tests.tables import each_row

NAMES = ("x", "times", "constants")
ALPHAS = np.array([0.8, 0.6], np.float32)
CAP = 30.0
Floats = NDArray[np.float32]


def activated(
    kernel: NativeKernel,
    name: str,
    x: Floats,
    times: Floats | None = None,
    *,
    gated: bool = False,
    cut: float = 0.0,
) -> Floats:
    given = {"x": x} | ({} if times is None else {"times": times})
    known = {"constants": ALPHAS} if name == "xielu" else {}
    attributes: dict[str, Any] = {"kind": ACTIVATIONS.index(name), "paired": int(gated), "cap": CAP}
    attributes |= {"cut": 1, "deviations": deviations(cut)} if cut else {}
    result: Floats = run(open_session(kernel, make_model("Activation", NAMES, given, known, **attributes), 2), **given)
    return result


def values(*shape: int) -> Floats:
    return 4 * np.random.default_rng(0).standard_normal(shape, np.float32)


def expected(name: str, x: Floats) -> Floats:
    if name in ("sigmoid", "softcap"):
        tensor = torch.from_numpy(x)
        result: Floats = (torch.sigmoid(tensor) if name == "sigmoid" else CAP * torch.tanh(tensor / CAP)).numpy()
        return result
    return inner_values(name, x, ALPHAS)  # type: ignore[arg-type]


@each_row("name", [name for name in ACTIVATIONS if name != "swiglu_oai"])
def test_rows_have_their_bits_in_every_path_and_company(kernel: NativeKernel, binding: Binding, name: str) -> None:
    x = values(5, 1500)
    whole = activated(kernel, name, x)
    np.testing.assert_allclose(whole, expected(name, x), atol=5e-6, rtol=1e-5)
    for isa in binding.isas():
        assert np.array_equal(activated(load_kernel(kernel.path, isa), name, x[2:4]), whole[2:4])


@each_row("name", ["silu", "gelu_tanh", "xielu", "swiglu_oai"])
def test_gated_values_multiply_the_others(kernel: NativeKernel, name: Any) -> None:
    x = values(3, 2 * 1030)
    np.testing.assert_allclose(
        activated(kernel, name, x, gated=True), gate_up(name, x[:, :1030], x[:, 1030:], ALPHAS), atol=2e-5, rtol=1e-5
    )


@pytest.mark.parametrize("share", [0.95, 0.5, 0.02])
def test_what_is_cut_off_a_row_goes_by_its_own_values(kernel: NativeKernel, binding: Binding, share: float) -> None:
    x = np.arange(1, 6, dtype=np.float32)[:, None] * values(5, 2 * 1499)
    whole = activated(kernel, "gelu_tanh", x, gated=True, cut=share)
    wanted = gate_up("gelu_tanh", cut_off(x[:, :1499], share), x[:, 1499:])
    np.testing.assert_allclose(whole, wanted, atol=2e-3, rtol=1e-4)
    assert abs((whole == 0).mean() - share) < 0.02
    for isa in binding.isas():
        one = activated(load_kernel(kernel.path, isa), "gelu_tanh", x[2:3], gated=True, cut=share)
        assert np.array_equal(one, whole[2:3])


def test_each_result_multiplies_several_of_a_row(kernel: NativeKernel) -> None:
    gate, heads = values(4, 6), values(4, 6 * 8)
    np.testing.assert_allclose(
        activated(kernel, "sigmoid", gate, heads), np.repeat(expected("sigmoid", gate), 8, axis=1) * heads, rtol=1e-5
    )


def test_values_at_the_ends_of_the_numbers(kernel: NativeKernel) -> None:
    x = np.array([[np.inf, 1e30, 200, -200, -1e30, 0, np.nan]], np.float32)
    assert activated(kernel, "silu", x)[0, 1:6].tolist() == pytest.approx([np.float32(1e30), 200, 0, 0, 0], abs=1e-6)
    assert activated(kernel, "softcap", x)[0, :6].tolist() == pytest.approx([CAP, CAP, CAP, -CAP, -CAP, 0], rel=1e-4)
    assert np.isnan([activated(kernel, name, x)[0, 6] for name in ("silu", "gelu", "relu2", "softcap")]).all()


@each_row(
    ("name", "x", "times", "gated", "message"),
    [
        ("silu", (2, 5), None, True, "half ones"),
        ("silu", (2, 4), (2, 8), True, "come with what they multiply"),
        ("sigmoid", (2, 4), (2, 6), False, "multiple of 4 values for each of 2 rows"),
        ("sigmoid", (2, 4), (3, 8), False, "multiple of 4 values for each of 2 rows"),
        ("swiglu_oai", (2, 4), None, False, "needs paired values"),
    ],
)
def test_what_does_not_fit_is_refused(
    kernel: NativeKernel, name: str, x: Any, times: Any, gated: bool, message: str
) -> None:
    with pytest.raises(Exception, match=message):
        activated(kernel, name, values(*x), None if times is None else values(*times), gated=gated)
