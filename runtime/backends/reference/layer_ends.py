"""What layers end with in plain numpy, and the streams around them: per-layer embeddings, scales, corrections."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgeinfer.bundle.arithmetic import inner_values
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.tables import PER_LAYER_TABLE
from edgeinfer.runtime.arrays import Floats, Ints

# Source: transformers' Gemma3nTextModel: the least mean square that a stream is divided by the root of.
_LEAST_SQUARE = np.float32(1e-5)


@dataclass(frozen=True)
class ReferenceEnds:
    """The ends of a decoder's layers.

    Attributes:
        linear, norm: product and norm by the names of their weights.
        weight: a tensor by its name.
    """

    spec: DecoderSpec
    linear: Callable[[str, Floats], Floats]
    norm: Callable[[str, Floats], Floats]
    weight: Callable[[str], Floats]

    def vectors(self, tokens: Ints, embedded: Floats) -> Floats | None:  # (S,), (S, D) -> (S, L, P)
        """The vectors of per-layer embeddings, where the decoder has any."""
        spec = self.spec
        if spec.per_layer is None:
            return None
        known = np.where(tokens < spec.per_layer.vocab_size, tokens, 0)
        rows = known[:, None] * spec.num_layers + np.arange(spec.num_layers)
        product = self.linear("per_layer.projection", embedded).reshape(*rows.shape, spec.per_layer.size)
        vectors: Floats = self.norm("per_layer.norm", product) + self.weight(PER_LAYER_TABLE)[rows]
        return vectors

    def _given(self, layer: int, x: Floats, vectors: Floats) -> Floats:  # (S, D), (S, L, P) -> (S, D)
        """What a layer's per-layer embedding makes of hidden states."""
        prefix = f"layers.{layer}.per_layer"
        gate = inner_values(self.spec.activation, self.linear(f"{prefix}.gate", x))
        return self.norm(f"{prefix}.norm", self.linear(f"{prefix}.out", gate * vectors[:, layer]))

    def ended(self, layer: int, x: Floats, vectors: Floats | None) -> Floats:  # (S, D), (S, L, P) -> (S, D)
        """The hidden states after a layer: with its per-layer embedding, and scaled, where the decoder has that."""
        if vectors is not None:
            x = x + self._given(layer, x, vectors)
        return x * self.weight("layer_scales")[layer] if self.spec.layer_scales else x

    def entered(self, x: Floats) -> Floats:  # (S, D) -> (S, A D)
        """Embeddings in all streams, where the decoder has more than one."""
        if self.spec.streams is None:
            return x
        return np.concatenate([x[:, None], self._alike(x, self.linear("streams.enter", x))], axis=1).reshape(len(x), -1)

    def left(self, x: Floats) -> Floats:  # (R, A D) -> (R, D)
        """What the head reads of all streams."""
        if self.spec.streams is None:
            return x
        apart, weights = self._apart(x), self.weight("streams.leave")
        matrices = weights.reshape(-1, self.spec.hidden_size, self.spec.hidden_size)
        others = np.einsum("rad,aed->rae", apart[:, 1:], matrices).reshape(len(x), -1)
        mean: Floats = np.concatenate([apart[:, :1], self._alike(apart[:, 0], others)], axis=1).mean(axis=1)
        return mean

    def _apart(self, x: Floats) -> Floats:  # (S, A D) -> (S, A, D)
        return x.reshape(len(x), -1, self.spec.hidden_size)

    def _alike(self, first: Floats, others: Floats) -> Floats:  # (S, D), (S, (A - 1) D) -> (S, A - 1, D)
        """The other streams with the magnitude of the first."""
        apart = self._apart(others)
        wanted = np.square(first).mean(axis=1, keepdims=True)[:, None]
        own = np.maximum(np.square(apart).mean(axis=2, keepdims=True), _LEAST_SQUARE)
        alike: Floats = apart * np.sqrt(wanted / own)
        return alike

    def _routed(self, layer: int, x: Floats, runs: bool) -> Floats:  # (S, D) -> (S, A)
        """What a layer's router says of hidden states."""
        prefix = f"layers.{layer}.streams"
        routed: Floats = np.tanh(self.linear(f"{prefix}.router", self.norm(f"{prefix}.router_norm", x)))
        return routed * np.float32(runs)

    def predicted(self, layer: int, x: Floats, runs: bool) -> Floats:  # (S, A D) -> (S, A, D)
        """The streams that a layer begins with."""
        apart = self._apart(x)
        weights = self.linear(f"layers.{layer}.streams.predict", self._routed(layer, apart[:, 0], runs))
        changed: Floats = apart + weights.reshape(len(x), apart.shape[1], -1) @ apart
        return changed

    def augmented(self, layer: int, normed: Floats, x: Floats) -> Floats:  # (S, D), (S, D) -> (S, D)
        """Hidden states after attention, with the augmented residual of what that read."""
        prefix = f"layers.{layer}.laurel"
        given = self.linear(f"{prefix}.up", self.linear(f"{prefix}.down", normed))
        return (x + normed + self.norm(f"{prefix}.norm", given)) * np.float32(math.sqrt(0.5))

    def corrected(
        self, layer: int, start: Floats, x: Floats, vectors: Floats | None, runs: bool
    ) -> Floats:  # (S, A, D), (S, D), (S, L, P) -> (S, A D)
        """The streams after a layer."""
        prefix = f"layers.{layer}.streams"
        shares = 1 + self.linear(f"{prefix}.correct", self._routed(layer, x, runs))  # (S, A)
        streams = start + shares[:, :, None] * (x - start[:, 0])[:, None]
        if runs and vectors is not None:
            first = streams[:, 0]
            assert self.spec.streams is not None, "only such decoders have streams"
            if self.spec.streams.scaled:
                first = first * self.weight(f"{prefix}.scale")
            streams[:, 1:] += self._given(layer, first, vectors)[:, None]
        whole: Floats = streams.reshape(len(x), -1)
        return whole
