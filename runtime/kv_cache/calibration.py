"""Finds the scales of quantized caches: a model reads texts with a float32 cache, and what it cached tells.

Keys are taken as cached, after rotation, but as if every row lay anywhere in the context: what a channel holds changes
with the position, slowly in some channels, so that the places of a short text would show a part of it. int8 scales
reach beyond the largest magnitude of each channel. int4 has 16 levels, so the few largest values cost the others too
much: its scales are those that make the squared error of the calibration rows least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgeinfer.bundle import RopeSpec
from edgeinfer.bundle.arithmetic import inverse_frequencies, rotate
from edgeinfer.bundle.kv_scales import KVScales, LayerScales
from edgeinfer.bundle.kv_types import FLOAT32, KV, QUANTIZED_KV, KVType, load, store
from edgeinfer.errors import UsageError
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, ForwardInput

__all__ = ["MOST_ROWS", "Progress", "calibrate"]

Progress = Callable[[str, int, int], None]

# Rows that are looked at. A model of 8B parameters has 256 KB in each.
MOST_ROWS = 1024
_CHUNK = 64
# int8 loses more by clipping than by wider steps, and texts to come reach further: of 1.1, 1.3, 1.5 and 2 times what
# was seen, 1.3 and 1.5 gave the least error of attention by a thousand rows, and by fifty rows 1.5 a third of 1.1's.
_HEADROOM = np.float32(1.4)
# Shares of a channel's largest magnitude that int4 may reach; for Gaussian channels 0.8 is best, for longer tails less.
_SHARES = np.linspace(0.3, 1.0, 29, dtype=np.float32)
# A channel that is always zero, as of padded heads, has any scale.
_LEAST = np.float32(1e-6)


def calibrate(
    backend: Backend,
    texts: Sequence[Sequence[int]],
    rope: RopeSpec,
    *,
    reply_tokens: int = 0,
    progress: Progress | None = None,
) -> KVScales:
    """Scales for every quantized type of cache, from what the model caches of these texts.

    At most `MOST_ROWS` tokens are looked at, shared among the texts. The backend's cache is empty afterwards.

    Args:
        backend: with a float32 cache.
        texts: token ids of each; what does not fit the context is left out.
        rope: how the model rotates keys.
        reply_tokens: that the model itself adds to every text, drawn from its distribution, always the same ones.
        progress: called with a stage, texts done and texts in all.

    Raises:
        UsageError: there is no token, or the backend's cache is quantized.
        BundleError: the model caches numbers that are not finite.
    """
    texts = [text for text in texts if text]
    if not texts:
        raise UsageError("There is no text to calibrate with.", "Use a file that contains text.")
    if backend.cache.snapshot(0, 0).kv != FLOAT32:
        raise UsageError("Calibration needs a float32 KV cache.", f"Load the model with kv={FLOAT32!r}.")
    most = min(max(1, MOST_ROWS // len(texts)), backend.cache.capacity)
    cached: list[CacheSnapshot] = []
    for number, text in enumerate(texts[:MOST_ROWS]):
        if progress is not None:
            progress("calibrating the cache", number, len(texts))
        backend.cache.trim(0)
        _read(backend, text[:most], min(reply_tokens, most - len(text[:most])), np.random.default_rng(number))
        cached.append(backend.cache.snapshot())
    backend.cache.trim(0)
    found: dict[str, list[LayerScales]] = {kv: [] for kv in QUANTIZED_KV}
    turns = _turns(cached, inverse_frequencies(rope, backend.cache.capacity), backend.geometry.max_positions)
    for layer in range(backend.geometry.num_layers):
        keys = np.concatenate([snapshot.keys[layer] for snapshot in cached], axis=1)
        values = np.concatenate([snapshot.values[layer] for snapshot in cached], axis=1)
        keys = rotate(keys.swapaxes(0, 1), *turns).swapaxes(0, 1)
        for kv, scales in found.items():
            scales.append(LayerScales(_scales(KV[kv], keys), _scales(KV[kv], values)))
    return KVScales({kv: tuple(scales) for kv, scales in found.items()}, sum(snapshot.length for snapshot in cached))


def _read(backend: Backend, text: Sequence[int], more: int, random: np.random.Generator) -> None:
    """Evaluates a text and what the model goes on with."""
    logits: Floats = np.zeros((0, 0), np.float32)
    for start in range(0, len(text), _CHUNK):
        tokens = np.array(text[start : start + _CHUNK], np.int64)
        size = len(tokens)
        logits = backend.forward(ForwardInput(tokens, np.arange(start, start + size), np.array([size - 1]))).logits
    for position in range(len(text), len(text) + more):
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        token = int(np.argmax(logits[0] + random.gumbel(size=logits.shape[1])))
        logits = backend.forward(ForwardInput(np.array([token]), np.array([position]), np.zeros(1, np.int64))).logits


def _turns(cached: Sequence[CacheSnapshot], frequencies: Floats, places: int) -> tuple[Floats, Floats]:  # 2 x (N, r/2)
    """Cosine and sine of what turns the keys of all rows to places drawn from the whole context."""
    rows = np.concatenate([np.arange(snapshot.length) for snapshot in cached])
    moves = np.random.default_rng(0).integers(0, places, len(rows)) - rows
    angles = moves[:, None].astype(np.float32) * frequencies
    return np.cos(angles), np.sin(angles)


def _scales(kind: KVType, rows: Floats) -> Floats:  # (H, n, h) -> (H h,)
    """The scale of each channel."""
    peaks: Floats = np.abs(rows).max(axis=1).reshape(-1)
    peaks = np.maximum(peaks, max(_LEAST * peaks.max(), _LEAST))
    if kind.bits >= 8:
        return peaks * _HEADROOM / np.float32(kind.largest)
    best, least = peaks, np.full(len(peaks), np.inf, np.float32)
    for share in _SHARES:
        scales = peaks * share / np.float32(kind.largest)
        error = np.square(load(kind, store(kind, rows, scales), scales) - rows).sum(axis=1).reshape(-1)
        best, least = np.where(error < least, scales, best), np.minimum(error, least)
    return best
