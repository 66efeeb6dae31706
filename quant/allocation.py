"""Chooses one option for each of many things so that their total cost is least within a budget of bytes. A
multiple-choice knapsack: an integer programme solved by HiGHS, with a Lagrangian solution for when time runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.core.errors import BudgetError
from edgeinfer.core.options import format_size

# A plan this close to the best is the best for all that predictions are worth, and found in a second.
_GAP = 1e-3
_SECONDS = 20.0
# What HiGHS lets a constraint be exceeded by.
_TOLERANCE = 1e-6
# Each solution tells better what padding takes; two or three do as a rule, and the best that fits counts.
_ROUNDS = 12
_FULL = 0.998


@dataclass(frozen=True)
class PricedOption:
    """An option of a choice: its bytes, and its cost of 0 or more."""

    nbytes: int
    cost: float


@dataclass(frozen=True)
class Choice:
    """A choice between options, taken once for several things that share it."""

    options: tuple[PricedOption, ...]

    @property
    def least(self) -> int:
        return min(option.nbytes for option in self.options)


@dataclass(frozen=True)
class Allocation:
    """Indices of the chosen options, one per choice, and their sums."""

    chosen: tuple[int, ...]
    nbytes: int
    cost: float


def allocate(choices: Sequence[Choice], budget: int) -> Allocation:
    """Chooses the options of least total cost within `budget` bytes; a larger budget never costs more."""
    least = sum(choice.least for choice in choices)
    if least > budget:
        raise _too_small(least, budget)
    kept = [_undominated(choice) for choice in choices]
    relaxed, bound = _lagrangian(choices, kept, budget)
    if relaxed.cost - bound <= _GAP * relaxed.cost:
        return relaxed
    for share in (1.0, 1 - 2 * _TOLERANCE):
        exact = _programme(choices, kept, budget, share)
        if exact is None or exact.nbytes <= budget:
            break
    fits = exact is not None and exact.nbytes <= budget and exact.cost <= relaxed.cost
    return exact if exact is not None and fits else relaxed


def allocate_exactly(
    choices: Sequence[Choice], budget: int, measure: Callable[[Sequence[int]], int]
) -> tuple[Allocation, int]:
    """`allocate` for things that take more than their sum when laid out, by the padding between them. `measure` gives
    the bytes of the chosen options, by index; the result's bytes are at most `budget`."""
    least = sum(choice.least for choice in choices)
    allowed, best = budget, None
    tried = set()
    for _ in range(_ROUNDS):
        if allowed < least or allowed in tried:
            break
        tried.add(allowed)
        found = allocate(choices, allowed)
        measured = measure(found.chosen)
        if measured <= budget and (best is None or found.cost < best[0].cost):
            best = found, measured
        if best is not None and best[1] >= _FULL * budget:
            break
        allowed = budget - (measured - found.nbytes)
        if measured > budget:
            # The same padding may not do for a smaller solution: one step below this one at least.
            allowed = min(allowed, found.nbytes - 1)
    return best or _smallest(choices, budget, measure)


def _smallest(
    choices: Sequence[Choice], budget: int, measure: Callable[[Sequence[int]], int]
) -> tuple[Allocation, int]:
    """Chooses the smallest options, or raises an error that says how large they are."""
    chosen = [min(range(len(c.options)), key=_by_size(c.options)) for c in choices]
    measured = measure(chosen)
    if measured > budget:
        raise _too_small(measured, budget)
    return _summed(choices, chosen), measured


def _too_small(least: int, budget: int) -> BudgetError:
    message = f"The weights cannot be made to fit {format_size(budget)} ({budget:,} bytes)."
    hint = f"The smallest possible weights take {format_size(least)} ({least:,} bytes): allow as much."
    return BudgetError(message, hint, minimum_bytes=least)


def _undominated(choice: Choice) -> list[int]:
    """Indices of options that no smaller or equal one undercuts, by rising size and falling cost."""
    kept: list[int] = []
    for index in sorted(range(len(choice.options)), key=_by_size(choice.options)):
        if not kept or choice.options[index].cost < choice.options[kept[-1]].cost:
            kept.append(index)
    return kept


def _summed(choices: Sequence[Choice], chosen: Sequence[int]) -> Allocation:
    options = [choice.options[index] for choice, index in zip(choices, chosen, strict=True)]
    return Allocation(tuple(chosen), sum(o.nbytes for o in options), sum(o.cost for o in options))


def _programme(choices: Sequence[Choice], kept: list[list[int]], budget: int, share: float) -> Allocation | None:
    """The solution of the integer programme for a share of the budget; None where no solver is there, or it found none
    in time. It may exceed the share by the solver's tolerance, a millionth."""
    try:
        from scipy import sparse  # only here: most conversions need no scipy
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        return None

    columns = [choices[i].options[index] for i, indices in enumerate(kept) for index in indices]
    costs = np.array([option.cost for option in columns])
    sizes = np.array([option.nbytes for option in columns], np.float64)
    counts = [len(indices) for indices in kept]
    owners = np.repeat(np.arange(len(kept)), counts)
    one_each = sparse.csr_array((np.ones(len(owners)), (owners, np.arange(len(owners)))))
    result = milp(
        costs / max(costs.max(), 1e-300),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(sizes[None] / budget, 0, share)],
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )
    if result.x is None:
        return None
    starts = np.cumsum([0, *counts])
    picks = [int(np.argmax(result.x[starts[i] : starts[i + 1]])) for i in range(len(kept))]
    return _summed(choices, [indices[pick] for indices, pick in zip(kept, picks, strict=True)])


def _lagrangian(choices: Sequence[Choice], kept: list[list[int]], budget: int) -> tuple[Allocation, float]:
    """The solution by the lowest price per byte that fits, with the rest spent where it helps most; and a lower bound
    of the cost."""
    low, high = 0.0, 1.0
    free = _priced(choices, kept, low)
    if free.nbytes <= budget:
        return free, free.cost
    while _priced(choices, kept, high).nbytes > budget:
        high *= 16
    for _ in range(100):
        price = (low + high) / 2
        if _priced(choices, kept, price).nbytes > budget:
            low = price
        else:
            high = price
    priced = _priced(choices, kept, high)
    return _filled(choices, kept, priced, budget), priced.cost + high * (priced.nbytes - budget)


def _by_size(options: tuple[PricedOption, ...]) -> Callable[[int], tuple[int, float]]:
    """Returns a key of indices that orders options by size; of equal ones the cheapest is first."""
    return lambda index: (options[index].nbytes, options[index].cost)


def _priced(choices: Sequence[Choice], kept: list[list[int]], price: float) -> Allocation:
    """The best option of each choice at a price per byte; of equal ones the smallest."""
    chosen = []
    for choice, indices in zip(choices, kept, strict=True):
        ranks = {index: (o.cost + price * o.nbytes, o.nbytes) for index, o in enumerate(choice.options)}
        chosen.append(min(indices, key=ranks.__getitem__))
    return _summed(choices, chosen)


def _filled(choices: Sequence[Choice], kept: list[list[int]], start: Allocation, budget: int) -> Allocation:
    """Spends the rest of the budget, the best gain per byte first."""
    chosen, left = list(start.chosen), budget - start.nbytes
    gains = []
    for place, indices in enumerate(kept):
        current = choices[place].options[chosen[place]]
        for index in indices:
            option = choices[place].options[index]
            if option.nbytes > current.nbytes:
                gain = (current.cost - option.cost) / (option.nbytes - current.nbytes)
                gains.append((gain, place, index, option.nbytes - current.nbytes))
    moved: set[int] = set()
    for _, place, index, more in sorted(gains, reverse=True):
        if place not in moved and more <= left:
            chosen[place] = index
            moved.add(place)
            left -= more
    return _summed(choices, chosen)
