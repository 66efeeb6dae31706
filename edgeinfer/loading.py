"""Makes the parts of a model: opens its bundles, plans their memory, builds what runs; knows nothing of requests."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.bundle import Bundle, open_bundle
from edgeinfer.bundle.tables import tensors_in
from edgeinfer.config import LoadConfig
from edgeinfer.generation import ModelParts
from edgeinfer.hub import resolve
from edgeinfer.results import LoadCosts, ModelInfo
from edgeinfer.runtime.backends import make_backend, run_layout
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.engine import Engine
from edgeinfer.runtime.memory import process_memory, release_freed, return_large_frees
from edgeinfer.runtime.plan import MemoryPlan, make_plan
from edgeinfer.runtime.speculation.assembly import make_speculator
from edgeinfer.runtime.speculation.drafters.model import check_same_vocabulary
from edgeinfer.runtime.text import Tokenizer
from edgeinfer.text_files import boundary_ids

__all__ = ["Bundles", "make_parts"]


@dataclass(frozen=True)
class Bundles:
    """What is loaded: the model, and the small one that drafts for it."""

    target: Bundle
    drafter: Bundle | None

    @classmethod
    def open(cls, model: str | Path | None, config: LoadConfig) -> Bundles:
        """Opens both.

        Raises:
            ModelError: one is missing or damaged, or their tokens are not the same.
        """
        target = open_bundle(resolve(model))
        if config.draft_model is None:
            return cls(target, None)
        drafter = open_bundle(resolve(config.draft_model))
        check_same_vocabulary(target, drafter)
        return cls(target, drafter)

    def plan(self, config: LoadConfig) -> MemoryPlan:
        """What both will take; errors as `run_layout` and `make_plan`."""
        layout = run_layout(self.target, config)
        if self.drafter is None:
            return make_plan(self.target, config, layout)
        # The backend asked for is the target's; a draft model runs on its own.
        drafter_layout = run_layout(self.drafter, dataclasses.replace(config, backend=None))
        return make_plan(self.target, config, layout, (self.drafter, drafter_layout))


def make_parts(
    bundles: Bundles, config: LoadConfig, progress: Callable[[str, int, int], None] | None, started: float
) -> ModelParts:
    """Loads what was opened.

    Args:
        progress: as `edgeinfer.load` takes it.
        started: time.perf_counter() of the request to load.

    Raises:
        EdgeInferError: as `edgeinfer.load`.
    """
    plan = bundles.plan(config)
    plan.require_fit()
    return_large_frees()
    bundle = bundles.target
    # The tokenizer first: parsing it takes more than it keeps, and what it frees must be gone before the weights come.
    parsing, before = time.perf_counter(), process_memory().anonymous
    tokenizer = Tokenizer.from_file(bundle.file("tokenizer.json"))
    release_freed()
    tokenizer_ms, tokenizer_bytes = (time.perf_counter() - parsing) * 1e3, process_memory().anonymous - before
    engine = Engine(make_backend(bundle, config, plan, progress), plan.prefill_chunk)
    speculator = make_speculator(engine.backend, config, plan, bundle, bundles.drafter)
    begin_ids, eos_ids = boundary_ids(bundle)
    return ModelParts(
        engine=engine,
        tokenizer=tokenizer,
        plan=plan,
        info=_info(bundle, engine.backend),
        begin_ids=begin_ids,
        eos_ids=eos_ids,
        load=LoadCosts((time.perf_counter() - started) * 1e3, tokenizer_ms, tokenizer_bytes),
        tensors=tensors_in(bundle.manifest, plan.layout),
        speculator=speculator,
    )


def _info(bundle: Bundle, backend: Backend) -> ModelInfo:
    manifest = bundle.manifest
    return ModelInfo(
        name=manifest.name,
        architecture=manifest.architecture,
        parameters=manifest.parameters,
        bits_per_weight=round(manifest.bits_per_weight, 3),
        backend=backend.name,
        kernel=backend.kernel,
    )
