"""Execution providers of the onnxruntime that is installed: whether one is there, how a session gets it.

onnxruntime is imported when it is asked, as models on other engines do without it. A provider that comes as a library
of its own is loaded from its installed package alone: what a bundle brings is never loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from threading import Lock
from typing import TYPE_CHECKING, Any

from edgeinfer.errors import DeviceError, Setting
from edgeinfer.runtime.devices.contract import CPU_PROVIDER, Device

if TYPE_CHECKING:
    import onnxruntime as ort


# Plugins and providers whose libraries this process has loaded; onnxruntime refuses to load a plugin's twice.
_LOADED: set[str] = set()
_loading = Lock()


def is_installed(device: Device) -> bool:
    """Whether onnxruntime has the device's provider, or the package that brings it is there."""
    if device.plugin:
        return importlib.util.find_spec(device.plugin) is not None
    if device.provider == CPU_PROVIDER:
        return True
    import onnxruntime as ort

    return device.provider in ort.get_available_providers()


def add_provider(device: Device, options: ort.SessionOptions) -> Sequence[Any] | None:
    """What onnxruntime's `providers` has to be for a session on a device; plugins are put into the options instead."""
    require(device)
    if device.plugin:
        # One of them: so the WebGPU provider wants it, and a second one would have to be asked for by a name.
        options.add_provider_for_devices(plugin_devices(device)[:1], dict(device.options))
        return None
    if device.provider == CPU_PROVIDER:
        return (CPU_PROVIDER,)
    if device.preloaded:
        _preload(device.provider)
    return ((device.provider, dict(device.options)), CPU_PROVIDER)


def _preload(provider: str) -> None:
    """Loads CUDA's and cuDNN's libraries from packages of pip; where they are not, the system's are found later."""
    import onnxruntime as ort

    # What it does not find, it prints, and what others print meanwhile is lost: so once.
    with _loading:
        if provider not in _LOADED:
            with redirect_stdout(StringIO()):
                ort.preload_dlls()
            _LOADED.add(provider)


def require(device: Device) -> None:
    """Refuses a device that is not there."""
    if not is_installed(device):
        raise device_error(device, "it is not installed")
    if device.plugin and not plugin_devices(device):
        raise device_error(device, "it finds no hardware that it can use")


def device_error(device: Device, reason: object) -> DeviceError:
    """What is raised where a device fails."""
    first = next(iter(str(reason).strip().splitlines()), "no reason given").rstrip(".")
    return DeviceError(
        f"The device {device.name} ({device.provider}) fails: {first}.", "Use " + Setting("device", "cpu") + "."
    )


def plugin_devices(device: Device) -> list[Any]:
    """Hardware that a plugin provider found, as onnxruntime's OrtEpDevice; the library is loaded on first use."""
    import onnxruntime as ort

    try:
        with _loading:
            if device.plugin not in _LOADED:
                package = importlib.import_module(device.plugin)
                ort.register_execution_provider_library(device.plugin, package.get_library_path())
                _LOADED.add(device.plugin)
        return [found for found in ort.get_ep_devices() if found.ep_name == device.provider]
    except Exception as error:
        # onnxruntime raises a family of exceptions without a common base of its own, packages raise what they like.
        raise device_error(device, error) from error
