"""Which options and which parts of a bundle's description are refused one step from sound ones, as recorded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.compute import ComputeBenchOptions
from edgeinfer.apps.bench.curve import CurveConfig
from edgeinfer.apps.bench.quality import QualityOptions
from edgeinfer.apps.bench.spec import SpecOptions
from edgeinfer.apps.bench.speed import SpeedConfig, SpeedTest
from edgeinfer.apps.desktop.settings import AppSettings
from edgeinfer.apps.server.security import Security
from edgeinfer.bundle.geometry import KVLayer, StateLayer
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.packing import QuantizedShape
from edgeinfer.bundle.parts import ConvSpec, HeadsSpec
from edgeinfer.options.decoding import ReducedCompute, Search, Speculation
from edgeinfer.options.load import Cache, LoadConfig
from edgeinfer.options.reply import GenerationConfig, Sampling
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.profile.settings import TunedSettings
from tests.bounds import bounds, facts
from tests.recorded import check_recorded

SOUND: tuple[Any, ...] = (
    *(LoadConfig(), LoadConfig(memory=600_000_000, context=64, kv="int8", overflow="merge"), Cache(prefix_cache="5MB")),
    *(GenerationConfig(), GenerationConfig(temperature=0.7, top_p=0.9, max_tokens=8, seed=1), Sampling(temperature=1)),
    *(GenerationConfig(search="beam"), Speculation(), Search("beam"), ReducedCompute("unified")),
    *(PassCosts(((1, 2.0), (4, 3.0)), 2), TunedSettings(threads=2, affinity="1;2", prefill_chunk=64), AppSettings()),
    *(
        SpeedTest(8, 4),
        SpeedConfig(),
        CurveConfig(),
        SpecOptions(),
        QualityOptions(),
        ComputeBenchOptions(),
        *(Security(), KVLayer(2, 16, 32), KVLayer(2, 0, 16), KVLayer(0, 0, 0), StateLayer(4, 2, 8, 16, 96, 4)),
        *(ConvSpec(4), HeadsSpec(2, 16), QuantizedShape(6, 70, 4, 32, True)),
    ),
)


def parts(value: Any) -> Iterator[Any]:
    """The dataclasses that a description is made of, of each kind the first."""
    seen: set[type] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, tuple | list):
            waiting += each
        elif isinstance(each, dict):
            waiting += each.values()
        elif dataclasses.is_dataclass(each):
            if type(each) not in seen:
                seen.add(type(each))
                yield each
            waiting += [getattr(each, field.name) for field in dataclasses.fields(each)]


def test_options_one_step_away_are_refused_as_they_were() -> None:
    found = {f"{n} {type(each).__name__}": [bounds(each), facts(each)] for n, each in enumerate(SOUND)}
    check_recorded("bounds-config", found)


def test_manifests_one_step_away_are_refused_as_they_were(small_bundle: Path) -> None:
    found = {}
    for part in parts(open_bundle(small_bundle).manifest):
        found[type(part).__name__] = [bounds(part), facts(part)]
    check_recorded("bounds-manifest", found)
