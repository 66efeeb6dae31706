"""Measures on a text what rounding each matrix of a decoder does to its predictions.

A probe is the whole model with one matrix, or one projection of all experts of a layer, coarsely rounded. All probes
walk through the layers together, each as a stream of its own that leaves the unrounded one where its matrix is, so
that every weight is read once. At the end stands the KL divergence of each from the unrounded model. For small errors
it grows with the squared error of the matrix's output, which makes errors of different matrices comparable.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import log_softmax
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.quant.calibration_layers import LayerWalk, Signal, Tensors
from edgeinfer.results import Progress

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
# Called for every matrix with its name, its values and its inputs (T, K); inputs of experts are already multiplied by
# what their results will be. The embedding's are None.
Look = Callable[[str, Floats, Floats | None], None]

_EXPERT = re.compile(r"\.experts\.\d+\.")
# The rounding of probes: 7 levels in blocks of 32, between what 2 and 4 bits do, so that both are predicted well.
_LEVELS, _BLOCK = 3.5, 32
# Streams that walk through a layer together; their widest activations lie in memory at once.
_STREAMS = 16
# A minute or two of two slow cores; at most so many tokens, which more would not make more exact, and at least these.
_OPERATIONS = 4e12
_MOST_TOKENS, _FEWEST_TOKENS = 768, 64
_HEAD_ROWS = 8192


@dataclass(frozen=True)
class Probe:
    kl: float  # divergence from the unrounded model, in nats per token
    errors: dict[str, float]  # mean squared error of each rounded matrix's output over all tokens, |E x|^2, by name


def expert_group(name: str) -> str:
    """The name of matrices that are rounded together: a layer's experts of one projection, or the matrix alone."""
    return _EXPERT.sub(".experts.*.", name)


def rounded(weight: Floats) -> Floats:  # (N, K) -> (N, K)
    """A matrix rounded for a probe: to the nearest of seven values of each block."""
    n, k = weight.shape
    blocks = np.pad(weight, ((0, 0), (0, -k % _BLOCK))).reshape(n, -1, _BLOCK)
    step = np.maximum(np.abs(blocks).max(axis=2, keepdims=True) / np.float32(_LEVELS), np.float32(1e-30))
    values: Floats = np.clip(np.rint(blocks / step), -3, 3) * step
    return values.reshape(n, -1)[:, :k]


def probe_tokens(spec: DecoderSpec, parameters: int) -> int:
    """Number of tokens for which probing a model takes a minute or two."""
    probes = 4 * spec.num_layers + 2
    body = max(parameters - spec.vocab_size * spec.hidden_size, 0)
    each = 2 * probes * (body / 2 + spec.vocab_size * spec.hidden_size)
    return int(min(max(_OPERATIONS / each, _FEWEST_TOKENS), _MOST_TOKENS))


def probe_decoder(
    spec: DecoderSpec, tensors: Tensors, texts: Sequence[Ints], look: Look, progress: Progress | None = None
) -> dict[str, Probe]:
    """Probes every matrix of a decoder, by name or by the name of its group (`expert_group`); calls `look` for each
    once."""
    walk = _ProbeWalk(spec, tensors, [len(text) for text in texts], look)
    tokens = np.concatenate(list(texts))
    embedding = tensors("embed")
    look("embed", embedding, None)
    rows = embedding[tokens]
    coarse = rounded(rows)
    walk.errors["embed"] = {"embed": _mean_square(coarse - rows)}
    streams: dict[str, Floats] = {"": rows.copy(), "embed": coarse}
    del embedding
    for layer in range(spec.num_layers):
        streams = walk.step(layer, streams)
        if progress is not None:
            progress("sensitivity", layer + 1, spec.num_layers)
    final = dict(zip(streams, walk.norm("final_norm", tuple(streams.values())), strict=True))
    return _divergences(spec, tensors("embed" if spec.tied else "head"), final, walk, look)


class _ProbeWalk(LayerWalk):
    """Runs layers for the unrounded stream and for the probes."""

    def __init__(self, spec: DecoderSpec, tensors: Tensors, lengths: Sequence[int], look: Look) -> None:
        self._cached: dict[str, Floats] = {}
        super().__init__(spec, self._hold, lengths, lambda name, weight, statistics: weight, (False,), hessian=False)
        self.errors: dict[str, dict[str, float]] = {}
        self._read = tensors
        self._tokens = sum(lengths)
        self._look = look
        self._names: list[str] = []
        self._opening = False

    def _hold(self, name: str) -> Floats:
        """A tensor, read once for all streams of a layer."""
        if name not in self._cached:
            self._cached[name] = self._read(name)
        return self._cached[name]

    def step(self, layer: int, streams: dict[str, Floats]) -> dict[str, Floats]:  # (T, D) each
        """The streams after a layer, and those of the probes that begin in it."""
        before = streams[""]
        groups = [before.copy() for _ in _groups(self.spec, layer)]
        opened = dict(zip(_groups(self.spec, layer), groups, strict=True))
        self._opening = True
        after = self._run(layer, {"": before} | opened)
        self._opening = False
        rest = [name for name in streams if name]
        for start in range(0, len(rest), _STREAMS):
            after |= self._run(layer, {name: streams[name] for name in rest[start : start + _STREAMS]})
        self._cached.clear()
        return after

    def _run(self, layer: int, streams: dict[str, Floats]) -> dict[str, Floats]:
        self._names = list(streams)
        self.quantized = (False,) * len(streams)
        return dict(zip(streams, self.run(layer, tuple(streams.values())), strict=True))

    def weights(self, name: str, inputs: Signal) -> Signal:
        """The matrix for all streams except that of its own probe, for which it is rounded."""
        weight = self.tensors(name)
        group = expert_group(name)
        if not self._opening:
            return (weight,) * len(inputs)
        x = inputs[self._names.index("")]
        self._look(name, weight, x)
        coarse = rounded(weight)
        product = x @ (coarse - weight).T
        error = float(np.einsum("tn,tn->", product, product, dtype=np.float64)) / self._tokens
        self.errors.setdefault(group, {})[name] = error
        return tuple(coarse if stream == group else weight for stream in self._names)


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


def _divergences(
    spec: DecoderSpec, head: Floats, final: dict[str, Floats], walk: _ProbeWalk, look: Look
) -> dict[str, Probe]:
    """Every stream's divergence from the unrounded one, the head's own probe included."""
    reference = log_softmax(final[""] @ head.T, np.float32)
    probabilities = np.exp(reference)

    def divergence(logits: Floats) -> float:
        terms = probabilities * (reference - log_softmax(logits, np.float32))
        return max(float(terms.sum(axis=1, dtype=np.float64).mean()), 0.0)

    runs = (head[start : start + _HEAD_ROWS] for start in range(0, len(head), _HEAD_ROWS))
    coarse_logits = np.concatenate([final["embed" if spec.tied else ""] @ rounded(run).T for run in runs], axis=1)
    probes = {}
    for name, state in final.items():
        if name:
            logits = coarse_logits if spec.tied and name == "embed" else state @ head.T
            probes[name] = Probe(divergence(logits), walk.errors[name])
    if not spec.tied:
        look("head", head, final[""])
        error = coarse_logits - final[""] @ head.T
        probes["head"] = Probe(divergence(coarse_logits), {"head": _mean_square(error)})
    return probes
