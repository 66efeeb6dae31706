"""A model to plan for, a device whose costs are known, and plans by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgeinfer.core.options.load import LoadOptions
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.backends.onnx.memory import OnnxMemory
from edgeinfer.runtime.planning.candidates import Drafting
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration, Footprint
from edgeinfer.runtime.planning.memory_model import MemoryModel
from edgeinfer.runtime.planning.plan import MemoryPlan
from edgeinfer.runtime.planning.search import search
from edgeinfer.runtime.planning.speed_model import Pace, SpeedModel
from edgeinfer.runtime.profile.costs import Costs, DraftCosts, PassCosts, Prospect
from edgeinfer.runtime.profile.device_profile import DeviceProfile, stamped
from edgeinfer.runtime.speculation.assembly import OPTION_BYTES
from edgeinfer.runtime.system.memory import ProcessMemory
from tests.runtime.models import bundle_of

PROCESS = ProcessMemory(60_000_000, 60_000_000, 35_000_000, 25_000_000)
# A device on which four rows cost what one does, and reading the weights again ten times as much.
PASSES = PassCosts(((1, 10.0), (4, 10.5), (8, 20.0), (64, 150.0)))
TABLES = (Prospect("copy", 0.3, 0.8, 0.01, tables=True), Prospect("ngram", 0.2, 0.7, 0.01, tables=True))
PACE = Pace(PASSES, True, 0.3, (*TABLES, Prospect("recycle", 0.1, 0.5, 0.01, tables=True)))
PLAIN = (Drafting((), 0, False),)


@pytest.fixture(scope="module")
def facts() -> BundleFacts:
    """A model with a large vocabulary for its size, so that drafts take memory; everything is open to choice."""
    return facts_of(8192)


def facts_of(max_positions: int) -> BundleFacts:
    bundle = bundle_of("llama-tied", ExportConfig(bits=4, keep_small=False, calibration="none"))
    assert bundle.manifest.decoder is not None
    manifest = dataclasses.replace(
        bundle.manifest,
        decoder=dataclasses.replace(bundle.manifest.decoder, max_positions=max_positions, vocab_size=20_000),
        geometry=dataclasses.replace(bundle.manifest.geometry, max_positions=max_positions, vocab_size=20_000),
    )
    bundle = dataclasses.replace(bundle, manifest=manifest)
    memory = OnnxMemory(bundle, "native", merge_pairs=True)
    kinds, modes = ("float32", "int8", "int4"), ("mapped", "streamed")
    return BundleFacts("onnx", bundle, "native", None, kinds, modes, "kept", 1, memory, option_bytes=OPTION_BYTES)


def pace_of(configuration: Configuration) -> Pace:
    window = configuration.window_layers
    extra = 100.0 / window if window else 0.0
    return dataclasses.replace(PACE, passes=PassCosts(tuple((rows, ms + extra) for rows, ms in PACE.passes.points)))


class Large(MemoryModel):
    """The weights of a model that fills most of a budget."""

    def footprint(self, configuration: Configuration) -> Footprint:
        layers = configuration.window_layers or 20
        whole = super().footprint(configuration)
        # Compared with this, loading is nothing.
        return Footprint(dict(whole.anonymous) | {"loading": 0}, whole.file) + Footprint(
            {}, {"weights_mapped": layers * 20_000_000}
        )


def plan(facts: BundleFacts, all_ways: bool = False, free: int | None = None, **options: Any) -> MemoryPlan:
    config = LoadOptions(**options)
    return search(facts, config, Large(facts, config, PROCESS), SpeedModel(pace_of), all_ways=all_ways, free=free)


class Measured(DeviceProfile):
    """A profile whose passes took so many times what `PACE` says."""

    def __init__(self, times: float, token_ms: float | None = None) -> None:
        super().__init__(None)
        self._costs = stamped(
            PassCosts(tuple((rows, ms * times) for rows, ms in PACE.passes.points)), DraftCosts({}, 0.3, token_ms)
        )

    def costs(self) -> Costs | None:
        return self._costs
