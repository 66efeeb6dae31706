"""Arrays in the memory of a device, as far as the KV cache needs them. onnxruntime copies whole arrays between
memories, no parts of them. So reading or writing some rows copies the array over and back: that is for what happens
between replies. A pass reads and writes where the array lies, and cutting the cache is passing a smaller length."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.core.options import format_size
from edgeinfer.runtime.devices.providers import CPU_MEMORY, Device, device_error, require
from edgeinfer.runtime.system.memory import is_refusal

Zeros = Callable[[tuple[int, ...], Any], Any]


def device_zeros(device: Device) -> Zeros:
    """A function like numpy.zeros that allocates in the memory of a device."""
    require(device)
    return lambda shape, dtype: DeviceArray(shape, dtype, device)


def device_value(array: NDArray[Any], device: Device) -> ort.OrtValue:
    """A copy of an array on a device; in ordinary memory the array itself."""
    if device.memory == CPU_MEMORY:
        return ort.OrtValue.ortvalue_from_numpy(array)
    try:
        value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, device.memory, 0)
        value.update_inplace(array)
    except Exception as error:
        # onnxruntime raises a family of exceptions without a common base of its own.
        reason = f"it has no room for {format_size(array.nbytes)}" if is_refusal(error) else error
        raise device_error(device, reason) from error
    return value


class DeviceArray:
    """An array of zeros on a device, of which parts can be read and written as of numpy's."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: Device) -> None:
        self.shape = shape
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._device = device
        self.value = self._new()
        # The array that a pass writes: this one, or a second copy where the device cannot write in place.
        self.written = self.value if device.traits.in_place_kv else self._new()

    def _new(self) -> ort.OrtValue:
        return device_value(np.zeros(self.shape, self.dtype), self._device)

    @property
    def nbytes(self) -> int:
        copies = 1 if self.written is self.value else 2
        return copies * math.prod(self.shape) * self.dtype.itemsize

    def swap(self) -> None:
        self.value, self.written = self.written, self.value

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return np.array(self.value.numpy()[rows])

    def __setitem__(self, rows: Any, new: NDArray[Any]) -> None:
        """Writes a part; the whole goes over to the host and back."""
        whole = np.array(self.value.numpy())
        whole[rows] = new
        self.value.update_inplace(whole)
