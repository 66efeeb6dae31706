"""What is planned for: a model, what there is to choose from, and how a device other than the CPU changes both.

A device with memory of its own holds the weights, and the cache where the graph updates it in place. Those bytes are
listed, but no budget of the process counts them. What the device's driver takes inside the process is known only once
it is loaded, so a budget there is watched, not promised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal, Protocol

from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.devices.providers import CPU, CPU_MEMORY, Device
from edgeinfer.runtime.profile.costs import Prior
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings

TOKENIZER = "tokenizer.json"
# What free memory has counted already, as the process had it before; what the system may take back; and what is there
# at other times. Pages of libraries are none of these, as the system counts files that are mapped as free.
_NOT_ADDED = frozenset({"interpreter", "weights_mapped", "experts", "reserve", "loading", "activations"})
# The tokenizer is mapped from a table, stays in memory as the library has it, or is part of the model's file.
TokenizerMode = Literal["mapped", "kept", "model"]
# Replies by a grammar are not planned for; there is memory for the engine's tables of the vocabulary; or also for the
# tokens that it keeps apart for strings, without which it takes longer for their masks.
GrammarMode = Literal["none", "plain", "sliced"]


@dataclass(frozen=True)
class Configuration:
    context: int  # tokens of prompt plus reply the cache may hold
    prefill_chunk: int  # prompt tokens per pass
    kv: str  # how the cache stores numbers, one of KV_TYPES
    weights: str  # where the weights are, one of WEIGHTS_MODES
    window_layers: int  # layers in memory together where the weights are streamed; 0 where all are
    drafters: tuple[str, ...]  # names of those that may draft
    draft_max: int  # tokens in a draft at most; 0 is no speculation
    tokenizer: TokenizerMode  # one of `TokenizerMode`
    expert_bytes: int = 0  # of experts that are in memory at once; 0 where all are, or the weights are streamed
    expert_count: int | None = None  # of experts that every token uses; None leaves it to the model
    draft_model: bool = False  # whether a second, smaller model is in memory to draft
    gpu_layers: int = 0  # of the last layers, as many as run on a graphics processor; the head counts as one
    grammars: GrammarMode = "none"  # one of `GrammarMode`
    # Further layers that stay in memory, and head and embedding with them; 0 where none of these do.
    kept_layers: int = 0


@dataclass(frozen=True)
class Footprint:
    """Bytes that a process takes, by term: anonymous, of mapped files in memory, and in a device's own memory."""

    anonymous: Mapping[str, int]
    file: Mapping[str, int]
    device: Mapping[str, int] = field(default_factory=dict)

    @property
    def terms(self) -> dict[str, int]:
        """Bytes in the process by term, both kinds of page together."""
        names = dict.fromkeys([*self.anonymous, *self.file])
        return {name: self.anonymous.get(name, 0) + self.file.get(name, 0) for name in names}

    @property
    def without_weights(self) -> int:
        """Bytes that a model adds to a process while it makes tokens, without its weights' file."""
        return sum(size for name, size in self.terms.items() if name not in _NOT_ADDED)

    def total(self, counted: str) -> int:
        """Bytes of the pages that count: "resident" are both kinds."""
        anonymous = sum(self.anonymous.values())
        return anonymous + sum(self.file.values()) if counted == "resident" else anonymous

    def __add__(self, other: Footprint) -> Footprint:
        device = _sum(self.device, other.device)
        return Footprint(_sum(self.anonymous, other.anonymous), _sum(self.file, other.file), device)


def _sum(mine: Mapping[str, int], theirs: Mapping[str, int]) -> Mapping[str, int]:
    # A plan adds tens of thousands of them.
    if not mine or not theirs:
        return mine or theirs
    total = dict(mine)
    for name, size in theirs.items():
        total[name] = total.get(name, 0) + size
    return total


class ModelMemory(Protocol):
    """What one model takes where it runs on its backend; all figures are upper bounds."""

    def import_libraries(self) -> None:
        """Imports what loading will import, so that a process can be measured with it."""

    def weights(self, configuration: Configuration) -> Footprint:
        """Copies of the weights, and pages of their file."""

    def running(self, configuration: Configuration) -> Footprint:
        """Session, cache and the largest pass; "code" is of files that a second model on the backend shares."""

    def tokenizer(self, mode: TokenizerMode, *, used: bool) -> Footprint:
        """What the tokenizer takes before it encoded any text, or with the words it has seen since."""

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """Footprints at times that exceed what stays: while the tokenizer is parsed and the session made, from the
        process `outside`."""


@dataclass(frozen=True)
class OptionBytes:
    """Bytes that options take besides the model, as upper bounds, and what drafters are expected to do. Each is
    computed by the room that implements it."""

    # Tables of the configuration's drafters, and what the largest pass that verifies gives out, with all of its logits
    # at once or a few rows of them.
    drafting: Callable[[Bundle, Configuration, bool], int]
    drafting_in_batch: Callable[[Configuration], int]  # what drafts for a text whose passes others share has of its own
    prefix_cache: Callable[[int, int], int]  # of its cap in bytes and the model's number of layers
    context_shift: Callable[[str, DecoderSpec | None, int], int]  # of a policy's name, and a cache of so many tokens
    # Of the drafters that "auto" will ask, in the order in which it asks them.
    priors: Callable[[BundleFacts, TunedDrafting], Mapping[str, Prior]]
    # Of so many replies side by side by grammars, with a vocabulary of so many tokens; and while the engine's tables of
    # the vocabulary are made.
    grammars: Callable[[GrammarMode, int, int], tuple[int, int]]


@dataclass(frozen=True)
class BundleFacts:
    """A bundle as it runs here: what its backend, asked once, knows of it before it is loaded."""

    backend: str
    bundle: Bundle
    layout: Layout
    drafter: BundleFacts | None
    kv_types: tuple[str, ...]  # those that the graph or the library has, the usual one first
    weights_modes: tuple[str, ...]  # those the backend has, the fastest first
    tokenizer: TokenizerMode
    threads: int
    memory: ModelMemory
    modes_differ: bool = False  # whether weights of another mode are multiplied in another way, at another speed
    loads_experts: bool = False  # whether how many experts a token uses is fixed when the model is loaded
    # Tokens of a draft that can be taken back again, at most; None where any number can.
    most_drafted: int | None = None
    # Whether logits of a draft's rows can be computed a few at a time where all weights are in memory.
    head_apart: bool = False
    settings: TunedSettings = UNTUNED  # tuned settings that the caller left open; the largest that fit are taken
    device: Device = CPU
    device_note: str = ""  # why it is not the one that was asked for; empty where it is
    # How many layers run on a graphics processor; None where none do.
    offload: Callable[[Configuration], int] | None = None
    # The file that passes read the weights from, which may still have to be made; None where that is the bundle itself.
    weights_place: Path | None = None
    # Bytes that options take; None for a draft model, which is planned with its target.
    option_bytes: OptionBytes | None = None
    tunes: tuple[str, ...] = ()  # names of the fields of `TunedSettings` that change how fast it is
    engine: Callable[[], str] = str  # name and version of what runs it, and on which device if not the CPU
    kernel: Callable[[], str] = str  # what multiplies

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def capabilities(self) -> Capabilities:
        return self.manifest.capabilities_in(self.layout)

    def placed(self, configuration: Configuration) -> Configuration:
        """Fill in the layers on a graphics processor."""
        if self.offload is None:
            return configuration
        return dataclasses.replace(configuration, gpu_layers=self.offload(configuration))

    def variant(self, configuration: Configuration) -> str:
        """What passes cost, and may round, as in no other way of running the model: the kind of cache, streaming,
        experts left out of memory, layers on a graphics processor; "" is the usual one."""
        usual = self.variant_of(configuration.kv, configuration.weights)
        kept = f" kept {configuration.kept_layers}" if configuration.kept_layers else ""
        streamed = f" streamed {configuration.window_layers}{kept}" if configuration.window_layers else ""
        experts = f" experts {configuration.expert_bytes}" if configuration.expert_bytes else ""
        layers = f" gpu {configuration.gpu_layers}" if configuration.gpu_layers else ""
        return usual + streamed + experts + layers

    def variant_of(self, kv: str, weights: str) -> str:
        """The variant of a cache type and a weights mode that stay in memory."""
        mode = f" {weights}" if self.modes_differ and weights != self.weights_modes[0] else ""
        return ("" if kv == self.kv_types[0] else kv) + mode


def weights_modes_on(device: Device, modes: tuple[str, ...]) -> tuple[str, ...]:
    """All modes on the CPU, elsewhere only the usual one: a provider places weights itself."""
    return modes if device.on_cpu else modes[:1]


def memory_on(device: Device, memory: ModelMemory, *, cache: bool) -> ModelMemory:
    """What a model takes on a device, with the cache there too if `cache`."""
    return memory if device.memory == CPU_MEMORY else _OwnMemory(memory, cache)


@dataclass(frozen=True)
class _OwnMemory:
    """Implements `configuration.ModelMemory` for a device with memory of its own."""

    memory: ModelMemory
    cache: bool

    def import_libraries(self) -> None:
        self.memory.import_libraries()

    def weights(self, configuration: Configuration) -> Footprint:
        """Weights lie on the device; pages of the file that they are copied from may stay in memory."""
        whole = self.memory.weights(configuration)
        size = sum(whole.anonymous.values()) + sum(whole.file.values())
        return Footprint({"weights_packed": 0}, {"weights_mapped": size}, {"weights": size})

    def running(self, configuration: Configuration) -> Footprint:
        """The cache may be on the device; inputs and outputs of passes stay in the process, as much as on the CPU."""
        whole = self.memory.running(configuration)
        if not self.cache:
            return whole
        anonymous = dict(whole.anonymous)
        return Footprint(anonymous | {"kv": 0}, whole.file, {"kv": anonymous["kv"]})

    def tokenizer(self, keeping: TokenizerMode, *, used: bool) -> Footprint:
        return self.memory.tokenizer(keeping, used=used)

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        return self.memory.phases(outside, running, configuration)
