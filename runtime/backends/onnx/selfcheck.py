"""Tries a device: a small model runs on it and on the CPU, and both must say the same; then the model's first pass."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.errors import BackendError, DeviceError, EdgeInferError
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.backends.onnx.check_models import (
    HEAD_SIZE,
    HEADS,
    ROOM,
    WIDTH,
    ordinary_model,
    static_model,
)
from edgeinfer.runtime.backends.onnx.session import Binding, OrtSession
from edgeinfer.runtime.devices.arrays import DeviceArray
from edgeinfer.runtime.devices.contract import CPU, Device
from edgeinfer.runtime.devices.providers import device_error

# Devices may compute in half precision, and the CPU rounds what it multiplies 4-bit weights with to 8 bits.
_TOLERANCE = 0.02
_TOKENS = 3


def check_device(device: Device) -> None:
    """Runs what the device's traits promise: the static model, and the ordinary one with a cache in its memory."""
    models = [_static] + ([_ordinary] if device.traits.dynamic_shapes else [])
    for run in models:
        try:
            found = run(device)
        except DeviceError:
            raise
        except EdgeInferError as error:
            raise device_error(device, error.message) from error
        wanted = run(CPU)
        if not np.isfinite(found).all() or float(np.abs(found - wanted).max()) > _TOLERANCE:
            raise device_error(device, "it computes something else than the CPU")


def _static(device: Device) -> NDArray[np.float32]:  # (2, W)
    session = OrtSession(static_model(), 1, device=device)
    binding = session.binding()
    output = np.zeros((2, WIDTH), np.float32)
    _bind(binding, {"x": _states(2)})
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(output))
    session.run(binding)
    return output


def _ordinary(device: Device) -> NDArray[np.float32]:  # (tokens, W)
    session = OrtSession(ordinary_model(), 1, device=device)
    shape = (1, HEADS, ROOM, HEAD_SIZE)
    caches = [DeviceArray(shape, np.float32, device) for _ in range(2)]
    states, found = _states(_TOKENS), np.zeros((_TOKENS, WIDTH), np.float32)
    output = np.zeros((1, 1, WIDTH), np.float32)
    for token in range(_TOKENS):
        binding = session.binding()
        total = np.array(token + 1, np.int32)
        _bind(binding, {"x": states[token].reshape(1, 1, -1), "seqlens_k": total.reshape(1) - 1, "total": total})
        for name, cache in zip(("key", "value"), caches, strict=True):
            binding.bind_ortvalue_input(f"past_{name}", cache.value)
            binding.bind_ortvalue_output(f"present_{name}", cache.written)
        binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(output))
        session.run(binding)
        found[token] = output[0, 0]
        if not device.traits.in_place_kv:
            for cache in caches:
                cache.swap()
    return found


def _bind(binding: Binding, inputs: dict[str, NDArray[np.generic]]) -> None:
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array)))


def _states(rows: int) -> NDArray[np.float32]:  # (rows, W)
    return np.random.default_rng(1).uniform(-1, 1, (rows, WIDTH)).astype(np.float32)


def check_first_pass(backend: Backend, device: Device) -> None:
    """Runs a prompt of two tokens and a token after it; the cache is empty afterwards."""
    try:
        for tokens in ([0, 0], [0]):
            ids = np.array(tokens, np.int64)
            positions = backend.cache.length + np.arange(len(ids), dtype=np.int64)
            logits = backend.forward(ForwardInput(ids, positions, np.array([len(ids) - 1], np.int64))).logits
            if not np.isfinite(logits).all():
                raise device_error(device, "its first pass gave logits that are no numbers")
        backend.cache.clear()
    except (BackendError, DeviceError) as error:
        backend.close()
        raise error if isinstance(error, DeviceError) else device_error(device, error.message) from error
