"""Chooses the probe rows of a pass: behind which nodes of a draft, and how many behind each (PPD's sparse tree).

A drafter's probe rows behind a node are of use where the accepted path ends there. So each promises as much as that is
likely, times the odds that its guess and those before it are accepted; and the rows that a pass has are the ones that
promise most, as many as are worth their milliseconds on this device. Parallel prompt decoding (Chen et al. 2024) prunes
its trees by the same product, and sweeps their size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgeinfer.records import dataclass
from edgeinfer.runtime.speculation.drafters.contract import Draft, main_branch_end


@dataclass(frozen=True, slots=True)
class ProbeRows:
    """Probe rows of a pass.

    Attributes:
        counts: behind the root and behind each node of a draft; empty where there is none.
        ms: what they add to the pass.
    """

    counts: tuple[int, ...] = ()
    ms: float = 0.0


def choose_probe_rows(
    draft: Draft,
    accepted: float,
    each: int,
    most: int,
    pass_ms: Callable[[int], float],
    rate: float,
    *,
    spread: bool,
) -> ProbeRows:
    """The rows that promise the most beyond what their milliseconds could decode otherwise.

    Args:
        rate: tokens per millisecond that decoding achieves.
        spread: whether other nodes than the last one of the main branch may have any.
    """
    ends = _ends(draft)
    places = range(len(ends)) if spread else [main_branch_end(draft) + 1]
    rows = [(ends[place] * accepted ** (1 + probe), place) for place in places for probe in range(each)]
    rows.sort(key=lambda row: -row[0])
    size, worth, chosen, gained = 1 + len(draft), 0.0, 0, 0.0
    now = pass_ms(size)
    for count, (gain, _) in enumerate(rows[:most], 1):
        gained += gain
        net = gained - rate * (pass_ms(size + count) - now)
        if gain > 0 and net > worth:
            worth, chosen = net, count
    if not chosen:
        return ProbeRows()
    counts = [0] * size
    for _, place in rows[:chosen]:
        counts[place] += 1
    return ProbeRows(tuple(counts), pass_ms(size + chosen) - now)


def _ends(draft: Draft) -> Sequence[float]:
    """How likely the accepted path is to end at the root and at each node; at the main branch's end where it
    was not estimated."""
    if not draft.likely:
        ends = [0.0] * (1 + len(draft))
        ends[main_branch_end(draft) + 1] = 1.0
        return ends
    ends = [1.0, *draft.likely]
    for parent, likely in zip(draft.parents, draft.likely, strict=True):
        ends[parent + 1] -= likely
    return [max(0.0, end) for end in ends]


def tree_rows(draft: Draft, probes: Sequence[int]) -> tuple[list[int], list[int]]:
    """The parent and the depth of each row of a tree's pass; probe rows follow their node one behind the other."""
    depths = [0, *(draft.depth(node) + 1 for node in range(len(draft)))]
    parents = [-1, *(parent + 1 for parent in draft.parents)]
    for row, count in enumerate(probes):
        above = row
        for _ in range(count):
            depths.append(depths[above] + 1)
            parents.append(above)
            above = len(parents) - 1
    return parents, depths
