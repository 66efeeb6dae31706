"""The configurations that a caller left open."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from edgeinfer.bundle.geometry import find_kv_type
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.core.errors import ContextLengthError, Setting, UsageError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration, GrammarMode
from edgeinfer.runtime.weights.experts import ExpertBytes
from edgeinfer.runtime.weights.streaming import layer_runs, window_bytes

# Tokens of a context that was not asked for: as many as files, tools and long chats need, where memory has room; those
# that no other concession is made for, and down to which it is halved before anything else is; and the fewest.
_LARGEST_CONTEXT, USUAL_CONTEXT, _SMALLEST_CONTEXT = 8192, 2048, 256
_CHUNKS = (64, 32, 16, 8)
# Nats a token that a smaller cache may add to a model's divergence to be chosen without being asked for.
MOST_ADDED = 0.01
# Layers that are in memory together while the weights are streamed, and shares of the experts where some are left out.
_WINDOWS = (8, 4, 2, 1)
# Shares of the layers that are streamed, one at a time, where head and the other layers stay.
_STREAMED_SHARES = (1 / 12, 1 / 6, 1 / 4, 5 / 12, 7 / 12, 3 / 4, 11 / 12)
_EXPERT_SHARES = (0.75, 0.5, 0.375, 0.25, 0.125)


def wanted_context(manifest: Manifest, config: LoadOptions) -> int:
    """The context to plan for, if there is room."""
    longest = manifest.geometry.max_positions
    if config.context is not None and config.context > longest:
        message = f"A context of {config.context} tokens was requested, but the model allows {longest}."
        raise ContextLengthError(message, "Use " + Setting("context", longest) + " or less.")
    return config.context or min(_LARGEST_CONTEXT, longest)


def configurations(
    facts: BundleFacts,
    config: LoadOptions,
    drafts: Sequence[Drafting],
    keep: Literal["all", "whole", "modest"] = "all",
) -> Iterator[Configuration]:
    """List the ways to run that the caller left open, the one without any concession first.

    Args:
        keep: "whole" are those that give up nothing, or only part of a context longer than usual that was not
            requested; "modest" those with every concession, whatever their weights: one of them takes the least.
    """
    contexts, weights = _contexts(facts.manifest, config), weights_ways(facts, config)
    chunks = (config.prefill_chunk,) if config.prefill_chunk else _chunks(facts)
    grammars: tuple[GrammarMode, ...] = ("sliced", "plain") if config.structured else ("none",)
    cut = {"all": slice(None), "whole": slice(1), "modest": slice(-1, None)}[keep]
    if keep == "whole":
        contexts, weights = contexts[:1] + tuple(size for size in contexts[1:] if size >= USUAL_CONTEXT), weights[:1]
    elif keep == "modest":
        contexts = contexts[-1:]
    ways = itertools.product(contexts, _kv_types(facts, config)[cut], weights, drafts[cut], chunks[cut], grammars[cut])
    for context, kv, way, (drafters, most, draft_model), chunk, mode in ways:
        configuration = Configuration(
            context=context,
            prefill_chunk=min(chunk, context),
            kv=kv,
            weights=way.mode,
            window_layers=way.window_layers,
            drafters=drafters,
            draft_max=most,
            tokenizer=facts.tokenizer,
            expert_bytes=way.expert_bytes,
            draft_model=draft_model,
            grammars=mode,
            kept_layers=way.kept_layers,
        )
        yield facts.placed(configuration)


class Drafting(NamedTuple):
    drafters: tuple[str, ...]  # names of those that may draft
    most: int  # tokens in a draft at most; 0 is no speculation
    model: bool  # whether the draft model is in memory


class WeightsWay(NamedTuple):
    """Where the weights are; as of `Configuration`."""

    mode: str
    window_layers: int = 0
    expert_bytes: int = 0
    kept_layers: int = 0


def draft_configuration(drafter: BundleFacts, target: Configuration, expert_count: int | None = None) -> Configuration:
    """Configure a draft model, which shares the tokenizer with its target; `expert_count` None leaves
    that to the model."""
    return Configuration(
        context=min(target.context, drafter.manifest.geometry.max_positions),
        prefill_chunk=target.prefill_chunk,
        kv=drafter.kv_types[0],
        weights=drafter.weights_modes[0],
        window_layers=0,
        drafters=(),
        draft_max=0,
        tokenizer=target.tokenizer,
        expert_count=expert_count,
    )


def _contexts(manifest: Manifest, config: LoadOptions) -> tuple[int, ...]:
    context = wanted_context(manifest, config)
    if config.context is not None:
        return (context,)
    halved = (_LARGEST_CONTEXT >> shift for shift in range(1, 6))
    return (context, *(size for size in halved if _SMALLEST_CONTEXT <= size < context))


def _kv_types(facts: BundleFacts, config: LoadOptions) -> tuple[str, ...]:
    if config.kv is not None:
        if config.kv not in facts.kv_types:
            known = ", ".join(facts.kv_types)
            message = f"{facts.manifest.name} cannot use a KV cache of type {config.kv} here, only {known}."
            raise UsageError(message, "Choose one of these, or leave " + Setting("kv") + " out.")
        return (config.kv,)
    # More bits than usual are for comparisons: only who asks gets them.
    most = find_kv_type(facts.kv_types[0]).bits
    fewer = (kv for kv in facts.kv_types[1:] if find_kv_type(kv).bits <= most)
    return (facts.kv_types[0], *(kv for kv in fewer if not doubt_of_cache(facts.manifest, kv)))


def added_by_cache(manifest: Manifest, kv: str) -> float | None:
    """What a type of the cache was measured to add to the model's divergence; None where it was not."""
    caches = () if manifest.quality is None else manifest.quality.caches
    return next((each.divergence for each in caches if each.kv_type == kv), None)


def doubt_of_cache(manifest: Manifest, kv: str) -> str:
    """Why a type of the cache is not chosen unless it is asked for; empty where it may be.

    Eight bits added at most 0.001 nats to every model that was measured, four 0.02 to 0.08.
    """
    added = added_by_cache(manifest, kv)
    if added is None:
        return "" if find_kv_type(kv).bits >= 8 else "it was not measured what it adds to this model's divergence"
    most = f"more than {MOST_ADDED:g} nats a token"
    return f"it adds {added:.3g}, {most}" if added > MOST_ADDED else ""


def _chunks(facts: BundleFacts) -> tuple[int, ...]:
    """Chunk sizes, the tuned or usual one first."""
    tuned = facts.settings.prefill_chunk
    return _CHUNKS if tuned is None else (tuned, *(size for size in _CHUNKS if size < tuned))


def weights_ways(facts: BundleFacts, config: LoadOptions) -> tuple[WeightsWay, ...]:
    """Where the weights may be, from no concession to the largest; UsageError as of `configurations`."""
    modes = facts.weights_modes
    if config.weights is not None:
        if config.weights not in modes:
            message = f"{facts.manifest.name} cannot run with {config.weights} weights here."
            in_place = modes[0] == "mapped" and config.weights == "packed"
            why = "They are used in place, which is called mapped." if in_place else ""
            raise UsageError(message, f"{why} Choose one of {', '.join(modes)}.".strip())
        modes = (config.weights,)
    elif config.expert_memory is not None:
        if "experts" not in modes:
            message = f"{facts.manifest.name} cannot load experts on demand here."
            raise UsageError(message, "Leave " + Setting("expert_memory") + " out.")
        modes = ("experts",)
    elif facts.settings.weights in modes:
        modes = (facts.settings.weights, *(mode for mode in modes if mode != facts.settings.weights))
    found: list[WeightsWay] = []
    for mode in modes:
        if mode == "streamed":
            found += _streamed(facts)
        elif mode == "experts":
            found += [WeightsWay(mode, expert_bytes=size) for size in _expert_bytes(facts, config)]
        else:
            found.append(WeightsWay(mode))
    return tuple(found)


def _streamed(facts: BundleFacts) -> Iterator[WeightsWay]:
    layers = facts.manifest.geometry.num_layers
    windows = [window for window in _WINDOWS if window < layers] or [1]
    yield from (WeightsWay("streamed", window) for window in windows)
    if facts.layout == NATIVE and windows[0] < layers:
        # With all layers in memory the kernel streams the head alone. Who asks for streaming means more than that.
        yield WeightsWay("streamed", layers)
        counts = dict.fromkeys(math.ceil(layers * share) for share in _STREAMED_SHARES)
        kept = [layers - count for count in counts if count < layers]
        # Of small layers nothing is whole pieces of the file, and only whole pieces are dropped.
        runs = layer_runs(tensors_in(facts.manifest, NATIVE))
        yield from (WeightsWay("streamed", 1, kept_layers=each) for each in kept if all(window_bytes(runs, 1, each)))


def _expert_bytes(facts: BundleFacts, config: LoadOptions) -> tuple[int, ...]:
    """How much of the experts may stay in memory, from most to least."""
    takes = ExpertBytes.of(facts.manifest.decoder, tensors_in(facts.manifest, facts.layout))
    if config.expert_memory is not None:
        if config.expert_memory < takes.least:
            message = f"{facts.manifest.name} cannot run with {format_size(config.expert_memory)} of experts."
            raise UsageError(
                message,
                "Use at least " + Setting("expert_memory", format_size(takes.least, up=True).replace(" ", "")) + ".",
            )
        return (config.expert_memory,)
    sizes = [round(takes.total * share) for share in _EXPERT_SHARES]
    found = [*(size for size in sizes if size > takes.least), takes.least]
    # Nothing is gained where one layer's may need as much as all take, but who asks for it gets it.
    return tuple(size for size in found if size < takes.total or config.weights == "experts")
