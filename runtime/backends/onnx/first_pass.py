"""Whether a model gives numbers on a device: its first pass, before anybody asks for text; knows no device."""

from __future__ import annotations

import numpy as np

from edgeinfer.errors import BackendError, DeviceError
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.devices.contract import Device
from edgeinfer.runtime.devices.providers import device_error

__all__ = ["check_first_pass"]


def check_first_pass(backend: Backend, device: Device) -> None:
    """Runs a prompt of two tokens and a token after it; the cache is empty afterwards.

    Raises:
        DeviceError: a pass failed, or gave something that is no number; the backend is closed.
    """
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
