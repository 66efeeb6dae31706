"""Measures what smaller KV caches do to a model's predictions.

The model reads the same stories with each type of cache. Measured are perplexity and how often
the most likely next token is that of the float32 cache; of a passage given twice, how many tokens of the second time
are foreseen; the same of a needle, the beginning of one of the stories that fill the context, given again at its end;
and how far each layer's attention is from that over a float32 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edgeinfer
from edgeinfer.config import ONNX_KV_TYPES, KvType

_PLAIN: KvType = "float32"
# Tokens of a repeated passage that are given before the model has to foresee the rest of it.
_HINT = 8
# Tokens of a needle that are to be foreseen after the hint, and where needles lie, in shares of the context.
_NEEDLE = 64
_DEPTHS = (0.0, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True)
class KVQuality:
    """One model with one type of cache.

    Attributes:
        change: of the perplexity against the float32 cache.
        agreement: share of positions with the same most likely next token as with the float32 cache.
        copied: share of a repeated passage's tokens that are the most likely ones.
        attention_error: root mean square over layers of the relative error of attention's output.
        worst_layer: the largest of these errors.
        needle: share of the tokens of needles that are the most likely ones, behind `needle_context` tokens.
    """

    model: str
    kv: str
    perplexity: float
    change: float
    agreement: float
    copied: float
    attention_error: float
    worst_layer: float
    tokens: int
    copied_tokens: int
    needle: float
    needle_context: int


@dataclass(frozen=True)
class _Reading:
    """What one type of cache gives: log-probability and most likely token at each place that has a next one."""

    logprobs: NDArray[np.float64]  # (N,)
    best: NDArray[np.int64]  # (N,)
    copies: NDArray[np.bool_]  # (C,), whether the most likely token was the passage's
    needles: NDArray[np.bool_]  # (N,), whether it was the needle's
    context: int


def compare_caches(model: str | None, stories: Sequence[str]) -> list[KVQuality]:
    """Reads the stories with every type of cache, float32 first."""
    errors = {error.kv: error for error in edgeinfer.tools.measure_kv(model, stories)}
    readings = {kv: _read(model, kv, stories) for kv in ONNX_KV_TYPES if kv == _PLAIN or kv in errors}
    name = "tales" if model is None else Path(model).name
    base, results = readings[_PLAIN], []
    for kv, reading in readings.items():
        perplexity, plain = (float(np.exp(-each.logprobs.mean())) for each in (reading, base))
        result = KVQuality(
            model=name,
            kv=kv,
            perplexity=perplexity,
            change=perplexity / plain - 1,
            agreement=float((reading.best == base.best).mean()),
            copied=float(reading.copies.mean()),
            attention_error=errors[kv].mean if kv in errors else 0.0,
            worst_layer=max(errors[kv].layers) if kv in errors else 0.0,
            tokens=len(reading.best),
            copied_tokens=len(reading.copies),
            needle=float(reading.needles.mean()) if len(reading.needles) else 0.0,
            needle_context=reading.context,
        )
        results.append(result)
    return results


def _read(model: str | None, kv: KvType, stories: Sequence[str]) -> _Reading:
    logprobs, best, copies, told_ids = [], [], [], []
    with edgeinfer.load(model, kv=kv, speculation="off") as loaded:
        begin = loaded.begin_ids
        for story in stories:
            ids = loaded.tokenize(story, parse_special=False)
            ids = ids if ids[: len(begin)] == begin else begin + ids
            told = ids[: loaded.context]
            told_ids.append(told[len(begin) :])
            predicted, likely = _predict(loaded, told)
            logprobs.append(predicted)
            best.append(likely)
            passage = ids[len(begin) : len(begin) + (loaded.context - len(begin)) // 2]
            _, likely = _predict(loaded, [*begin, *passage, *passage])
            second = len(begin) + len(passage) + _HINT
            copies.append(likely[second - 1 :] == np.array(passage[_HINT:]))
        needles = [_find_needle(loaded, told_ids, depth) for depth in _DEPTHS]
        context = loaded.context
    texts = np.concatenate(logprobs), np.concatenate(best)
    return _Reading(*texts, np.concatenate(copies), np.concatenate(needles), context)


def _find_needle(model: edgeinfer.Model, stories: Sequence[Sequence[int]], depth: float) -> NDArray[np.bool_]:  # (N,)
    """Whether each token is foreseen of a story at so much of the context that is begun again at its end."""
    room = model.context - len(model.begin_ids) - _HINT - _NEEDLE
    hay = [token for story in stories for token in story][: max(room, 0)]
    starts = np.cumsum([0, *(len(story) for story in stories)])
    place = int(starts[np.abs(starts - len(hay) * depth).argmin()])
    needle = hay[place : place + _HINT + _NEEDLE]
    if len(needle) < _HINT + _NEEDLE:
        return np.zeros(0, np.bool_)
    _, likely = _predict(model, [*model.begin_ids, *hay, *needle])
    foreseen: NDArray[np.bool_] = likely[-_NEEDLE:] == np.array(needle[_HINT:])
    return foreseen


def _predict(model: edgeinfer.Model, ids: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """The log-probability of every token but the first, and the token that was most likely in its place."""
    logprobs, likely, start = [], [], 0
    for logits in model.logits(ids):  # (R, V)
        targets = np.array(ids[start + 1 : start + 1 + len(logits)], np.int64)
        rows = logits[: len(targets)].astype(np.float64)
        rows -= rows.max(axis=1, keepdims=True)
        logprobs.append(rows[np.arange(len(targets)), targets] - np.log(np.exp(rows).sum(axis=1)))
        likely.append(rows.argmax(axis=1))
        start += len(logits)
    return np.concatenate(logprobs), np.concatenate(likely)
