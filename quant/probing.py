"""Measures on a text what rounding each matrix of a decoder does to its predictions.

A probe is the whole model with one matrix, or one projection of all experts of a layer, rounded. All probes walk
through the layers together, each as texts of its own that leave the unrounded ones where its matrix is, so that every
weight is read once. At the end stands the KL divergence of each from the unrounded model, for a sample of the
vocabulary. For small errors it grows with the squared error of the matrix's output, which makes errors of different
matrices comparable. What all of them cost together is measured on more tokens, and weighs the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.results import Progress
from edgeinfer.nn.arithmetic import log_softmax
from edgeinfer.nn.decoder import Decoder, DecoderRun, Tensors, WholeTexts
from edgeinfer.quant.calibration_layers import Signal, StreamWalk

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
# Called for every matrix with its name, its values and its inputs (T, K); inputs of experts are already multiplied by
# what their results will be. Of the embedding it is called with the rows that are looked up, and None; where that is
# the head, too, once more as "head".
Look = Callable[[str, Floats, Floats | None], None]

_EXPERT = re.compile(r"\.experts\.\d+\.")
# The rounding of probes: levels in blocks of 32, of one matrix about what 4 bits do, of all of them what 5 do.
_LEVELS, _JOINT_LEVELS, _BLOCK = 7.0, 15.0, 32
# The share of its input's energy from which on a column is not rounded.
_HUGE = 0.1
# Streams that walk through a layer together; their widest activations lie in memory at once.
_STREAMS = 16
# A minute of two slow cores; at most so many tokens, which more would not make more exact, and at least these.
_OPERATIONS = 5e12
_MOST_TOKENS, _FEWEST_TOKENS = 384, 96
# Tokens of the vocabulary that stand for all at each position: the most likely, and some drawn from the rest.
_LIKELY, _DRAWN = 48, 48
_POSITIONS = 64


@dataclass(frozen=True)
class Probe:
    kl: float  # divergence from the unrounded model, in nats per token
    errors: dict[str, float]  # mean squared error of each rounded matrix's output over all tokens, |E x|^2, by name


def expert_group(name: str) -> str:
    """The name of matrices that are rounded together: a layer's experts of one projection, or the matrix alone."""
    return _EXPERT.sub(".experts.*.", name)


def rounded(weight: Floats, levels: float = _LEVELS, block: int = _BLOCK) -> Floats:  # (N, K) -> (N, K)
    """A matrix rounded as for a probe: to the nearest of 2 `levels` + 1 values of each block."""
    n, k = weight.shape
    blocks = np.pad(weight, ((0, 0), (0, -k % block))).reshape(n, -1, block)
    step = np.maximum(np.abs(blocks).max(axis=2, keepdims=True) / np.float32(levels), np.float32(1e-30))
    values: Floats = np.rint(blocks / step) * step
    return values.reshape(n, -1)[:, :k]


def coarse(weight: Floats, x: Floats | None, levels: float = _LEVELS) -> Floats:  # (N, K), (T, K) -> (N, K)
    """A matrix rounded as for a probe with these inputs: columns that a few tokens' huge inputs meet are kept, as all
    that weighs errors by inputs does nearly. Their errors would be all that the probe measures."""
    values = rounded(weight, levels)
    if x is not None and len(x):
        energy = np.einsum("tk,tk->k", x, x, dtype=np.float64)
        huge = energy > _HUGE * energy.sum()
        values[:, huge] = weight[:, huge]
    return values


def probe_tokens(spec: DecoderSpec, parameters: int) -> int:
    """Number of tokens for which probing a model takes a minute."""
    probes = 4 * spec.num_layers + 2
    body = max(parameters - spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2), 0)
    return int(min(max(_OPERATIONS / (probes * max(body, 1)), _FEWEST_TOKENS), _MOST_TOKENS))


def probe_decoder(
    spec: DecoderSpec, tensors: Tensors, texts: Sequence[Ints], look: Look, progress: Progress | None = None
) -> dict[str, Probe]:
    """Probes every matrix of a decoder, by name or by the name of its group (`expert_group`); calls `look` for each
    once."""
    walk = _ProbeWalk(spec, tensors, [len(text) for text in texts], look)
    tokens = np.concatenate(list(texts))
    rows = tensors("embed")[tokens]
    look("embed", rows, None)
    other = rounded(rows)
    walk.errors["embed"] = {"embed": _mean_square(other - rows)}
    streams: dict[str, Floats] = {"": rows.copy(), "embed": other}
    for layer in range(spec.num_layers):
        streams = walk.step(layer, streams)
        if progress is not None:
            progress("sensitivity", layer + 1, spec.num_layers)
    final = {name: walk.norm("final_norm", stream) for name, stream in streams.items()}
    head = tensors("embed" if spec.tied else "head")
    look("head", head, final[""])
    final["head"] = final[""]
    walk.errors["head"] = {"head": 1.0}
    found = _divergences(head, final, {"head": _LEVELS})
    return {name: Probe(kl, walk.errors[name]) for name, kl in found.items()}


def joint_factor(spec: DecoderSpec, tensors: Tensors, texts: Sequence[Ints], probes: Mapping[str, Probe]) -> float:
    """What all matrices together, rounded to more levels, cost on a text, by what their probes say of it."""
    tokens = np.concatenate(list(texts))
    walk = _JointWalk(spec, tensors, [len(text) for text in texts])
    rows = tensors("embed")[tokens]
    streams: Signal = (rows, rounded(rows, _JOINT_LEVELS))
    for layer in range(spec.num_layers):
        streams = walk.run(layer, streams)
    final = {name: walk.norm("final_norm", stream) for name, stream in zip(("", "all"), streams, strict=True)}
    found = _divergences(tensors("embed" if spec.tied else "head"), final, {"all": _JOINT_LEVELS})["all"]
    # Squared errors grow with the squares of steps.
    said = sum(probe.kl for probe in probes.values()) * (_LEVELS / _JOINT_LEVELS) ** 2
    return found / said if said else 1.0


class _JointWalk(StreamWalk):
    """Runs layers for the unrounded stream and for one in which all matrices are rounded."""

    def weights(self, name: str, inputs: Signal) -> Signal:
        weight = self.tensor(name)
        return weight, coarse(weight, inputs[0], _JOINT_LEVELS)


class _ProbeWalk(StreamWalk):
    """Runs layers for the unrounded stream and for the probes."""

    def __init__(self, spec: DecoderSpec, tensors: Tensors, lengths: Sequence[int], look: Look) -> None:
        self._cached: dict[str, Floats] = {}
        super().__init__(spec, self._hold, lengths)
        self.errors: dict[str, dict[str, float]] = {}
        self._read = tensors
        self._look = look
        self._names: list[str] = []

    def _hold(self, name: str) -> Floats:
        """A tensor, read once for all streams of a layer."""
        if name not in self._cached:
            self._cached[name] = self._read(name)
        return self._cached[name]

    def step(self, layer: int, streams: dict[str, Floats]) -> dict[str, Floats]:  # (T, D) each
        """The streams after a layer, and those of the probes that begin in it."""
        before = streams[""]
        opened = {"": before} | {name: before.copy() for name in _groups(self.spec, layer)}
        self._names = list(opened)
        after = dict(zip(opened, self.run(layer, tuple(opened.values())), strict=True))
        rest = [name for name in streams if name]
        for start in range(0, len(rest), _STREAMS):
            names = rest[start : start + _STREAMS]
            # As texts of one stream, so that each weight is multiplied by all of them at once.
            decoder = Decoder(self.spec, self._hold, max(self._lengths))
            texts = WholeTexts(self.spec, self._lengths * len(names))
            moved = decoder.layer(layer, np.concatenate([streams[name] for name in names]), DecoderRun(texts))
            after |= zip(names, np.split(moved, len(names)), strict=True)
        self._cached.clear()
        return after

    def weights(self, name: str, inputs: Signal) -> Signal:
        """The matrix for all streams except that of its own probe, for which it is rounded."""
        weight = self.tensor(name)
        group = expert_group(name)
        x = inputs[self._names.index("")]
        self._look(name, weight, x)
        other = coarse(weight, x)
        product = x @ (other - weight).T
        error = float(np.einsum("tn,tn->", product, product, dtype=np.float64)) / sum(self._lengths)
        self.errors.setdefault(group, {})[name] = error
        return tuple(other if stream == group else weight for stream in self._names)


def _groups(spec: DecoderSpec, layer: int) -> Iterator[str]:
    """Names of the probes that begin in a layer."""
    prefix, moe = f"layers.{layer}.", spec.experts_of(layer)
    for part in spec.parts_of(layer):
        if part == "attention":
            yield from (f"{prefix}attn.{name}" for name in spec.attention_matrices)
        else:
            yield from (f"{prefix}mixer.in", f"{prefix}mixer.out")
    if layer in spec.no_mlp:
        return
    if moe is None:
        yield from (f"{prefix}mlp.{'gate_up' if spec.gated else 'up'}", f"{prefix}mlp.down")
        return
    yield from (f"{prefix}mlp.experts.*.{'gate_up' if moe.gated else 'up'}", f"{prefix}mlp.experts.*.down")
    if moe.shared_size:
        yield from (f"{prefix}mlp.shared.{'gate_up' if moe.gated else 'up'}", f"{prefix}mlp.shared.down")


def _mean_square(rows: Floats) -> float:  # (T, D)
    return float(np.einsum("td,td->", rows, rows, dtype=np.float64)) / len(rows)


def _divergences(head: Floats, final: Mapping[str, Floats], read_as: Mapping[str, float]) -> dict[str, float]:
    """Every stream's divergence from the unrounded one; some read a rounded head, of so many levels."""
    totals = dict.fromkeys((name for name in final if name), 0.0)
    count, chance = len(final[""]), np.random.default_rng(0)
    for start in range(0, count, _POSITIONS):
        states = {name: state[start : start + _POSITIONS] for name, state in final.items()}
        ids, weights = _sampled(states[""] @ head.T, chance)
        rows = head[ids]  # (t, n, D)
        reference = _products(rows, states[""])
        for name in totals:
            levels = read_as.get(name)
            flat = rows.reshape(-1, rows.shape[2])
            read = rows if levels is None else coarse(flat, states[""], levels).reshape(rows.shape)
            shift = _products(read, states[name]) - reference
            mean = (weights * shift).sum(axis=1)
            # Of the shift less its mean, so that small divergences are not lost in the rounding of large sums.
            spread = np.expm1(shift - mean[:, None], dtype=np.float64)
            totals[name] += float(np.log1p((weights * spread).sum(axis=1)).sum())
    return {name: max(total / count, 0.0) for name, total in totals.items()}


def _products(rows: Floats, states: Floats) -> Floats:  # (t, n, D), (t, D) -> (t, n)
    found: Floats = np.matmul(rows, states[:, :, None])[..., 0]
    return found


def _sampled(logits: Floats, chance: np.random.Generator) -> tuple[Ints, NDArray[np.float64]]:  # (t, V) -> (t, n) each
    """Tokens that stand for the whole vocabulary, and their shares of it: the most likely with their probabilities, and
    others drawn by theirs, with equal parts of the rest."""
    chances = np.exp(log_softmax(logits, np.float32)).astype(np.float64)
    width = chances.shape[1]
    if width <= _LIKELY + _DRAWN:
        return np.tile(np.arange(width), (len(chances), 1)), chances / chances.sum(axis=1, keepdims=True)
    likely = np.argpartition(chances, width - _LIKELY, axis=1)[:, -_LIKELY:]
    own = np.take_along_axis(chances, likely, axis=1)
    np.put_along_axis(chances, likely, 0.0, axis=1)
    sums = np.cumsum(chances, axis=1)
    left = sums[:, -1:]
    places = (np.arange(_DRAWN) + chance.random((len(sums), 1))) / _DRAWN * left
    drawn = np.stack([np.searchsorted(row, at) for row, at in zip(sums, places, strict=True)]).clip(0, width - 1)
    shares = np.concatenate([own, np.broadcast_to(left / _DRAWN, drawn.shape)], axis=1)
    return np.concatenate([likely, drawn], axis=1), shares / shares.sum(axis=1, keepdims=True)
