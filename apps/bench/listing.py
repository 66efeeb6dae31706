"""Every benchmark, in the order of the help."""

from __future__ import annotations

from edgeinfer.apps.bench.benchmark import Benchmark
from edgeinfer.apps.bench.curve import CURVE
from edgeinfer.apps.bench.devices import DEVICES
from edgeinfer.apps.bench.memory import MEMORY
from edgeinfer.apps.bench.peers import PEERS_BENCHMARK
from edgeinfer.apps.bench.quality import QUALITY
from edgeinfer.apps.bench.spec import SPEC
from edgeinfer.apps.bench.speed import SPEED

BENCHMARKS: tuple[Benchmark, ...] = (SPEC, *MEMORY, SPEED, CURVE, QUALITY, PEERS_BENCHMARK, DEVICES)
