"""What the latest tokens attend to: their queries, computed again layer by layer; knows nothing of who wants them.

Attention scores are no output of the graph. The hidden states that enter each layer come from running the latest
tokens again one layer at a time, at the price of one pass; the queries follow from the bundle's own weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edgeinfer.bundle import Bundle, DecoderSpec
from edgeinfer.bundle.arithmetic import rope_tables
from edgeinfer.bundle.packing import dequantize
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, ForwardInput

__all__ = ["Observer", "attention"]

# Rows of a projection multiplied out at once, so that a large model's is never there as a whole.
_ROWS = 512
_NO_ROWS = np.zeros(0, np.int64)


class Observer:
    """Queries of the tokens that were fed last.

    Args:
        bundle: with a decoder description and a table of its weights.
        backend: runs it; must skip layers and resume from hidden states.
    """

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        assert bundle.manifest.decoder is not None, "whoever makes an observer checks that"
        self._bundle = bundle
        self._spec = bundle.manifest.decoder
        self._backend = backend

    @staticmethod
    def planned_bytes(spec: DecoderSpec, tokens: int) -> int:
        """Bytes of the queries of so many tokens in all layers, and of making them."""
        queries = spec.num_layers * tokens * spec.q_size
        weights = 2 * min(_ROWS, spec.q_size) * spec.hidden_size
        return 4 * (queries + 4 * tokens * (spec.q_size + spec.hidden_size) + weights)

    def queries(self, tokens: Sequence[int]) -> list[Floats]:  # L x (H, g, w, h)
        """Rotated queries of the last tokens, grouped by the key head they attend with, of every layer.

        Args:
            tokens: in the cache's last rows, one each. These rows are written again, with what they hold. (w,)

        Raises:
            PassCancelledError: a pass was cancelled; the cache has lost these rows.
        """
        layers, states = self._spec.num_layers, self._entering(tokens)
        start = self._backend.cache.length - len(tokens)
        tables = rope_tables(self._spec.rope, start + len(tokens), self._backend.cache.capacity)
        cos, sin = (table[start:] for table in tables)  # (w, r/2)
        return [self._query(layer, state, cos, sin) for layer, state in zip(range(layers), states, strict=True)]

    def _entering(self, tokens: Sequence[int]) -> Iterator[Floats]:  # L x (w, D), one at a time
        """The hidden states before each layer. The last layer is not run, but its rows are as they were."""
        layers, start = self._spec.num_layers, self._backend.cache.length - len(tokens)
        ids, places = np.array(tokens, np.int64), np.arange(start, start + len(tokens))
        hidden: Floats | None = None
        for layer in range(layers):
            mask = np.arange(2 * layers) // 2 == layer - 1  # none before the first: what comes out are the embeddings
            self._backend.cache.trim(start)
            output = self._backend.forward(ForwardInput(ids, places, _NO_ROWS, layer_mask=mask, hidden=hidden))
            assert output.hidden is not None, "a backend that resumes gives hidden states"
            hidden = output.hidden.copy()
            yield hidden

    def _query(self, layer: int, state: Floats, cos: Floats, sin: Floats) -> Floats:  # (w, D) -> (H, g, w, h)
        spec, name = self._spec, f"layers.{layer}.attn.qkv"
        q = self._projected(name, self._normed(state, f"layers.{layer}.attn_norm"))
        if spec.qkv_bias:
            q += self._bundle.tensor(f"{name}_bias")[: spec.q_size]
        q = q.reshape(len(state), spec.num_heads, spec.head_dim)
        if spec.qk_norm:
            q = self._normed(q, f"layers.{layer}.attn.q_norm")
        half = spec.rope.dim // 2
        a, b = q[..., :half].copy(), q[..., half : 2 * half]
        q[..., :half] = a * cos[:, None] - b * sin[:, None]
        q[..., half : 2 * half] = b * cos[:, None] + a * sin[:, None]
        group = spec.num_heads // spec.num_kv_heads
        grouped = q.reshape(len(state), spec.num_kv_heads, group, spec.head_dim)
        return np.ascontiguousarray(grouped.transpose(1, 2, 0, 3))

    def _projected(self, name: str, x: Floats) -> Floats:  # (w, D) -> (w, q_size)
        entry, size = self._bundle.manifest.tensor(name), self._spec.q_size
        if entry.bits == 32:
            whole: Floats = x @ self._bundle.tensor(name)[:size].T
            return whole
        out = np.empty((len(x), size), np.float32)
        for start in range(0, size, _ROWS):
            stop = min(start + _ROWS, size)
            part = self._bundle.rows(entry, start, stop)
            sizes = {"bits": entry.bits, "block_size": entry.block_size, "k": entry.shape[1]}
            out[:, start:stop] = x @ dequantize(part.data, part.scales, part.zero_points, **sizes).T
        return out

    def _normed(self, x: Floats, name: str) -> Floats:  # (..., d) -> (..., d)
        scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(self._spec.norm_eps))
        normed: Floats = x * scale * self._bundle.tensor(name)
        return normed


def attention(queries: Floats, keys: Floats) -> Floats:  # (H, g, w, h), (H, n, h) -> (H, n)
    """How much the last w rows attend to each row: the mean over heads of a group and over the rows that may see it."""
    _, group, size, head_dim = queries.shape
    rows = keys.shape[1]
    seen = np.arange(rows) <= np.arange(rows - size, rows)[:, None]  # (w, n)
    received = np.zeros(keys.shape[:2], np.float32)
    for head, key in enumerate(keys):
        scores = queries[head].reshape(group * size, head_dim) @ key.T / np.float32(np.sqrt(head_dim))
        scores = np.where(seen, scores.reshape(group, size, rows), np.float32(-np.inf))  # (g, w, n)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        received[head] = (powers / powers.sum(axis=-1, keepdims=True)).sum(axis=(0, 1))
    means: Floats = received / (group * seen.sum(axis=0)).astype(np.float32)
    return means
