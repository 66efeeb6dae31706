"""Chooses the device that runs a model, by what is asked for and what is installed; makes no session."""

from __future__ import annotations

from edgeinfer.config import LoadConfig
from edgeinfer.device_options import is_graphics
from edgeinfer.errors import DeviceError, Setting, UsageError
from edgeinfer.runtime.devices.contract import CPU, Device, DeviceEntry, Graphs
from edgeinfer.runtime.devices.providers import is_installed
from edgeinfer.runtime.devices.registry import ENTRIES, find_device


def choose_device(config: LoadConfig, graphs: Graphs) -> Device:
    """The device asked for; for "auto" the first of the registry that is there and runs such graphs as asked.

    A budget keeps "auto" on the CPU, the only device on which all that a model takes is known beforehand.
    """
    if config.device != "auto":
        return _asked_for(config, graphs)
    if config.memory is not None:
        return CPU
    for entry in ENTRIES:
        if entry.automatic:
            for device in entry.devices:
                if runs(device, graphs) and not _missing(device, config, graphs) and _there(entry, device):
                    return device
    return CPU


def runs(device: Device, graphs: Graphs) -> bool:
    """Whether a device runs such graphs at all."""
    return device.on_cpu or graphs == "static" or (graphs == "ordinary" and device.traits.dynamic_shapes)


def _asked_for(config: LoadConfig, graphs: Graphs) -> Device:
    if is_graphics(config.device) and config.device not in {entry.name for entry in ENTRIES}:
        message = f"The device {config.device} is llama.cpp's, which runs GGUF files alone."
        raise DeviceError(message, "Export it with --format gguf, or use " + Setting("device", "cpu") + ".")
    entry, device = find_device(config.device)
    if device.on_cpu:
        return device
    if not is_installed(device):
        how = "beside onnxruntime" if entry.beside else "in place of onnxruntime, in an environment of its own"
        message = f"The device {device.name} is not installed here."
        raise DeviceError(message, f"Install {entry.package} {how}, or use " + Setting("device", "cpu") + ".")
    if graphs == "none":
        message = f"This model runs on an engine of its own, not on {device.name}."
        raise DeviceError(message, "Use " + Setting("device", "cpu") + ", or a bundle that edgeinfer exported itself.")
    if not runs(device, graphs):
        message = f"The device {device.name} runs only graphs of fixed shapes, and this bundle has none."
        raise DeviceError(message, "Export it again with --static, or use " + Setting("device", "cpu") + ".")
    if missing := _missing(device, config, graphs):
        raise UsageError(
            f"The device {device.name} has no {missing}.",
            "Leave that option out, or use " + Setting("device", "cpu") + ".",
        )
    return device


def _there(entry: DeviceEntry, device: Device) -> bool:
    """Whether "auto" finds a device; one that cannot even be looked for is not there."""
    try:
        return is_installed(device) and entry.hardware(device)
    except DeviceError:
        return False


def _missing(device: Device, config: LoadConfig, graphs: Graphs) -> str:
    """What was asked for that a device lacks, in words; empty where it has all."""
    if device.on_cpu or graphs != "ordinary":
        return ""
    if config.native and not device.traits.custom_ops:
        return "native kernel"
    if config.kv not in (None, "float32") and not device.traits.quantized_kv:
        return f"cache of {config.kv}"
    if config.weights not in (None, "packed"):
        return f"weights that are {config.weights}"
    return ""
