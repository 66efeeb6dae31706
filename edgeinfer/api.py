"""Loading a model: `load` has bundles opened and the parts of a model made (`loading`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Unpack

from edgeinfer.bundle.embedding import ENCODER
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.types import LoadDict
from edgeinfer.core.results import Progress
from edgeinfer.lifecycle import ModelLifecycle, ModelParts
from edgeinfer.loading import make_parts, open_model, plan_of, planned_by, within_budget
from edgeinfer.model import Model
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.system.memory import allocating
from edgeinfer.tokenizing import chat_template


def load(model: str | Path | None = None, *, progress: Progress | None = None, **options: Unpack[LoadDict]) -> Model:
    """Load a model, which generates text, or makes embeddings or scores.

    Args:
        model: a bundle or checkpoint directory, a .gguf file, ORG/NAME of the hub or a name of `catalog`; None is the
            built-in model. A model that is not on this machine is fetched, and a checkpoint converted, once.
        progress: called with a stage, steps done and steps in all while weights are converted, once on a device.
        options: memory="600MB", context=4096, threads=4 and the other keys of `LoadDict`, which documents each.

    Raises:
        ModelError, StorageError: the bundle is missing or damaged; there is no place for converted weights.
        BudgetError: it does not fit `memory`; the error carries the breakdown and the smallest budget that would do.
        UsageError: an option is unknown or out of range.
    """
    config = LoadOptions.of(**options)
    started = time.perf_counter()
    with allocating("The model"):
        facts, planned = within_budget(open_model(model, config, progress), config)

    if facts.backend == ENCODER:
        from edgeinfer.encoder_model import EncoderModel

        return EncoderModel(facts, planned or plan_of(facts, config, loading=True), config, started, progress)

    def make(started: float, plan: MemoryPlan | None) -> ModelParts:
        return make_parts(facts, config, plan or planned, progress if plan is None else None, started)

    lifecycle = ModelLifecycle(make, started, config.idle_unload, aside=config.remember)
    return Model(lifecycle, chat_template(facts.bundle), config.inter_token_latency)


def plan(model: str | Path | None = None, **options: Unpack[LoadDict]) -> MemoryPlan:
    """Plan what `load` with the same arguments would take and how fast it would run, and list the alternatives.

    Nothing is loaded. A plan that does not fit is returned too.

    Args:
        model: as `load` takes it.
        options: as `load` takes them.

    Raises:
        ModelError, UsageError: as `load`.
    """
    config = LoadOptions.of(**options)
    with planned_by(model, config) as found:
        return plan_of(open_model(found, config), config, all_ways=True)


async def aload(
    model: str | Path | None = None, *, progress: Progress | None = None, **options: Unpack[LoadDict]
) -> Model:
    """`load` for asynchronous programs: the event loop keeps running.

    Args:
        model, progress, options: as `load` takes them; `progress` is called on another thread.
    """
    import asyncio  # 4 MB that programs without an event loop save

    loading = asyncio.get_running_loop().run_in_executor(None, lambda: load(model, progress=progress, **options))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        # Loading cannot be stopped half way.
        loading.add_done_callback(lambda done: None if done.cancelled() or done.exception() else done.result().close())
        raise
