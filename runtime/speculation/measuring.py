"""Measures what passes of the target and guesses of drafters cost on this device.

c(m) is the time of one pass of the target over m new tokens with the logits of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.cache import CopiedRows
from edgeinfer.runtime.backends.contract import HEAD_ROWS, Backend, ForwardInput
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter
from edgeinfer.runtime.speculation.evaluated import head_of

# Every size that short drafts have, then steps that show where the cost turns steep.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
# Sizes that tell anything at all; they are measured even where that takes longer than the budget.
_FEWEST = 2
# Visits to a size at most: on the smallest model the budget would allow hundreds.
_MOST_VISITS = 12
# Chains asked of a drafter at most, and guesses in each.
_CHAINS = 8
_CHAIN = 4


def filler_tokens(backend: Backend, count: int, skip: int = 0) -> Ints:  # (count,)
    """Token ids that look different; the same for the same `skip`.

    Their values change what a pass costs where they choose experts, which may be in memory or not, so passes that are
    timed are given others each time.
    """
    tokens: Ints = ((np.arange(count) + skip) * 7919 + 11) % backend.geometry.vocab_size
    return tokens


def sizes_to_measure(step: int, most: int) -> tuple[int, ...]:
    """Rows of the passes that `measure_passes` times where cache and time suffice; arguments as it takes them."""
    return tuple(m for m in _SIZES if (m == 1 or m % step == 0) and m <= max(most, step))


def measure_passes(
    backend: Backend, budget_s: float = 0.6, past: int = 64, step: int = 1, most: int = _SIZES[-1]
) -> PassCosts:
    """Times passes of 1 to 32 rows with all their logits; leaves the cache empty.

    The best of a few visits counts, as what else runs on the machine only ever adds, and the few visits that fit the
    budget are too few for a median. All sizes take turns, ascending; later turns leave out those that have had their
    share of the budget, so large passes run once where they are slow. What does not fit the budget is not measured.

    Args:
        budget_s: seconds; two sizes are measured even where that takes longer.
        past: rows in the cache before each pass, fewer where it is small.
    """
    capacity = backend.cache.capacity
    past = min(past, max(0, capacity - _SIZES[-1]))
    sizes = [m for m in sizes_to_measure(step, most) if past + m <= capacity] or [1]
    backend.cache.trim(0)
    _fill(backend, past)
    # Recurrent layers go back to it, whatever a pass leaves.
    backend.cache.mark()
    deadline = time.perf_counter() + budget_s
    _timed_pass(backend, past, 1, 0)  # reads the weights' pages in, and is no measure
    skip = 1
    best: dict[int, float] = {}
    spent = dict.fromkeys(sizes, 0.0)
    for visit in range(_MOST_VISITS):
        for size in sizes:
            expected = best.get(size) or max(best.values(), default=0.0)
            late = time.perf_counter() + expected > deadline
            if late and len(best) >= _FEWEST:
                break
            if visit and spent[size] >= budget_s / len(sizes):
                continue
            seconds = _timed_pass(backend, past, size, skip)
            skip += size
            spent[size] += seconds
            best[size] = min(seconds, best.get(size, seconds))
    backend.cache.trim(0)
    return PassCosts(tuple((size, best[size] * 1e3) for size in sizes if size in best), step)


def _timed_pass(backend: Backend, past: int, size: int, skip: int) -> float:
    tokens, rows, head = filler_tokens(backend, size, skip), np.arange(size), head_of(backend)
    started = time.perf_counter()
    output = backend.forward(ForwardInput(tokens, rows + past, rows if head is None else rows[:HEAD_ROWS]))
    if head is not None and output.hidden is not None and size > HEAD_ROWS:
        # As for a draft of which nothing is refused.
        hidden = output.hidden.copy()
        for first in range(HEAD_ROWS, size, HEAD_ROWS):
            head.head(hidden[first : first + HEAD_ROWS])
    seconds = time.perf_counter() - started
    backend.cache.trim(past)
    return seconds


def _fill(backend: Backend, length: int) -> None:
    """Puts rows into an empty cache, for passes to attend to."""
    if backend.cache.copyable and backend.capabilities.copies and not backend.geometry.states:
        backend.cache.restore(_blank(backend, length))
    elif length:
        backend.forward(ForwardInput(filler_tokens(backend, length), np.arange(length), np.zeros(0, np.int64)))


def _blank(backend: Backend, length: int) -> CopiedRows:
    """A cache of zeros, which costs nothing to make and as much as any other to attend to."""
    empty = backend.cache.snapshot(0, 0)
    # Layers that keep the same share their zeros.
    kinds = {(len(a), a.shape[2], a.dtype) for a in (*empty.keys, *empty.values)}  # of (H, 0, width)
    zeros = {kind: np.zeros((kind[0], length, kind[1]), kind[2]) for kind in kinds}
    keys, values = ([zeros[len(a), a.shape[2], a.dtype] for a in rows] for rows in (empty.keys, empty.values))
    return CopiedRows(length, keys, values, empty.kv, empty.scales)


def measure_guesses(drafter: Drafter, context: DraftContext, budget_s: float = 0.05) -> float:
    """Milliseconds of one guess: the median over chains of guesses after different first tokens; or of a round's first
    one, of drafters that guess `at_once`.

    The first chain is not counted: it evaluates the context. If the drafter works on the target's cache, its rows are
    left there.

    Args:
        budget_s: seconds, beyond which no further chain is started.
    """
    deadline = time.perf_counter() + budget_s
    # Different tokens, so that no chain finds what the one before it left in a cache.
    starts = list(dict.fromkeys(reversed(context.tokens)))
    _chain_ms(drafter, context, [starts[0]])
    each: list[float] = []
    while not each or (len(each) < _CHAINS and time.perf_counter() < deadline):
        number = len(each) + 1
        start = starts[number % len(starts)]
        each.append(_chain_ms(drafter, context, [start] * (1 + number // len(starts))))
    return median(each)


def measure_reading(drafter: Drafter, context: DraftContext) -> tuple[int, float]:
    """Tokens that a drafter has to read before its first guess here, and milliseconds of that guess with them."""
    unread, started = drafter.unread(context), time.perf_counter()
    drafter.guesses(context, (), 1)
    return unread, (time.perf_counter() - started) * 1e3


def _chain_ms(drafter: Drafter, context: DraftContext, drafted: Sequence[int]) -> float:
    """Milliseconds per guess of a chain that goes on after these tokens; a drafter with none to give ends it."""
    path, given = list(drafted), 0
    drafter.repeat()
    started = time.perf_counter()
    while given < _CHAIN and (guesses := drafter.guesses(context, path, 1)):
        given += 1
        path.append(guesses[0].token)
    # Where heads come to an end, having none to give costs nothing and would make the others look cheaper.
    return (time.perf_counter() - started) * 1e3 / (1 if drafter.at_once else max(1, given))
