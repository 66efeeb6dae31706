"""Proves on the device at hand that rows do not depend on how a chain is cut into passes, and measures by how much they
do where it fails; knows backends by their contract, and nothing of drafts.

Where it fails, a choice may hang on rounding. `near_edge` tells which: such a row can be decided again by
the pass that plain decoding would run. That gives plain decoding's text only if the rows before it are plain decoding's
too: their differences reach every later row through the cache, and there they are as large as those of the row itself
(docs/log).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass

# Passes begin amid a vector of eight or sixteen numbers, and the text reaches into the next one.
_PROMPT = 11
_TEXT = 8
# Rows by which the noise is measured where rows differ, and the rows per pass that they are compared in.
_MOST_ROWS = 64
_WIDE = 8
# Tokens among which a choice falls: their logits' differences decide, not those of the vocabulary's extremes.
_LIKELY = 8
# Of a backend that promises nothing: what one int8 that was rounded the other way moved logits by in llama.cpp
# (docs/log/2026-11-22.md), which in a short text may not happen.
_LEAST_NOISE = 0.02
# Half of five standard deviations of the difference between two likely tokens: of 4 to 8 thousand rows of 4-bit models
# none moved further than 4.6 (docs/log).
_NOISE_SIGMAS = 2.5


def filler_tokens(backend: Backend, count: int, skip: int = 0) -> Ints:  # (count,)
    """Token ids that look different; the same for the same `skip`. Their values change what a pass costs where they
    choose experts, which may be in memory or not, so passes that are timed are given others each time."""
    tokens: Ints = ((np.arange(count) + skip) * 7919 + 11) % backend.geometry.vocab_size
    return tokens


@dataclass(frozen=True)
class ExactCheck:
    """Tells what differently cut passes over one text gave."""

    bit_identical: bool  # every logit, key and value was the same
    largest_difference: float  # between two logits of the same row and token
    # Between the best and the second logit, the largest of a row whose best token changed; 0 if none did.
    worst_gap: float
    # Half of what the difference between the logits of two likely tokens may move by; 0 where bit-identical.
    noise: float
    rows: int  # of logits that were compared


class _Differences:
    """Collects what rows of logits differ by."""

    def __init__(self) -> None:
        self.largest = self.worst_gap = 0.0
        self.rows = 0
        self._squares: list[float] = []

    def add(self, plain: Floats, other: Floats) -> None:  # (R, V), (R, V)
        self.rows += len(plain)
        # Row by row: a whole table of differences would take as much again as the logits of a check.
        for row, changed in zip(plain, other, strict=True):
            self.largest = max(self.largest, float(np.abs(row - changed).max()))
            likely = _likely(row)
            moved = changed[likely] - row[likely]
            self._squares += np.square(moved[1:] - moved[0], dtype=np.float64).tolist()
            if changed.argmax() != row.argmax():
                self.worst_gap = max(self.worst_gap, _gap(row))

    @property
    def noise(self) -> float:
        return _NOISE_SIGMAS * float(np.sqrt(np.mean(self._squares)))


def _likely(row: Floats) -> Ints:  # (V,) -> (L,), the best first
    count = min(_LIKELY, len(row))
    some = np.argpartition(row, len(row) - count)[len(row) - count :]
    order: Ints = some[np.argsort(-row[some])]
    return order


def check_exact(backend: Backend, cache: KVCache, budget_s: float = 0.3) -> ExactCheck:
    """Compare passes over one text that is cut in different ways; leaves the cache empty.

    Takes seven passes where nothing differs, and one over a tree where side branches are to be as exact. A backend that
    promises nothing is only asked by how much rows differ, in `budget_s` seconds and one row at least, and is never
    taken to have none: on short texts its rows may agree by accident.
    """
    size = min(_TEXT, cache.capacity)
    past = min(_PROMPT, cache.capacity - size)
    tokens = filler_tokens(backend, past + size)
    cache.trim(0)
    if past:
        backend.forward([(cache, Pass(tokens[:past], np.arange(past), np.zeros(0, np.int64)))])
    cache.mark()
    if not backend.capabilities.exact:
        drift = _drift(backend, cache, past, budget_s)
        cache.trim(0)
        return ExactCheck(False, drift.largest, drift.worst_gap, max(drift.noise, _LEAST_NOISE), drift.rows)
    cache.hold(past)
    differences, same_cache = _Differences(), True
    first: tuple[Floats, CacheSnapshot] | None = None
    for cuts in _cuts(size):
        cache.trim(past)
        if first is None:
            first = _rows(backend, cache, tokens[past:]).copy(), cache.snapshot()
            continue
        for start, end in pairwise(cuts):
            differences.add(_rows(backend, cache, tokens[past + start : past + end]), first[0][start:end])
        same_cache = same_cache and _same(cache.snapshot(), first[1])
    if backend.capabilities.paged and first is not None and past and past + 2 * size <= cache.capacity:
        differences.add(_side_rows(backend, cache, past, tokens[past:]), first[0])
        same_cache = same_cache and _same(cache.snapshot(), first[1])
    cache.hold(None)
    found = [differences]
    exact = differences.largest == 0 and same_cache
    if not exact:
        found.append(_drift(backend, cache, past, budget_s))
    cache.trim(0)
    largest, gap = max(d.largest for d in found), max(d.worst_gap for d in found)
    return ExactCheck(exact, largest, gap, max(d.noise for d in found), sum(d.rows for d in found))


def _cuts(size: int) -> Iterator[list[int]]:
    """Where passes over so many tokens begin and end: one pass; two single rows and the rest; two odd numbers."""
    yield [0, size]
    yield sorted({0, 1, min(2, size), size})
    yield sorted({0, min(3, size), size})


def _side_rows(backend: Backend, cache: KVCache, past: int, text: Ints) -> Floats:  # (S,) -> (S, V)
    """The logits of a text, every token of which is a second child in a tree, and whose rows alone are kept."""
    cache.trim(past)
    places = np.arange(len(text))
    rows = 2 * places + 1
    others = (text + 1) % backend.geometry.vocab_size
    tokens = np.stack([others, text], axis=1).ravel()
    batch = Pass(tokens, past + np.repeat(places, 2), rows, tree=np.repeat(rows - 2, 2))
    (output,) = backend.forward([(cache, batch)])
    cache.keep(past, rows.tolist())
    return output.logits


def _rows(backend: Backend, cache: KVCache, tokens: Ints) -> Floats:  # (S,) -> (S, V)
    """The logits of a pass over these tokens; a view until the next one."""
    rows = np.arange(len(tokens))
    return backend.forward([(cache, Pass(tokens, rows + cache.length, rows))])[0].logits


def _same(a: CacheSnapshot, b: CacheSnapshot) -> bool:
    pairs = zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True)
    return all(np.array_equal(mine, other) for mine, other in pairs)


def _drift(backend: Backend, cache: KVCache, past: int, budget_s: float) -> _Differences:
    """Compare a text evaluated token by token with wide passes, each over what it put into the cache itself."""
    differences = _Differences()
    most = min(_MOST_ROWS, cache.capacity - past)
    prompt, tokens = np.split(filler_tokens(backend, past + most), [past])
    # Narrow passes take nearly all of the time.
    deadline = time.perf_counter() + 0.8 * budget_s
    _go_back(backend, cache, prompt)
    narrow: list[Floats] = []
    while len(narrow) < most and (not narrow or time.perf_counter() < deadline):
        narrow.append(_rows(backend, cache, tokens[len(narrow) : len(narrow) + 1]).copy())
    _go_back(backend, cache, prompt)
    for start in range(0, len(narrow), _WIDE):
        plain = np.concatenate(narrow[start : start + _WIDE])
        differences.add(plain, _rows(backend, cache, tokens[start : start + len(plain)]))
    return differences


def _go_back(backend: Backend, cache: KVCache, prompt: Ints) -> None:  # (P,)
    """Leaves a prompt in the cache, parts of which are fed again where recurrent layers cannot go back to its end."""
    kept = cache.rewindable_to(len(prompt))
    cache.trim(kept)
    if kept < len(prompt):
        _rows(backend, cache, prompt[kept:])


def _gap(row: Floats) -> float:  # (V,)
    second, best = np.partition(row, len(row) - 2)[-2:]
    return float(best - second)


def near_edge(choose: Callable[[Floats], int], logits: Floats, noise: float) -> bool:  # (V,)
    """Whether a choice, drawn or greedy, would be another if every logit moved by at most `noise`. The largest sum of
    logit and Gumbel noise changes first where all other tokens gain and the chosen one loses. Of the edge of a
    truncation that finds what this move shows."""
    shift = np.float32(noise)
    moved = logits + shift
    chosen = choose(logits)
    moved[chosen] = logits[chosen] - shift
    return choose(moved) != chosen
