"""Bytes of every term of a plan as a formula of bundle, configuration and device.

All terms are upper bounds, as a plan that fits has to be kept. What a model takes on its backend, `model_memory` says;
this adds the process around it. Constants were fitted to measured processes (docs/log/2026-11-21.md); `edgeinfer bench
memory` shows how near they are on a device.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from edgeinfer.bundle.peft import adapter_bytes
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.paging.states import SLOTS_IN_USE, StateLayout
from edgeinfer.runtime.planning.candidates import draft_configuration
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration, Footprint
from edgeinfer.runtime.system.memory import ProcessMemory

# Terms of the process around the model.
OUTSIDE = ("interpreter", "libraries")

# Of the pages of libraries that are in memory when a model is loaded, those that come back while it runs.
NEEDED_SHARE = 0.72
# Kept free in a plan: what imports and planning add to this process until the model is loaded, and by how much another
# process, which was asked to plan, may differ.
RESERVE_BYTES = 4_000_000
# Python's objects while replies are made.
_OBJECTS_BYTES = 2_000_000
# Of a further reply side by side: its thread and objects; and vectors of the vocabulary, as logits of a pass, a copy of
# them and what sampling makes of them (docs/log/2026-11-25.md).
_SEQUENCE_BYTES, _SEQUENCE_VECTORS = 300_000, 12
_FLOAT_BYTES = 4
# Tokens that each has room for, unless the context is shorter.
_FURTHER_TOKENS = 1024
# Of weights that passes read in windows.
_CUT = ("streamed", "experts")


class MemoryModel:
    """Bytes of a model's configurations, in a process that may grow by `reserve` before the model is loaded."""

    def __init__(
        self, facts: BundleFacts, config: LoadOptions, process: ProcessMemory, reserve: int = RESERVE_BYTES
    ) -> None:
        self._input = facts
        self._config = config
        self.process = process
        self._reserve = reserve
        self._weights: dict[tuple[str, int, int, int, int, int, int], Footprint] = {}
        self._adapters = sum(adapter_bytes(Path(path)) for path in config.adapters.values())
        self._drafters: dict[Configuration, Footprint] = {}

    def footprint(self, configuration: Configuration) -> Footprint:
        """The largest this process will be from loading on."""
        config, facts, manifest = self._config, self._input, self._input.manifest
        options = facts.option_bytes
        assert options is not None, "whoever plans a target says what options take"
        c = configuration
        # Static bundles copy weights for each graph that drafts and prompts need.
        where = c.weights, c.window_layers, c.kept_layers, c.expert_bytes, c.gpu_layers
        key = *where, c.prefill_chunk, c.draft_max
        if key not in self._weights:
            self._weights[key] = facts.memory.weights(configuration)
        running = (
            self._outside(running=True)
            + self._weights[key]
            + facts.memory.running(configuration)
            + facts.memory.tokenizer(configuration.tokenizer, used=True)
        )
        running += self._drafting(configuration)
        if self._adapters:
            running += Footprint({"adapters": self._adapters}, {})
        if config.parallel > 1:
            running += Footprint({"sequences": (config.parallel - 1) * self._sequence(running, configuration)}, {})
        if configuration.grammars != "none":
            kept, made = options.grammars(configuration.grammars, manifest.geometry.vocab_size, config.parallel)
            # A lone reply makes the tables before its first pass.
            idle = running.anonymous.get("activations", 0) if config.parallel == 1 else 0
            running += Footprint({"grammars": max(kept, made - idle)}, {})
        if config.prefix_cache:
            size = options.prefix_cache(config.prefix_cache, manifest.geometry.num_layers)
            running += Footprint({"prefix_cache": size}, {})
        if shifting := options.context_shift(config.overflow, manifest.decoder, configuration.context):
            running += Footprint({"overflow": shifting}, {})
        return running + self._loading(running, configuration)

    def drafting(self, configuration: Configuration) -> int:
        """Bytes of the counted pages that drafting takes: drafters, their model, and what verifying gives out."""
        return self._drafting(configuration).total(self._config.counted)

    def _drafting(self, configuration: Configuration) -> Footprint:
        config, facts = self._config, self._input
        options, found = facts.option_bytes, Footprint({}, {})
        assert options is not None, "whoever plans a target says what options take"
        if configuration.draft_max:
            # Side by side all replies have drafters besides the model's, which go on with what a lone one said.
            batch = config.parallel * options.drafting_in_batch(configuration) if config.parallel > 1 else 0
            # Passes that others share, or that are cut into windows, give all logits at once.
            apart = facts.head_apart and config.parallel == 1 and configuration.weights not in _CUT
            own = options.drafting(facts.bundle, configuration, apart)
            found += Footprint({"drafting": own + batch}, {})
        if configuration.draft_model:
            assert facts.drafter is not None, "only a draft model that is there can be chosen"
            # Loaded without drafting, it takes turns with its target (runtime/layer_skip).
            found += self._drafter(facts.drafter, configuration)
        return found

    def _sequence(self, running: Footprint, configuration: Configuration) -> int:
        """Bytes of a further concurrent reply, without its cache rows, which are the prefix cache's."""
        geometry = self._input.manifest.geometry
        # Of the largest pass, which reads a part of a prompt or verifies a draft.
        rows = max(configuration.prefill_chunk, 1 + configuration.draft_max)
        row = running.anonymous.get("activations", 0) // rows
        states = StateLayout(geometry.states).slot_bytes * SLOTS_IN_USE if geometry.states else 0
        return _SEQUENCE_BYTES + _SEQUENCE_VECTORS * _FLOAT_BYTES * geometry.vocab_size + row + states

    def with_rows(self, configuration: Configuration, free: int) -> tuple[int, Footprint]:
        """Size a prefix cache for the rows of concurrent replies from `free` bytes; return its cap and the footprint
        with it. Few replies fill a long context at once, so they share the rows of one, or have some each if that is
        more."""
        layers = self._input.manifest.geometry.num_layers
        rows, others = self.footprint(configuration).anonymous.get("kv", 0), self._config.parallel - 1
        wanted = max(rows, others * rows * min(configuration.context, _FURTHER_TOKENS) // configuration.context)
        # What a cap takes is itself and a part of a layer (`OptionBytes.prefix_cache`).
        cap = max(0, min(wanted, free * 2 * layers // (2 * layers + 1)))
        config = dataclasses.replace(self._config, prefix_cache=cap)
        return cap, MemoryModel(self._input, config, self.process, self._reserve).footprint(configuration)

    def _drafter(self, drafter: BundleFacts, target: Configuration) -> Footprint:
        """A draft model, which shares the tokenizer with its target, and code if they have one backend."""
        own = draft_configuration(drafter, target)
        if own not in self._drafters:
            whole = drafter.memory.weights(own) + drafter.memory.running(own)
            code = whole.file["code"] if drafter.backend == self._input.backend else 0
            file = {"draft_model": sum(whole.file.values()) - code}
            self._drafters[own] = Footprint({"draft_model": sum(whole.anonymous.values())}, file)
        return self._drafters[own]

    def _outside(self, *, running: bool) -> Footprint:
        """The process without a model; while running, without library pages that only loading needed."""
        libraries = round(NEEDED_SHARE * self.process.file) if running else self.process.file
        objects = _OBJECTS_BYTES if running else 0
        anonymous = {"interpreter": self.process.anonymous, "objects": objects, "reserve": self._reserve}
        return Footprint(anonymous, {"libraries": libraries})

    def _loading(self, running: Footprint, configuration: Configuration) -> Footprint:
        """What loading takes at its peak beyond what stays."""
        counted = self._config.counted
        phases = self._input.memory.phases(self._outside(running=False), running, configuration)
        worst = max(phase.total(counted) for phase in phases)
        return Footprint({"loading": max(0, worst - running.total(counted))}, {})
