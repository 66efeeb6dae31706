"""The activation functions of MLPs, by their names in a decoder's description, in plain numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import silu
from edgeinfer.bundle.spec import Activation

Floats = NDArray[np.float32]
# Source: transformers' GptOssExperts.
_OAI_LIMIT, _OAI_ALPHA = 7.0, 1.702
# Source: transformers' XIELUActivation.
_XIELU_BETA, _XIELU_EPS = 0.5, -1e-6

_erf = np.vectorize(math.erf, otypes=[np.float32])


def _gelu(x: Floats) -> Floats:
    result: Floats = np.float32(0.5) * x * (1 + _erf(x / np.float32(math.sqrt(2))))
    return result


def _gelu_tanh(x: Floats) -> Floats:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
    result: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return result


def _relu2(x: Floats) -> Floats:
    return np.square(np.maximum(x, np.float32(0)))


_PLAIN: Mapping[Activation, Callable[[Floats], Floats]] = {
    "silu": silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
}


def inner_values(
    activation: Activation,
    x: Floats,  # (..., F)
    xielu: Floats | None = None,  # (2,)
) -> Floats:  # (..., F)
    """An MLP's activation of what one matrix gives.

    Args:
        xielu: alpha_p and alpha_n of an "xielu".
    """
    if activation != "xielu":
        return _PLAIN[activation](x)
    assert xielu is not None, "xielu has two constants"
    negative = (np.expm1(np.minimum(x, np.float32(_XIELU_EPS))) - x) * xielu[1]
    result: Floats = np.where(x > 0, xielu[0] * x * x, negative) + np.float32(_XIELU_BETA) * x
    return result


def gate_up(
    activation: Activation,
    gate: Floats,  # (..., F)
    up: Floats,  # (..., F)
    xielu: Floats | None = None,  # (2,)
) -> Floats:  # (..., F)
    """The inner values of a gated MLP: act(gate) * up, or gpt-oss's clamped SwiGLU."""
    if activation != "swiglu_oai":
        return inner_values(activation, gate, xielu) * up
    limit = np.float32(_OAI_LIMIT)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    # silu(a x) / a is x times the logistic function of a x.
    result: Floats = silu(np.float32(_OAI_ALPHA) * gate) / np.float32(_OAI_ALPHA) * (up + 1)
    return result


def deviations(share: float) -> float:
    """How many standard deviations above the mean a share of normally distributed values ends."""
    return NormalDist().inv_cdf(share)


def cut_off(gate: Floats, share: float) -> Floats:  # (..., F) -> (..., F)
    """What a row has above its cutoff, if its values were normally distributed, of which a share is cut off."""
    if not share:
        return gate
    cutoff = gate.mean(axis=-1, keepdims=True) + np.float32(deviations(share)) * gate.std(axis=-1, keepdims=True)
    result: Floats = np.maximum(gate - cutoff, np.float32(0))
    return result
