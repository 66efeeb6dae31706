"""What tests of devices share: a device that is the CPU under another name, with or without what real ones lack."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import edgeinfer.core.options.load
import edgeinfer.tools.devices
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.devices import registry
from edgeinfer.runtime.devices.providers import CPU, CPU_MEMORY, CPU_PROVIDER, Device, DeviceEntry, Traits
from tests.alone import Alone, restore

TOKENS = [0, 17, 300, 5, 5, 42, 99, 123, 7, 250, 31, 64, 8, 201, 19, 77, 310, 2, 146, 90]

# What WebGPU can do: a cache updated in place, and nothing else that the CPU alone has.
_TRAITS = Traits(
    dynamic_shapes=True, in_place_kv=True, quantized_kv=False, branches=False, tree_bias=False, custom_ops=False
)
STANDIN = Device("standin", CPU_PROVIDER, {}, _TRAITS, CPU_MEMORY)


def lacking(**traits: bool) -> Device:
    """The stand-in with other traits."""
    return dataclasses.replace(STANDIN, traits=dataclasses.replace(STANDIN.traits, **traits))


def install(patch: pytest.MonkeyPatch, *devices: Device, **entry: Any) -> None:
    """Puts devices first in the registry, before the CPU and no others."""
    cpu = DeviceEntry((CPU,), "onnxruntime", True, "")
    found = (*(DeviceEntry((device,), f"{device.name}-package", False, "", **entry) for device in devices), cpu)
    for module in (registry, edgeinfer.tools.devices):
        patch.setattr(module, "ENTRIES", found)
    patch.setattr(
        edgeinfer.core.options.load, "DEVICES", tuple(device.name for each in found for device in each.devices)
    )


def feed(backend: Alone[Any], tokens: Sequence[int]) -> Floats:  # (S, V)
    rows = np.arange(len(tokens))
    return backend.forward(Pass(np.array(tokens, np.int64), rows + backend.cache.length, rows)).logits.copy()


def talk(backend: Alone[Any]) -> list[Floats]:
    """Passes of several widths with all that may happen to a cache between them."""
    found = [feed(backend, TOKENS[:9]), feed(backend, TOKENS[9:10]), feed(backend, TOKENS[10:14])]
    backend.cache.trim(11)
    found.append(feed(backend, TOKENS[11:13]))
    snapshot = backend.cache.snapshot()
    backend.cache.clear()
    found.append(feed(backend, TOKENS[5:8]))
    restore(backend.cache, snapshot)
    found.append(feed(backend, TOKENS[13:14]))
    backend.cache.keep(5, [0, 1, 4])
    found.append(feed(backend, TOKENS[14:16]))
    return found
