"""Every benchmark that `edgeinfer bench` has, in the order of its help."""

from __future__ import annotations

from edgeinfer.apps.bench.benchmark import Benchmark
from edgeinfer.apps.bench.compute import COMPUTE
from edgeinfer.apps.bench.curve import CURVE
from edgeinfer.apps.bench.devices import DEVICES
from edgeinfer.apps.bench.memory import GROUP, MEMORY
from edgeinfer.apps.bench.peers import PEERS
from edgeinfer.apps.bench.quality import QUALITY
from edgeinfer.apps.bench.spec import SPEC
from edgeinfer.apps.bench.speed import SPEED

BENCHMARKS: tuple[Benchmark, ...] = (SPEC, *MEMORY, SPEED, CURVE, QUALITY, COMPUTE, PEERS, DEVICES)
# Help and description of the first word of names of two.
GROUPS: dict[str, tuple[str, str]] = {"memory": GROUP}
