"""The ways a model can be run, and which of them a caller left open; knows nothing of bytes or speeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from edgeinfer.bundle import NATIVE, Bundle, Layout, Manifest
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.config import DRAFTERS, MOST_DRAFTED, LoadConfig, drafters_in, format_size
from edgeinfer.errors import ContextLengthError, UsageError
from edgeinfer.runtime.experts.cost import ExpertBytes

__all__ = [
    "DEFAULT_CONTEXT",
    "TOKENIZER",
    "Configuration",
    "Keeping",
    "Subject",
    "configurations",
    "draft_configuration",
    "modest_configurations",
    "wanted_context",
]

DEFAULT_CONTEXT = 2048
# A context that was not asked for is halved down to this before nothing fits.
_SMALLEST_CONTEXT = 256
_CHUNKS = (64, 32, 16, 8)
_LENGTHS = (MOST_DRAFTED, 7, 3, 1)
# Drafters with large tables go first, those that need none stay longest.
_WITHOUT_TABLES = ("forced", "copy")
_SMALL_TABLES = tuple(name for name in DRAFTERS if name != "recycle")
# Layers that are resident together while the weights are streamed, and shares of the experts where some are left out.
_WINDOWS = (8, 4, 2, 1)
_EXPERT_SHARES = (0.75, 0.5, 0.375, 0.25, 0.125)

TOKENIZER = "tokenizer.json"
Keeping = Literal["kept", "transient"]


@dataclass(frozen=True)
class Configuration:
    """One way to run a model.

    Attributes:
        context: tokens of prompt plus reply the cache may hold.
        prefill_chunk: prompt tokens per pass.
        kv: how the cache stores numbers, one of KV_TYPES.
        weights: where the weights are, one of WEIGHTS_MODES.
        window_layers: layers resident together where the weights are streamed; 0 where all are.
        drafters: names of those that may draft.
        draft_max: tokens in a draft at most; 0 is no speculation.
        tokenizer: "kept", or "transient": made anew for every prompt.
        expert_bytes: of experts that are resident at once; 0 where all are, or the weights are streamed.
    """

    context: int
    prefill_chunk: int
    kv: str
    weights: str
    window_layers: int
    drafters: tuple[str, ...]
    draft_max: int
    tokenizer: Keeping
    expert_bytes: int = 0

    @property
    def variant(self) -> str:
        """Whose passes cost, and may round, as no other's: the kind of cache, streaming, experts left out of memory;
        "" is the usual one."""
        kv = "" if self.kv == "float32" else self.kv
        streamed = f" streamed {self.window_layers}" if self.window_layers else ""
        return kv + streamed + (f" experts {self.expert_bytes}" if self.expert_bytes else "")


@dataclass(frozen=True)
class Subject:
    """What is planned for.

    Attributes:
        layout: of the target's weights, as it will run.
        drafter: a small model that drafts, and the layout of its weights.
        kv_types: those the bundle has graphs and scales for.
        weights_modes: those the backend that runs it has, the fastest first.
        transient_tokenizer: whether the tokenizer can be left out of memory while tokens are decoded.
        merge_pairs: whether the tokenizer's merges are pairs, which take more to parse.
        packed_ready: whether the file of packed weights is there already.
        threads: of the linear algebra.
        floats: whether the backend multiplies all weights out to floats, and keeps the scores of every head.
    """

    bundle: Bundle
    layout: Layout
    drafter: tuple[Bundle, Layout] | None
    kv_types: tuple[str, ...]
    weights_modes: tuple[str, ...]
    transient_tokenizer: bool
    merge_pairs: bool
    packed_ready: bool
    threads: int
    floats: bool = False

    @property
    def manifest(self) -> Manifest:
        """The target's manifest."""
        return self.bundle.manifest


def wanted_context(manifest: Manifest, config: LoadConfig) -> int:
    """The context to plan for if there is room.

    Raises:
        ContextLengthError: the context asked for is larger than the model allows.
    """
    longest = manifest.geometry.max_positions
    if config.context is not None and config.context > longest:
        message = f"A context of {config.context} tokens was asked for, the model allows {longest}."
        raise ContextLengthError(message, f"Use a context of at most {longest} (-c {longest}).")
    return config.context or min(DEFAULT_CONTEXT, longest)


def configurations(subject: Subject, config: LoadConfig) -> Iterator[Configuration]:
    """Every way to run that the caller left open, the one without any concession first.

    Raises:
        ContextLengthError: as `wanted_context`.
        UsageError: a kind of cache or of weights is asked for that the model does not have.
    """
    return _product(_dimensions(subject, config))


def modest_configurations(subject: Subject, config: LoadConfig) -> Iterator[Configuration]:
    """Those with every concession, whatever their weights and tokenizer: streaming and parsing again can cost more.

    One of them takes the least of all; errors as `configurations`.
    """
    every = _dimensions(subject, config)
    least = every._replace(
        contexts=every.contexts[-1:], kv_types=every.kv_types[-1:], drafts=every.drafts[-1:], chunks=every.chunks[-1:]
    )
    return _product(least)


class _Dimensions(NamedTuple):
    """What is open, each from no concession to the largest."""

    contexts: tuple[int, ...]
    kv_types: tuple[str, ...]
    weights: tuple[tuple[str, int, int], ...]
    drafts: tuple[tuple[tuple[str, ...], int], ...]
    chunks: tuple[int, ...]
    tokenizers: tuple[Keeping, ...]


def _dimensions(subject: Subject, config: LoadConfig) -> _Dimensions:
    return _Dimensions(
        _contexts(subject.manifest, config),
        _kv_types(subject, config),
        _weights(subject, config),
        _drafts(config),
        (config.prefill_chunk,) if config.prefill_chunk else _CHUNKS,
        ("kept", "transient") if subject.transient_tokenizer else ("kept",),
    )


def _product(dimensions: _Dimensions) -> Iterator[Configuration]:
    for context, kv, (weights, window, experts), (drafters, most), chunk, tokenizer in itertools.product(*dimensions):
        yield Configuration(context, min(chunk, context), kv, weights, window, drafters, most, tokenizer, experts)


def draft_configuration(manifest: Manifest, layout: Layout, target: Configuration) -> Configuration:
    """How a draft model runs beside its target, with which it shares the tokenizer."""
    return Configuration(
        context=min(target.context, manifest.geometry.max_positions),
        prefill_chunk=target.prefill_chunk,
        kv="float32",
        weights="mapped" if layout == NATIVE else "packed",
        window_layers=0,
        drafters=(),
        draft_max=0,
        tokenizer="kept",
    )


def _contexts(manifest: Manifest, config: LoadConfig) -> tuple[int, ...]:
    context = wanted_context(manifest, config)
    if config.context is not None:
        return (context,)
    return (context, *(size for size in (1024, 512, _SMALLEST_CONTEXT) if size < context))


def _kv_types(subject: Subject, config: LoadConfig) -> tuple[str, ...]:
    if config.kv is not None:
        if config.kv not in subject.kv_types:
            known = ", ".join(subject.kv_types)
            message = f"{subject.manifest.name} cannot keep its cache in {config.kv} here, only in {known}."
            hint = "Run edgeinfer tune on it once for the scales, or export it again with this version of edgeinfer."
            raise UsageError(message, hint)
        return (config.kv,)
    # Four bits change texts visibly on some models: only who asks gets them.
    return tuple(kv for kv in ("float32", "int8") if kv in subject.kv_types)


def _weights(subject: Subject, config: LoadConfig) -> tuple[tuple[str, int, int], ...]:
    """Modes, each with its layers in a window and its bytes of experts."""
    modes = subject.weights_modes
    if config.weights is not None:
        if config.weights not in modes:
            message = f"{subject.manifest.name} cannot run with {config.weights} weights here."
            in_place = subject.layout == NATIVE and config.weights == "packed"
            why = "Its native layout is used in place, as mapped weights." if in_place else ""
            raise UsageError(message, f"{why} Choose one of {', '.join(modes)}.".strip())
        modes = (config.weights,)
    elif config.expert_memory is not None:
        if "experts" not in modes:
            message = f"The experts of {subject.manifest.name} cannot be left out of memory here."
            raise UsageError(message, "Leave --expert-memory out.")
        modes = ("experts",)
    layers = subject.manifest.geometry.num_layers
    found: list[tuple[str, int, int]] = []
    for mode in modes:
        if mode == "streamed":
            windows = [window for window in _WINDOWS if window < layers] or [1]
            found += [(mode, window, 0) for window in windows]
        elif mode == "experts":
            found += [(mode, 0, size) for size in _expert_bytes(subject, config)]
        else:
            found.append((mode, 0, 0))
    return tuple(found)


def _expert_bytes(subject: Subject, config: LoadConfig) -> tuple[int, ...]:
    """How much of the experts may stay in memory, from most to least."""
    takes = ExpertBytes.of(subject.manifest.decoder, tensors_in(subject.manifest, subject.layout))
    if config.expert_memory is not None:
        if config.expert_memory < takes.least:
            message = f"{format_size(config.expert_memory)} hold too few experts for {subject.manifest.name} to run."
            raise UsageError(message, f"Give at least {format_size(takes.least)} (--expert-memory).")
        return (config.expert_memory,)
    sizes = [round(takes.total * share) for share in _EXPERT_SHARES]
    found = [*(size for size in sizes if size > takes.least), takes.least]
    # Nothing is gained where one layer's may need as much as all take, but who asks for it gets it.
    return tuple(size for size in found if size < takes.total or config.weights == "experts")


def _drafts(config: LoadConfig) -> tuple[tuple[tuple[str, ...], int], ...]:
    names = drafters_in(config.speculation)
    if not names:
        return (((), 0),)
    if config.speculation != "auto":
        return ((names, config.draft_max or MOST_DRAFTED),)
    lengths = (config.draft_max,) if config.draft_max else _LENGTHS
    # A draft model was given to be used.
    model = ("model", "hierarchical") if config.draft_model else ()
    sets = (names, _SMALL_TABLES, (*_WITHOUT_TABLES, *model))
    drafts = tuple((each, length) for each in sets for length in lengths)
    return drafts if config.draft_max or config.draft_model else (*drafts, ((), 0))
