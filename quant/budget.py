"""Turns the predicted cost of each scheme of each matrix into a plan that fits a budget."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from edgeinfer.bundle.layouts import NATIVE, PORTABLE, Layout
from edgeinfer.bundle.manifest import Blob
from edgeinfer.bundle.packing import find_expert, portable_bits
from edgeinfer.bundle.tables import LINE_BYTES, PAGE_BYTES, Outline, file_bytes, lay_out
from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.core.options.load import BITS, WIDTHS
from edgeinfer.quant.allocation import Allocation, Choice, PricedOption, allocate, allocate_exactly
from edgeinfer.quant.policy import (
    PROTECTED_BITS,
    QuantPlan,
    QuantScheme,
    effective_block,
    formats_for,
    is_protected,
    is_quantizable,
    make_scheme,
    match_patterns,
)

# What a tensor of a name is stored as when it has a scheme.
Draw = Callable[[str, QuantScheme | None], Outline]

_BLOCK_SIZES = (32, 64, 128)
# Costs are whole numbers of so many nats where bytes are to be few.
_NAT = 1e-9


@dataclass(frozen=True)
class Candidate:
    """A scheme, None for float32, and its predicted cost in nats of KL divergence per token."""

    scheme: QuantScheme | None
    cost: float


@dataclass(frozen=True)
class Limits:
    """The schemes that a plan within a budget may choose."""

    head_bits: int | None = None  # of embedding and head; None leaves them to the programme
    block_size: int | None = None  # of all matrices, where it fits; None leaves it to the programme
    symmetric: bool = False
    bits_for: tuple[tuple[str, int], ...] = ()  # bits by ordered patterns of names, of which the last match wins


def candidate_schemes(
    shapes: Mapping[str, tuple[int, ...]], limits: Limits | None = None, layout: Layout = NATIVE
) -> dict[str, list[QuantScheme | None]]:
    """Every scheme of each matrix that can be quantized. Matrices that share a scheme in a layout get blocks that
    divide the columns of each."""
    limits = limits or Limits()
    names = [name for name, shape in shapes.items() if is_quantizable(name, shape)]
    columns: defaultdict[str, int] = defaultdict(int)
    for name in names:
        group = _group(name, layout)
        columns[group] = math.gcd(columns[group], shapes[name][1])
    given = match_patterns(limits.bits_for, names)
    if limits.head_bits is not None:
        given = dict.fromkeys((name for name in names if name in ("embed", "head")), limits.head_bits) | given
    return {name: _schemes(name, shapes[name], columns[_group(name, layout)], given, limits, layout) for name in names}


def _schemes(
    name: str, shape: tuple[int, ...], k: int, given: Mapping[str, int], limits: Limits, layout: Layout
) -> list[QuantScheme | None]:
    """The schemes of one matrix, whose blocks divide K."""
    least, native = PROTECTED_BITS if is_protected(name) else 0, layout == NATIVE
    if name not in given and native and limits.block_size is None:
        found = [each for each in formats_for(k) if each.bits >= least]
        return [each for each in found if each.symmetric or not limits.symmetric]
    widths = WIDTHS if native and limits.block_size == 32 else BITS
    bits = (
        (given[name],)
        if name in given
        else tuple(b for b in widths if b >= least and (native or portable_bits(b) == b))
    )
    sizes = _BLOCK_SIZES if limits.block_size is None else (limits.block_size,)
    blocks = [effective_block(k, size) for size in sizes]
    ways = itertools.product(bits, blocks, (True,) if limits.symmetric else (True, False))
    return list(dict.fromkeys(make_scheme(shape, b, size, symmetric=sign, vectors=native) for b, size, sign in ways))


def plan_below(
    divergence: float,
    candidates: Mapping[str, Sequence[Candidate]],
    names: Iterable[str],
    outline: Draw,
    layout: Layout,
    method: str = "rtn",
    most: int | None = None,
) -> QuantPlan:
    """The plan of fewest bytes whose predicted cost is at most `divergence`, or the least that can be had; of least
    cost within `most` bytes where it takes more."""
    names = list(names)
    options = _grouped(candidates, names, layout)
    plain = [_choice(members, partial(_plain_bytes, layout=layout), outline) for members in options]
    # The same programme with costs and bytes in each other's places.
    turned = [Choice(tuple(PricedOption(round(o.cost / _NAT), o.nbytes) for o in c.options)) for c in plain]
    allowed = max(round(divergence / _NAT), sum(choice.least for choice in turned))
    by_name = _chosen(options, allocate(turned, allowed).chosen)
    size = file_bytes(lay_out([outline(name, by_name[name].scheme) for name in names], layout))
    if most is not None and size > most:
        return plan_within(most, candidates, names, outline, layout, method)
    return _plan(by_name, candidates, names, outline, method, None)


def plan_within(
    budget: int,
    candidates: Mapping[str, Sequence[Candidate]],
    names: Iterable[str],
    outline: Draw,
    layout: Layout,
    method: str = "rtn",
) -> QuantPlan:
    """The plan of least cost whose weights file takes at most `budget` bytes, padding included; `names` are those of
    all tensors with bytes of their own, in the file's order."""
    names = list(names)
    options = _grouped(candidates, names, layout)

    def measure(chosen: Sequence[int]) -> int:
        by_name = _chosen(options, chosen)
        return file_bytes(lay_out([outline(name, by_name[name].scheme) for name in names], layout))

    allocation = _best(options, budget, measure, outline, layout)
    return _plan(_chosen(options, allocation.chosen), candidates, names, outline, method, budget)


def _chosen(options: Sequence[Mapping[str, Sequence[Candidate]]], chosen: Sequence[int]) -> dict[str, Candidate]:
    return {
        name: found[index] for members, index in zip(options, chosen, strict=True) for name, found in members.items()
    }


def _plan(
    chosen: Mapping[str, Candidate],
    candidates: Mapping[str, Sequence[Candidate]],
    names: Iterable[str],
    outline: Draw,
    method: str,
    budget: int | None,
) -> QuantPlan:
    predicted = {name: candidate.cost for name, candidate in chosen.items() if name in candidates}
    matrices = {name: chosen[name].scheme for name in names if len(outline(name, None).shape) == 2}
    return QuantPlan(matrices, method, predicted, budget)


def _group(name: str, layout: Layout) -> str:
    """The decision that a tensor shares: with all experts of its layer in the portable layout, else its own."""
    expert = find_expert(name) if layout == PORTABLE else None
    return name if expert is None else f"layers.{expert.layer}.mlp.experts"


def _grouped(
    candidates: Mapping[str, Sequence[Candidate]], names: Iterable[str], layout: Layout
) -> list[dict[str, Sequence[Candidate]]]:
    """Tensors that share a decision, with their candidates in one order; those without any stay float32."""
    groups: defaultdict[str, dict[str, Sequence[Candidate]]] = defaultdict(dict)
    for name in names:
        groups[_group(name, layout)][name] = candidates.get(name, [Candidate(None, 0.0)])
    return [_aligned(group, members) for group, members in groups.items()]


def _aligned(group: str, members: dict[str, Sequence[Candidate]]) -> dict[str, Sequence[Candidate]]:
    """Candidates that all tensors have, in the order of the first."""
    costs = {name: {c.scheme: c for c in found} for name, found in members.items()}
    common = [s for s in next(iter(costs.values())) if all(s in by_scheme for by_scheme in costs.values())]
    if not common:
        message = f"The matrices of {group} share one format in the portable layout, and are given different bits."
        raise UsageError(message, "Give all of them the same bits, or leave the portable layout out.")
    return {name: [by_scheme[s] for s in common] for name, by_scheme in costs.items()}


def _best(
    options: Sequence[Mapping[str, Sequence[Candidate]]],
    budget: int,
    measure: Callable[[Sequence[int]], int],
    outline: Draw,
    layout: Layout,
) -> Allocation:
    """The better of two solutions: one counts each tensor's padding in full, the other none. A tensor's padding depends
    on its neighbours; small models and many experts have much of it."""
    found: list[Allocation] = []
    errors: list[BudgetError] = []
    for size in (_padded_bytes, _plain_bytes):
        try:
            choices = [_choice(members, partial(size, layout=layout), outline) for members in options]
            found.append(allocate_exactly(choices, budget, measure)[0])
        except BudgetError as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: error.minimum_bytes)
    return min(found, key=lambda allocation: allocation.cost)


def _choice(members: Mapping[str, Sequence[Candidate]], size: Callable[[Outline], int], outline: Draw) -> Choice:
    count = len(next(iter(members.values())))
    return Choice(
        tuple(
            PricedOption(
                sum(size(outline(name, found[i].scheme)) for name, found in members.items()),
                sum(found[i].cost for found in members.values()),
            )
            for i in range(count)
        )
    )


def _padded_bytes(outline: Outline, layout: Layout) -> int:
    """Bytes of a tensor at the beginning of a file, up to where another may begin."""
    end = file_bytes(lay_out([outline], layout))
    align = PAGE_BYTES if end >= PAGE_BYTES else LINE_BYTES
    return end + -end % align


def _plain_bytes(outline: Outline, layout: Layout) -> int:
    """Bytes of a tensor's parts."""
    return sum(Blob(0, dtype, shape).nbytes for dtype, shape in outline.parts(layout).values())
