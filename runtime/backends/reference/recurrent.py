"""Recurrent layers in plain numpy: each row again from what is kept of every token of its text."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from edgeinfer.bundle import DecoderSpec
from edgeinfer.bundle.recurrence import Mixer
from edgeinfer.runtime.arrays import Floats

__all__ = ["MIXES", "enter", "weights_of", "widths"]

# Of what a layer's products give, (S, C): what is kept of every token, and what only the row itself needs.
Entered = tuple[Floats, Floats]
# What a row's recurrence gives, (F,): of the layer's weights, what is kept of its text (n, C), and its own part.
Mix = Callable[[DecoderSpec, Mapping[str, Floats], Floats, Floats], Floats]
_EPSILON = np.float32(1e-6)  # of the norm of queries and keys: transformers, models/qwen3_next, l2norm


def widths(spec: DecoderSpec) -> tuple[int, ...]:
    """What a layer with a state keeps of a token here; 0 for other layers."""
    states = (spec.state_of(layer) for layer in range(spec.num_layers))
    return tuple(each.channels + 2 * each.heads if each.heads else 0 for each in states)


def enter(spec: DecoderSpec, layer: int, product: Callable[[str], Floats]) -> Entered:
    """What a layer reads of its rows.

    Args:
        product: of the rows with the mixer's matrix of a name.
    """
    if spec.mixer(layer) == "conv":
        before, after, values = np.split(product("in"), 3, axis=1)
        return before * values, after
    channels = spec.state_of(layer).channels
    read, gate = np.split(product("in"), [channels], axis=1)
    return np.concatenate([read, product("gates")], axis=1), gate


def weights_of(weights: Mapping[str, Floats], prefix: str) -> dict[str, Floats]:
    """Those of one layer's mixer by their own names."""
    begin = f"{prefix}."
    return {name.removeprefix(begin): value for name, value in weights.items() if name.startswith(begin)}


def _convolved(weights: Mapping[str, Floats], text: Floats) -> Floats:  # (n, C) -> (n, C)
    """Each token's sum of its last ones, each channel with weights of its own."""
    conv = weights["conv"][:, 0]  # (C, width)
    padded = np.concatenate([np.zeros((conv.shape[1] - 1, text.shape[1]), np.float32), text])
    sums = np.zeros_like(text) + weights.get("conv_bias", np.float32(0))
    for place in range(conv.shape[1]):
        sums += conv[:, place] * padded[place : place + len(text)]
    return sums


def _silu(x: Floats) -> Floats:
    value: Floats = x * np.float32(0.5) * (1 + np.tanh(x / 2))
    return value


def _short_conv(spec: DecoderSpec, weights: Mapping[str, Floats], text: Floats, own: Floats) -> Floats:
    last: Floats = _convolved(weights, text[-weights["conv"].shape[2] :])[-1]
    return own * last


def _delta_rule(spec: DecoderSpec, weights: Mapping[str, Floats], text: Floats, own: Floats) -> Floats:
    delta, (read, gates) = spec.delta, np.split(text, [-2 * len(weights["a_log"])], axis=1)
    assert delta is not None, "a layer with a delta rule has its sizes"
    mixed = _silu(_convolved(weights, read))
    queries, keys, values = np.split(mixed, [delta.keys, 2 * delta.keys], axis=1)
    each = delta.value_heads // delta.key_heads
    q, k = (
        np.repeat(_unit(part.reshape(len(text), delta.key_heads, delta.key_size)), each, axis=1)
        for part in (queries, keys)
    )  # (n, H, k)
    v = values.reshape(len(text), delta.value_heads, delta.value_size)
    b, a = np.split(gates, 2, axis=1)  # (n, H)
    beta = np.float32(0.5) * (1 + np.tanh(b / 2))
    decay = np.exp(-np.exp(weights["a_log"]) * np.logaddexp(a + weights["dt_bias"], np.float32(0)))
    state = np.zeros((delta.value_heads, delta.key_size, delta.value_size), np.float32)
    for token in range(len(text)):
        state *= decay[token, :, None, None]
        known = np.einsum("hk,hkv->hv", k[token], state)
        state += k[token, :, :, None] * ((v[token] - known) * beta[token, :, None])[:, None]
    heads = np.einsum("hk,hkv->hv", q[-1], state) / np.sqrt(np.float32(delta.key_size))
    scale = np.sqrt(np.mean(heads * heads, axis=1, keepdims=True) + np.float32(spec.norm_eps))
    given: Floats = (heads / scale * weights["norm"]).reshape(-1) * _silu(own)
    return given


def _unit(x: Floats) -> Floats:  # (..., k)
    unit: Floats = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + _EPSILON)
    return unit


MIXES: dict[Mixer, Mix] = {"conv": _short_conv, "delta": _delta_rule}
