"""The arithmetic of a decoder between its matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.parts import MoESpec, RopeSpec
from edgeinfer.bundle.spec import Activation, NormKind

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
T = TypeVar("T", np.float32, np.float64)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:  # (..., D), (D,) -> (..., D)
    scale: Floats = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x * scale * weight


def normed(
    x: Floats,  # (..., D)
    weight: Floats,  # (D,)
    bias: Floats | None,  # (D,)
    *,
    kind: NormKind,
    eps: float,
) -> Floats:  # (..., D)
    """A norm; "layer" takes the mean off first."""
    scaled = rms_norm(x - x.mean(axis=-1, keepdims=True) if kind == "layer" else x, weight, eps)
    return scaled if bias is None else scaled + bias


def softcapped(x: Floats, cap: float) -> Floats:  # (..., T) -> (..., T)
    """cap * tanh(x / cap); a cap of 0 leaves x as it is."""
    return x if cap == 0 else np.float32(cap) * np.tanh(x / np.float32(cap))


def softmax(scores: Floats) -> Floats:  # (..., T) -> (..., T)
    """Softmax over the last axis; at least one score of each row is finite."""
    powers: Floats = np.exp(scores - scores.max(axis=-1, keepdims=True))
    powers /= powers.sum(axis=-1, keepdims=True)
    return powers


def log_softmax(logits: Floats, kind: type[T]) -> NDArray[T]:  # (..., V) -> (..., V)
    """Natural logarithms of the softmax over the last axis, computed in the type `kind`."""
    shifted: NDArray[T] = np.subtract(logits, logits.max(axis=-1, keepdims=True), dtype=kind)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def silu(x: Floats) -> Floats:  # (..., F) -> (..., F)
    """x times its logistic function, written so that exp never overflows."""
    return x * logistic(x)


def attend(
    queries: Floats,  # (H, g, S, h)
    keys: Floats,  # (H, T, h)
    values: Floats,  # (H, T, h)
    visible: NDArray[np.bool_],  # (S, T)
    *,
    scale: float = 0.0,  # 0 is one over the root of the width
    softcap: float = 0.0,  # 0 is none
    sinks: Floats | None = None,  # (H, g)
) -> Floats:  # (H, g, S, h)
    """The values that each query sees, weighted by the softmax of their keys' scores."""
    products = queries @ keys[:, None].swapaxes(-1, -2)  # (H, g, S, T)
    scores = products * np.float32(scale) if scale else products / np.float32(np.sqrt(queries.shape[-1]))
    scores = np.where(visible, softcapped(scores, softcap), np.float32(-np.inf))
    if sinks is None:
        mixed: Floats = softmax(scores) @ values[:, None]
        return mixed
    column = np.broadcast_to(sinks[:, :, None, None], (*scores.shape[:-1], 1))
    shares: Floats = softmax(np.concatenate([scores, column], axis=-1))[..., :-1]
    return shares @ values[:, None]


def route(
    scores: Floats,  # (S, E)
    moe: MoESpec,
    *,
    count: int | None = None,  # experts of a token; None for all of the model's `top_k`
    bias: Floats | None = None,  # (E,), 0 or, for a barred expert, -1e9: its weight is 0 where no other is left
    choice_bias: Floats | None = None,  # (E,), added to the shares where experts are chosen, and not to their factors
    norm: Floats | None = None,  # (E,), of a "relu" router; its weight is 0 for scores that are not positive
    eps: float = 1e-6,  # of the norm
) -> tuple[Ints, Floats]:  # (S, count), (S, count)
    """The experts each token uses, by falling score, and the factors of their results."""
    if moe.router == "sparsemixer":
        return _sparse_mixer(scores if bias is None else scores + bias, moe, count or moe.top_k)
    logits = moe.router == "relu" or (moe.router == "softmax" and moe.renormalize and not moe.choice_bias)
    shares = scores if logits else logistic(scores) if moe.router == "sigmoid" else softmax(scores)
    assert moe.choice_bias == (choice_bias is not None), "the description says whether there is a choice bias"
    judged = shares if choice_bias is None else shares + choice_bias
    biased = judged if bias is None else judged + bias
    if moe.groups > 1:
        biased = _best_groups(biased, moe)
    # A stable sort, so that of equal scores the lower index is chosen, as by TopK.
    chosen = np.argsort(-biased, axis=-1, kind="stable")[:, : count or moe.top_k].astype(np.int64)
    values = np.take_along_axis(biased, chosen, axis=-1)
    if moe.router == "relu":
        assert norm is not None, "a relu router has a norm"
        normal = np.take_along_axis(rms_norm(np.maximum(scores, 0), norm, eps), chosen, axis=-1)
        return chosen, np.where(values > 0, normal, np.float32(0))
    if logits:
        return chosen, softmax(values) * np.float32(moe.scale)
    allowed = values > -1e8  # neither barred by `bias` nor of a group that was not chosen
    weights = np.where(allowed, np.take_along_axis(shares, chosen, axis=-1), np.float32(0))
    if moe.renormalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    return chosen, weights * np.float32(moe.scale)


def _sparse_mixer(judged: Floats, moe: MoESpec, count: int) -> tuple[Ints, Floats]:  # (S, E) -> (S, k), (S, k)
    """The best experts, each weighted among the worse ones near it. Source: transformers' sparsemixer."""
    left, chosen, weights = judged.copy(), [], []
    for _ in range(count):
        best = left.argmax(axis=-1)[:, None]
        most = np.take_along_axis(left, best, axis=-1)
        far = most - judged > np.float32(2 * moe.jitter) * np.maximum(np.abs(judged), most)
        share = np.take_along_axis(softmax(np.where(far, np.float32(-np.inf), left)), best, axis=-1)
        chosen.append(best)
        weights.append(np.where(most > -1e8, share * np.float32(moe.scale), np.float32(0)))
        np.put_along_axis(left, best, np.float32(-np.inf), axis=-1)
    return np.concatenate(chosen, axis=-1), np.concatenate(weights, axis=-1)


def logistic(x: Floats) -> Floats:  # (..., E) -> (..., E)
    """1 / (1 + exp(-x)), written so that exp never overflows."""
    result: Floats = np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x))
    return result


def _best_groups(judged: Floats, moe: MoESpec) -> Floats:  # (S, E) -> (S, E)
    """Minus infinity for the experts of groups that are not among the best."""
    grouped = judged.reshape(len(judged), moe.groups, -1)  # (S, G, E / G)
    ranked = np.sort(grouped, axis=-1)[..., -2 if moe.choice_bias else -1 :].sum(axis=-1)
    best = np.argsort(-ranked, axis=-1, kind="stable")[:, : moe.group_top_k]
    kept = np.zeros(ranked.shape, np.bool_)
    np.put_along_axis(kept, best, True, axis=-1)
    return np.where(kept[..., None], grouped, np.float32(-np.inf)).reshape(judged.shape)


def inverse_frequencies(spec: RopeSpec, context: int) -> Floats:  # (dim / 2,)
    """Radians per position of each rotated pair."""
    exponents = np.arange(0, spec.dim, 2, dtype=np.float32) / np.float32(spec.dim)
    plain: Floats = (1.0 / np.power(np.float32(spec.theta), exponents)).astype(np.float32)
    if spec.type == "linear":
        return np.divide(plain, np.float32(spec.factor))
    if spec.type == "proportional":
        return np.divide(np.where(np.arange(len(plain)) < spec.turned, plain, 0), np.float32(spec.factor))
    if spec.type == "llama3":
        return _llama3(spec, plain)
    if spec.type == "longrope":
        factors = spec.long_factors if context > spec.original_max_positions else spec.short_factors
        return np.divide(plain, np.asarray(factors, np.float32))
    if spec.type == "yarn":
        return _yarn(spec, plain)
    return plain


def _yarn(spec: RopeSpec, plain: Floats) -> Floats:  # (dim / 2,)
    """Keeps the speed of pairs that turn often, slows pairs that turn seldom, and blends in between."""

    def border(rotations: float) -> float:
        turns = spec.original_max_positions / (rotations * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.theta))

    low, high = border(spec.beta_fast), border(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    # A border without width would divide by zero; transformers widens it by the same amount.
    width = high - low or 0.001
    slowed = np.clip((np.arange(spec.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    blended: Floats = plain / np.float32(spec.factor) * slowed + plain * (1 - slowed)
    return blended.astype(np.float32)


def _llama3(spec: RopeSpec, plain: Floats) -> Floats:  # (dim / 2,)
    wavelengths = 2 * np.pi / plain
    low = spec.original_max_positions / spec.low_freq_factor
    high = spec.original_max_positions / spec.high_freq_factor
    smooth = spec.original_max_positions / wavelengths - spec.low_freq_factor
    smooth = smooth / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - smooth) * plain / spec.factor + smooth * plain
    scaled = np.where(wavelengths > low, plain / spec.factor, plain)
    medium = (wavelengths <= low) & (wavelengths >= high)
    return np.where(medium, blended, scaled).astype(np.float32)


def rotation_border(ropes: Sequence[RopeSpec], capacity: int) -> int | None:
    """Tokens of the longest text that LongRoPE rotates by its short factors; None where no text is longer."""
    borders = [rope.original_max_positions for rope in ropes if rope.type == "longrope"]
    return borders[0] if borders and capacity > borders[0] else None


def rope_tables(spec: RopeSpec, rows: int, context: int) -> tuple[Floats, Floats]:  # 2 x (rows, dim / 2)
    """Cosine and sine for positions 0 .. rows - 1 of a text of `context` tokens."""
    angles = np.arange(rows, dtype=np.float32)[:, None] * inverse_frequencies(spec, context)
    scale = np.float32(spec.attention_factor)
    return np.cos(angles) * scale, np.sin(angles) * scale


def rotate(
    x: Floats,  # (S, H, h)
    cos: Floats,  # (S, r/2)
    sin: Floats,  # (S, r/2)
    *,
    interleaved: bool = False,
) -> Floats:  # (S, H, h)
    """Rotates the first r dimensions of every head; a pair has one of each half, or neighbours where interleaved."""
    half = cos.shape[-1]
    c, s = cos[:, None], sin[:, None]
    rest = x[..., 2 * half :]
    if interleaved:
        a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        pairs = np.stack([a * c - b * s, b * c + a * s], axis=-1)
        return np.concatenate([pairs.reshape(*x.shape[:-1], 2 * half), rest], axis=-1)
    a, b = x[..., :half], x[..., half : 2 * half]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def query_factors(spec: RopeSpec, positions: Ints) -> Floats:  # (S,) -> (S,)
    """The factors of queries at their positions; see RopeSpec.query_beta."""
    return (1 + spec.query_beta * np.log1p(positions // spec.original_max_positions)).astype(np.float32)


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
    xielu: Floats | None = None,  # (2,), alpha_p and alpha_n
) -> Floats:  # (..., F)
    """An MLP's activation of the product of one matrix."""
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
    """Standard deviations from the mean below which a share of normally distributed values lies."""
    return NormalDist().inv_cdf(share)


def cut_off(gate: Floats, share: float) -> Floats:  # (..., F) -> (..., F)
    """The part of each row above its cutoff, which would cut off `share` of normally distributed values."""
    if not share:
        return gate
    cutoff = gate.mean(axis=-1, keepdims=True) + np.float32(deviations(share)) * gate.std(axis=-1, keepdims=True)
    result: Floats = np.maximum(gate - cutoff, np.float32(0))
    return result
