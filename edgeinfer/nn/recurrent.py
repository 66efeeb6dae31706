"""Recurrent layers over whole texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.parts import Mixer
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.nn.arithmetic import silu

Floats = NDArray[np.float32]
# Results of a layer's products, (S, C): numbers that are kept of every token, and numbers that only the row needs.
Entered = tuple[Floats, Floats]
# The results of a recurrence (m, F), from a layer's weights, the kept numbers of a text (n, C) and the last m rows.
Mix = Callable[[DecoderSpec, Mapping[str, Floats], Floats, Floats], Floats]
_EPSILON = np.float32(1e-6)  # of the norm of queries and keys: transformers, models/qwen3_next, l2norm


def widths(spec: DecoderSpec) -> tuple[int, ...]:
    """Numbers that a layer with a state keeps of a token here; 0 for other layers."""
    # For each head the delta rule has two gates, Mamba-2 a time step.
    states, gates = (spec.state_of(layer) for layer in range(spec.num_layers)), 1 if spec.delta is None else 2
    return tuple(each.channels + gates * each.heads for each in states)


def enter(spec: DecoderSpec, layer: int, product: Callable[[str], Floats]) -> Entered:
    """The inputs of a layer's recurrence for its rows."""
    if spec.mixer(layer) == "conv":
        before, after, values = np.split(product("in"), 3, axis=1)
        return before * values, after
    if spec.mamba2 is not None:
        gate, read = np.split(product("in"), [spec.mamba2.inner_size], axis=1)
        return read, gate
    channels = spec.state_of(layer).channels
    read, gate = np.split(product("in"), [channels], axis=1)
    return np.concatenate([read, product("gates")], axis=1), gate


def vectors(spec: DecoderSpec, mixer: Mixer) -> tuple[str, ...]:
    """Names of a recurrence's weights other than its products."""
    if mixer == "conv":
        return ("conv", "conv_bias") if spec.conv is not None and spec.conv.bias else ("conv",)
    names, scan = ("conv", "dt_bias", "a_log"), spec.mamba2
    if mixer == "delta" or scan is None:
        return (*names, "norm")
    return (*names, "d", *(("conv_bias",) if scan.conv_bias else ()), *(("norm",) if scan.normed else ()))


def _convolved(weights: Mapping[str, Floats], text: Floats) -> Floats:  # (n, C) -> (n, C)
    """Each token's weighted sum of its last ones, by channel."""
    conv = weights["conv"][:, 0]  # (C, width)
    padded = np.concatenate([np.zeros((conv.shape[1] - 1, text.shape[1]), np.float32), text])
    sums = np.zeros_like(text) + weights.get("conv_bias", np.float32(0))
    for place in range(conv.shape[1]):
        sums += conv[:, place] * padded[place : place + len(text)]
    return sums


def _short_conv(spec: DecoderSpec, weights: Mapping[str, Floats], text: Floats, own: Floats) -> Floats:
    # Only the tokens that the convolution reaches.
    reached = text[-(len(own) + weights["conv"].shape[2] - 1) :]
    return own * _convolved(weights, reached)[-len(own) :]


def _delta_rule(spec: DecoderSpec, weights: Mapping[str, Floats], text: Floats, own: Floats) -> Floats:
    delta, (read, gates) = spec.delta, np.split(text, [-2 * len(weights["a_log"])], axis=1)
    assert delta is not None, "a layer with a delta rule has its sizes"
    mixed = silu(_convolved(weights, read))
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
    heads, first = np.empty((len(own), *v.shape[1:]), np.float32), len(text) - len(own)
    for token in range(len(text)):
        state *= decay[token, :, None, None]
        known = (k[token, :, None] @ state)[:, 0]
        state += k[token, :, :, None] * ((v[token] - known) * beta[token, :, None])[:, None]
        if token >= first:
            heads[token - first] = (q[token, :, None] @ state)[:, 0]
    heads /= np.sqrt(np.float32(delta.key_size))
    scale = np.sqrt(np.mean(heads * heads, axis=2, keepdims=True) + np.float32(spec.norm_eps))
    given: Floats = (heads / scale * weights["norm"]).reshape(len(own), -1) * silu(own)
    return given


def _unit(x: Floats) -> Floats:  # (..., k)
    unit: Floats = x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + _EPSILON)
    return unit


def _mamba2(spec: DecoderSpec, weights: Mapping[str, Floats], text: Floats, own: Floats) -> Floats:
    scan = spec.mamba2
    assert scan is not None, "a layer with such a recurrence has its sizes"
    read, steps = np.split(text, [scan.conv_size], axis=1)
    shared, each = scan.groups * scan.state_size, scan.heads // scan.groups
    x, b, c = np.split(silu(_convolved(weights, read)), [scan.inner_size, scan.inner_size + shared], axis=1)
    x = x.reshape(len(text), scan.heads, scan.head_size)
    b, c = (np.repeat(part.reshape(len(text), scan.groups, -1), each, axis=1) for part in (b, c))  # (n, H, N)
    dt = np.logaddexp(steps + weights["dt_bias"], np.float32(0))  # (n, H)
    if scan.most_step:
        dt = np.clip(dt, np.float32(scan.least_step), np.float32(scan.most_step))
    decay = np.exp(-np.exp(weights["a_log"]) * dt)
    state = np.zeros((scan.heads, scan.head_size, scan.state_size), np.float32)
    given, first = np.empty((len(own), *x.shape[1:]), np.float32), len(text) - len(own)
    for token in range(len(text)):
        state *= decay[token, :, None, None]
        state += (dt[token, :, None] * x[token])[:, :, None] * b[token, :, None]
        if token >= first:
            given[token - first] = (state @ c[token, :, :, None])[..., 0]
    heads, gate = (given + weights["d"][:, None] * x[first:]).reshape(len(own), -1), silu(own)
    if not scan.normed:
        ungrouped: Floats = heads * gate
        return ungrouped
    parts = (heads if scan.norm_first else heads * gate).reshape(len(own), scan.groups, -1)
    parts = parts / np.sqrt(np.mean(parts * parts, axis=2, keepdims=True) + np.float32(spec.norm_eps))
    normed: Floats = parts.reshape(len(own), -1) * weights["norm"] * (gate if scan.norm_first else 1)
    return normed


_MIXES: dict[Mixer, Mix] = {"conv": _short_conv, "delta": _delta_rule, "mamba2": _mamba2}


def mix(
    spec: DecoderSpec,
    mixer: Mixer,
    weights: Mapping[str, Floats],
    text: Floats,  # (n, C)
    own: Floats,  # (m, G)
) -> Floats:  # (m, F)
    """The output of a recurrence for the last rows of a text."""
    return _MIXES[mixer](spec, weights, text, own)
