"""Finds the best way to run a model within a budget. The best way has the fastest turn of a chat, where half of the
usual context is worth as much as a third of the speed, and a lossless cache as much as a sixth. A longer context gives
way before anything else. What the caller fixed is never changed; a plan that cannot fit says what would."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from edgeinfer.bundle.geometry import find_kv_type
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.decoding import MOST_DRAFTED, NO_DRAFT_MODEL, drafters_in
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.planning.candidates import (
    USUAL_CONTEXT,
    Drafting,
    added_by_cache,
    configurations,
    doubt_of_cache,
)
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration, Footprint
from edgeinfer.runtime.planning.memory_model import MemoryModel
from edgeinfer.runtime.planning.plan import NOTHING_GIVEN_UP, Alternative, BudgetPoint, MemoryPlan, SpeedCurve
from edgeinfer.runtime.planning.speed_model import Speed, SpeedModel
from edgeinfer.runtime.system.machine import machine_memory

_LENGTHS = (MOST_DRAFTED, 7, 3, 1)
# Stands for the draft model among the names of drafters.
_MODEL = ""


def drafting_ways(
    facts: BundleFacts, config: LoadOptions, memory: MemoryModel, speed: SpeedModel
) -> tuple[Drafting, ...]:
    """All ways to draft that the caller left open, from no concession to the largest."""
    names, present = drafters_in(config.speculation), facts.drafter is not None
    most = facts.most_drafted
    if most == 0 and (config.speculation not in ("auto", "off") or config.draft_model not in (None, NO_DRAFT_MODEL)):
        message = f"Drafts of {facts.manifest.name} cannot be taken back: llama.cpp keeps one state of its layers."
        raise UsageError(message, "Use " + Setting("speculation", "off") + ", or export the checkpoint to ONNX.")
    if most == 0:
        return (Drafting((), 0, False),)
    if config.speculation != "auto":
        wanted = config.draft_max or MOST_DRAFTED
        return (Drafting(names, min(wanted, most or wanted) if names else 0, present),)
    lengths: tuple[int, ...] = (config.draft_max,) if config.draft_max else _LENGTHS
    if most is not None:
        lengths = tuple(dict.fromkeys(min(length, most) for length in lengths))
    # A draft model was given to be used; one that is part of the bundle may be given up.
    given = config.draft_model not in (None, NO_DRAFT_MODEL)
    first = next(configurations(facts, config, (Drafting(names, lengths[0], present),)))
    # What goes first does not depend on how long a context there is room for.
    first = dataclasses.replace(first, context=min(first.context, USUAL_CONTEXT))
    kept = [(names, present), *_fewer(first, memory, speed, model_stays=given)]
    # Of equals the one before is taken: a drafter that adds nothing is given up rather than a longer draft.
    ways = tuple(Drafting(names, length, model) for length in lengths for names, model in kept)
    return ways if config.draft_max or given else (*ways, Drafting((), 0, False))


def _fewer(
    first: Configuration, memory: MemoryModel, speed: SpeedModel, *, model_stays: bool
) -> Sequence[tuple[tuple[str, ...], bool]]:
    """Sets of drafters, each without one more that takes memory: the one that loses the least speed for its bytes."""
    found: list[tuple[tuple[str, ...], bool]] = []
    now = first
    while True:
        pace, size = speed.speed(now).tokens_per_second, memory.drafting(now)
        best, least = None, 0.0
        for name in (*((_MODEL,) if now.draft_model and not model_stays else ()), *now.drafters):
            without = _without(now, name)
            freed = size - memory.drafting(without)
            if freed <= 0:
                continue
            lost = (pace - speed.speed(without).tokens_per_second) / freed
            if best is None or lost < least:
                best, least = without, lost
        if best is None:
            return found
        now = best
        found.append((now.drafters, now.draft_model))


def _without(configuration: Configuration, name: str) -> Configuration:
    if name == _MODEL:
        return dataclasses.replace(configuration, draft_model=False)
    return dataclasses.replace(
        configuration, drafters=tuple(other for other in configuration.drafters if other != name)
    )


# What half of the context is worth, of one longer than usual and of others, and a cache of 16, 8 or 4 bits instead of
# floats, as a share of the speed. Of floats and the usual context is more than of 16 bits and the longest.
_HALF_LONG_CONTEXT, _HALF_CONTEXT = 0.992, 0.7
_KV_WORTH = {16: 0.98, 8: 0.85, 4: 0.7}
# Of the machine's memory, what rows of replies side by side take at most where there is no budget.
_MOST_SHARE = 0.125
# A share of the speed from which on a plan does not say that the rest was given up.
_NOTICED = 0.99
_Way = TypeVar("_Way")
_Freed = tuple[str, Callable[[LoadOptions], LoadOptions], Callable[[LoadOptions], bool]]


@dataclass(frozen=True)
class _Candidate:
    configuration: Configuration
    footprint: Footprint
    bytes: int


def search(
    facts: BundleFacts,
    config: LoadOptions,
    memory: MemoryModel,
    speed: SpeedModel,
    *,
    all_ways: bool,
    free: int | None = None,
    among: Callable[[Configuration], bool] | None = None,
    hints: bool = True,
) -> MemoryPlan:
    """Find the plan for a request; without a budget, the one that gives up nothing but context. A context longer than
    usual may take `free` bytes if none was requested. `among` limits the choice; `hints` say what would fit where
    nothing does, which takes longer than the search."""
    drafts = drafting_ways(facts, config, memory, speed)
    ways = [*filter(among, configurations(facts, config, drafts))] if config.memory or all_ways else []
    ways = ways or [*filter(among, configurations(facts, config, drafts, "whole"))]
    first, whole = ways[0], speed.speed(ways[0])
    asked = config.context is not None or config.memory is not None
    choice = _Choice(config.memory, None if asked else free, _worth(speed, first))
    # Of all that are open, the smallest is one of the most modest.
    modest = () if all_ways or among is not None else configurations(facts, config, drafts, "modest")
    chosen, every = _chosen(ways, tuple(modest), choice, lambda each: _candidate(each, memory, config))
    promised = functools.reduce(Speed.at_most, (speed.speed(each) for each in choice.beyond(chosen, every)))
    prefix_cache, footprint = _with_rows(chosen, config, memory)
    plan = MemoryPlan(
        configuration=chosen.configuration,
        layout=facts.layout,
        overflow=config.overflow,
        prefix_cache=prefix_cache,
        parallel=config.parallel,
        budget_bytes=config.memory,
        counted=config.counted,
        footprint=footprint,
        speed=promised,
        minimum_bytes=min(each.bytes for each in every),
        given_up=_given_up(first, chosen.configuration, facts.manifest),
        not_chosen={kv: why for kv in facts.kv_types if (why := doubt_of_cache(facts.manifest, kv))},
        threads=facts.threads,
        tuned=_tuned(facts, chosen.configuration),
        device=facts.device.name,
        device_note=facts.device_note,
        disk=speed.disk(chosen.configuration),
    )
    if (share := promised.tokens_per_second / whole.tokens_per_second) < _NOTICED:
        plan = dataclasses.replace(plan, given_up=(*plan.given_up, f"{1 - share:.0%} of the speed"))
    if hints and not plan.fits:
        plan = dataclasses.replace(plan, hints=tuple(_hints(facts, config, memory, speed, plan)))
    if all_ways:
        alternatives = tuple(_alternatives(chosen, every, choice, lambda each: speed.speed(each).at_most(whole)))
        plan = dataclasses.replace(plan, alternatives=alternatives, curve=_curve(chosen, every, choice, speed))
    return plan


def _chosen(
    ways: Sequence[Configuration],
    modest: Sequence[Configuration],
    choice: _Choice,
    candidate: Callable[[Configuration], _Candidate],
) -> tuple[_Candidate, Sequence[_Candidate]]:
    """The best way to run, and candidates among which are the smallest of all and those that larger budgets get. One of
    `modest` is the smallest; if there are none, every way is tried."""
    least = [*map(candidate, modest)]
    if any(map(choice.fits, least)):
        # Speeds take less to predict than bytes do.
        looked_at: list[_Candidate] = []
        for each in map(candidate, choice.ordered(ways)):
            looked_at.append(each)
            if choice.fits(each):
                return each, [*looked_at, *least]
    every = [candidate(each) for each in ways]
    return choice.of(every), every


def _with_rows(chosen: _Candidate, config: LoadOptions, memory: MemoryModel) -> tuple[int, Footprint]:
    """The prefix cache, which holds rows of concurrent replies unless the caller set it, and the footprint with it."""
    if config.parallel == 1 or config.prefix_cache or config.overflow != "stop":
        return config.prefix_cache, chosen.footprint
    free = round(_MOST_SHARE * machine_memory()) if config.memory is None else config.memory - chosen.bytes
    return memory.with_rows(chosen.configuration, free)


def _candidate(configuration: Configuration, memory: MemoryModel, config: LoadOptions) -> _Candidate:
    footprint = memory.footprint(configuration)
    return _Candidate(configuration, footprint, footprint.total(config.counted))


@dataclass(frozen=True)
class _Choice:
    """The one rule by which a plan and each of its alternatives are chosen; `free` is as in `search`."""

    budget: int | None
    free: int | None
    worth: Callable[[Configuration], float]

    def fits(self, candidate: _Candidate) -> bool:
        """Whether a candidate is within the budget, and a longer context than usual within what is free."""
        if self.free is not None and candidate.configuration.context > USUAL_CONTEXT:
            return candidate.footprint.total("resident") <= self.free
        return self.budget is None or candidate.bytes <= self.budget

    def ordered(self, configurations: Sequence[Configuration]) -> Iterator[Configuration]:
        """Put first what gives up nothing, or only part of a long context; then all, the best first."""
        # Where all fits nothing is given up, though measurements may call one of the others a little faster.
        yield from _whole(configurations, lambda each: each)
        yield from sorted(configurations, key=self.worth, reverse=True)

    def of(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """The first of `ordered` that fits, else the best of the smallest."""
        if found := next(filter(self.fits, _whole(candidates, lambda each: each.configuration)), None):
            return found
        fitting = [each for each in candidates if self.fits(each)]
        return max(fitting, key=lambda each: self.worth(each.configuration)) if fitting else self.smallest(candidates)

    def beyond(self, chosen: _Candidate, candidates: Sequence[_Candidate]) -> Iterator[Configuration]:
        """The chosen configuration and those that larger budgets get."""
        yield chosen.configuration
        whole = {each.configuration for each in _whole(candidates, lambda each: each.configuration)}
        best, place = chosen, next(n for n, each in enumerate(candidates) if each is chosen)
        # By bytes, each that is better than all before it is what some budget gets; of equals the one before.
        for n, each in sorted(enumerate(candidates), key=lambda found: found[1].bytes):
            if best.configuration in whole:
                return
            worth = self.worth(each.configuration), -n
            if each.bytes > chosen.bytes and (
                each.configuration in whole or worth > (self.worth(best.configuration), -place)
            ):
                best, place = each, n
                yield each.configuration

    def smallest(self, candidates: Sequence[_Candidate]) -> _Candidate:
        """The candidate with the fewest bytes; of equals the best."""
        return min(candidates, key=lambda each: (each.bytes, -self.worth(each.configuration)))


def _whole(ways: Sequence[_Way], configuration: Callable[[_Way], Configuration]) -> Iterator[_Way]:
    """The first way of each context that is not shorter than usual, and the first of all."""
    firsts: dict[int, _Way] = {}
    for way in ways:
        firsts.setdefault(configuration(way).context, way)
    return (way for way in firsts.values() if way is ways[0] or configuration(way).context >= USUAL_CONTEXT)


def _worth(speed: SpeedModel, wanted: Configuration) -> Callable[[Configuration], float]:
    """Rate a configuration by turns of a chat per second, less its concessions."""

    @functools.cache
    def worth(configuration: Configuration) -> float:
        turns = 1e3 / speed.speed(configuration).turn_ms
        usual = min(wanted.context, USUAL_CONTEXT)
        long = math.log2(wanted.context / max(usual, configuration.context))
        short = math.log2(usual / min(usual, configuration.context))
        context = math.pow(_HALF_LONG_CONTEXT, long) * math.pow(_HALF_CONTEXT, short)
        return turns * context * _KV_WORTH.get(find_kv_type(configuration.kv).bits, 1.0)

    return worth


def _tuned(facts: BundleFacts, chosen: Configuration) -> tuple[str, ...]:
    """Names of the tuned settings that the plan kept."""
    settings = facts.settings
    # A chunk is never longer than the context.
    cut = settings.prefill_chunk is not None and chosen.prefill_chunk < min(settings.prefill_chunk, chosen.context)
    given_way = {"prefill_chunk"} if cut else set()
    given_way |= {"weights"} if settings.weights != chosen.weights else set()
    return tuple(name for name in settings.names if name not in given_way)


def _given_up(wanted: Configuration, chosen: Configuration, manifest: Manifest) -> tuple[str, ...]:
    """What differs from the configuration without concessions, in words."""
    lost, layers, added = [], manifest.geometry.num_layers, added_by_cache(manifest, chosen.kv)
    if chosen.context < wanted.context:
        lost.append(f"context {chosen.context} instead of {wanted.context}")
    if chosen.kv != wanted.kv:
        cost = "lossy" if added is None else f"adds {added:.2g} nats a token"
        lost.append(f"{chosen.kv} KV cache instead of {wanted.kv} ({cost})")
    if chosen.weights != wanted.weights:
        lost.append(_other_weights(chosen, wanted, layers))
    if not chosen.draft_max and wanted.draft_max:
        lost.append("no drafting")
    elif wanted.draft_model and not chosen.draft_model:
        lost.append("no draft model")
    if chosen.draft_max and chosen.drafters != wanted.drafters:
        lost.append(f"no drafting by {', '.join(name for name in wanted.drafters if name not in chosen.drafters)}")
    if 0 < chosen.draft_max < wanted.draft_max:
        lost.append(f"at most {chosen.draft_max} draft tokens instead of {wanted.draft_max}")
    if chosen.grammars != wanted.grammars:
        lost.append("slower masks in strings of replies by a grammar")
    if chosen.prefill_chunk < wanted.prefill_chunk:
        lost.append(f"prompts read {chosen.prefill_chunk} tokens at a time instead of {wanted.prefill_chunk}")
    return tuple(lost)


def _other_weights(chosen: Configuration, wanted: Configuration, all_layers: int) -> str:
    if chosen.kept_layers:
        return f"{all_layers - chosen.kept_layers} of {all_layers} layers streamed instead of {wanted.weights}"
    if chosen.window_layers == all_layers:
        return f"output head streamed instead of {wanted.weights}"
    if chosen.window_layers:
        layers = "layer" if chosen.window_layers == 1 else "layers"
        return f"weights streamed {chosen.window_layers} {layers} at a time instead of {wanted.weights}"
    if chosen.expert_bytes:
        return f"only {format_size(chosen.expert_bytes)} of the experts in memory"
    return f"weights {chosen.weights} instead of {wanted.weights}"


# What the caller may have fixed: the option to leave open, and whether it was given.
_FREED: tuple[_Freed, ...] = (
    ("a smaller context", lambda c: dataclasses.replace(c, context=None), lambda c: c.context is not None),
    ("a KV cache of fewer bits", lambda c: dataclasses.replace(c, kv=None), lambda c: c.kv is not None),
    ("weights kept as they fit", lambda c: dataclasses.replace(c, weights=None), lambda c: c.weights is not None),
    (
        "no drafting",
        lambda c: dataclasses.replace(c, speculation="off", draft_max=None, draft_model=None),
        lambda c: c.speculation not in ("auto", "off") or c.draft_max is not None or c.draft_model is not None,
    ),
    ("fewer replies side by side", lambda c: dataclasses.replace(c, parallel=1), lambda c: c.parallel > 1),
    ("a smaller prefix cache", lambda c: dataclasses.replace(c, prefix_cache=0), lambda c: c.prefix_cache > 0),
)


def _hints(
    facts: BundleFacts, config: LoadOptions, memory: MemoryModel, speed: SpeedModel, plan: MemoryPlan
) -> Iterable[str]:
    """Options that would let the request fit in less memory if left open, with that size."""
    for name, free, given in _FREED:
        if not given(config):
            continue
        freed = free(config)
        alone = freed.draft_model is None and not drafters_in(freed.speculation)
        open_input = dataclasses.replace(facts, drafter=None) if alone else facts
        model = MemoryModel(open_input, freed, memory.process)
        modest = configurations(open_input, freed, drafting_ways(open_input, freed, model, speed), "modest")
        least = min(_candidate(each, model, freed).bytes for each in modest)
        if least < plan.minimum_bytes:
            yield f"{format_size(least, up=True)} with {name}"


def _alternatives(
    chosen: _Candidate, candidates: Sequence[_Candidate], choice: _Choice, speed: Callable[[Configuration], Speed]
) -> Iterable[Alternative]:
    """The best of each other kind and the smallest of all, fitting or not, the fastest first."""
    smallest = choice.smallest(candidates).configuration
    kinds: dict[str, Callable[[Configuration], bool]] = {
        NOTHING_GIVEN_UP: lambda c: c == candidates[0].configuration,
        "smallest": lambda c: c == smallest,
        "no drafting": lambda c: c.draft_max == 0,
    }
    ways = [each.configuration for each in candidates]
    kinds |= {f"{kv} KV cache": _with("kv", kv) for kv in dict.fromkeys(way.kv for way in ways)}
    kinds |= {f"{mode} weights": _with("weights", mode) for mode in dict.fromkeys(way.weights for way in ways)}
    kinds |= {f"context {size}": _with("context", size) for size in dict.fromkeys(way.context for way in ways)}
    seen, found = {chosen.configuration}, []
    for name, belongs in kinds.items():
        mine = [each for each in candidates if belongs(each.configuration)]
        if not mine or belongs(chosen.configuration):
            continue
        best = choice.of(mine)
        if best.configuration not in seen:
            seen.add(best.configuration)
            pace = functools.reduce(Speed.at_most, map(speed, choice.beyond(best, mine)))
            found.append(Alternative(name, best.configuration, best.bytes, choice.fits(best), pace))
    return sorted(found, key=lambda way: -way.speed.tokens_per_second)


def _curve(chosen: _Candidate, candidates: Sequence[_Candidate], choice: _Choice, speed: SpeedModel) -> SpeedCurve:
    """Speed against budget, for the context that was chosen. What is promised of a budget is no more than what a larger
    one gives."""
    context = chosen.configuration.context
    points = [*_changes([each for each in candidates if each.configuration.context == context], choice.worth, speed)]
    least, plain = points[-1].tokens_per_second, points[-1].plain_tokens_per_second or math.inf
    for place, point in reversed([*enumerate(points)]):
        least = min(least, point.tokens_per_second)
        if point.plain_tokens_per_second is not None:
            plain = min(plain, point.plain_tokens_per_second)
            point = dataclasses.replace(point, plain_tokens_per_second=plain)
        points[place] = dataclasses.replace(point, tokens_per_second=least)
    return SpeedCurve(tuple(points))


def _changes(
    ways: Sequence[_Candidate], worth: Callable[[Configuration], float], speed: SpeedModel
) -> Iterator[BudgetPoint]:
    """Yield a point wherever the speed of the chosen plan, or of the best without drafting, changes; every budget that
    fits the first way, the one without concessions, gets that."""
    best: Configuration | None = None
    plain: Configuration | None = None
    last: tuple[float, float | None] | None = None
    for budget, fitting in itertools.groupby(sorted(ways, key=lambda way: way.bytes), key=lambda way: way.bytes):
        for way in fitting:
            c = way.configuration
            if best is None or way is ways[0] or (best is not ways[0].configuration and worth(c) > worth(best)):
                best = c
            if c.draft_max == 0 and (plain is None or worth(c) > worth(plain)):
                plain = c
        assert best is not None, "there are ways in a group"
        paces = (
            speed.speed(best).tokens_per_second,
            None if plain is None else speed.speed(plain).tokens_per_second,
        )
        if paces != last:
            last = paces
            yield BudgetPoint(budget, best, *paces)


def _with(field: str, value: object) -> Callable[[Configuration], bool]:
    return lambda configuration: bool(getattr(configuration, field) == value)
