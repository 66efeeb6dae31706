"""Devices as execution providers of onnxruntime: their abilities, installation, and options of sessions. onnxruntime is
imported when it is needed, as models on other engines do without it. A provider that comes as a library of its own is
loaded from its installed package alone: what a bundle brings is never loaded."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

from edgeinfer.core.errors import DeviceError, Setting
from edgeinfer.core.records import dataclass

if TYPE_CHECKING:
    import onnxruntime as ort

# Graphs that a backend runs on onnxruntime: none, the ordinary ones, or static ones.
Graphs = Literal["none", "ordinary", "static"]

CPU_PROVIDER = "CPUExecutionProvider"
# onnxruntime's name of ordinary memory.
CPU_MEMORY = "cpu"


@dataclass(frozen=True)
class Traits:
    """Abilities of a provider's own kernels."""

    # Runs the ordinary graphs; else only static ones (edgeinfer export --static), to which none of the others applies.
    dynamic_shapes: bool
    in_place_kv: bool  # past and present may be bound to one buffer
    quantized_kv: bool  # attention over a cache of int8 and int4
    branches: bool  # `If`; without, the CPU decides, and what is inside runs on the device all the same
    tree_bias: bool  # GroupQueryAttention with attention_bias, and rows at positions of their own
    custom_ops: bool  # runs our native kernel


@dataclass(frozen=True)
class Device:
    name: str  # as users write it: "cpu", "cuda", "openvino:NPU"
    provider: str  # onnxruntime's name: "CPUExecutionProvider"
    options: Mapping[str, str]
    traits: Traits
    memory: str  # onnxruntime's name of where its arrays live; CPU_MEMORY where it reads ordinary memory
    # Module of the package that brings the provider as a library of its own; empty where onnxruntime has it.
    plugin: str = ""
    servers: tuple[str, ...] = ()  # addresses of other machines that it is made of; none where it is this machine's
    # Whether the provider needs libraries that pip installs where the system's linker does not look.
    preloaded: bool = False

    @property
    def on_cpu(self) -> bool:
        """Whether this is the CPU as all else is measured against: our kernel, and arrays used in place."""
        return self.name == "cpu"


STATIC_ONLY = Traits(False, False, False, False, False, False)
CPU = Device("cpu", CPU_PROVIDER, {}, Traits(True, True, True, True, True, True), CPU_MEMORY)


@dataclass(frozen=True)
class DeviceEntry:
    devices: tuple[Device, ...]  # the devices it stands for, the first by the bare name
    package: str  # the pip package that brings the provider
    plugin: bool  # whether the package is installed together with onnxruntime; else in place of it
    tried: str  # where it was run, for people: the table says so
    hardware: Callable[[Device], bool] = lambda device: (
        True
    )  # whether the provider, which is installed, sees hardware for a device
    automatic: bool = True  # whether "auto" may take it

    @property
    def name(self) -> str:
        return self.devices[0].name.partition(":")[0]


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
    """Onnxruntime's `providers` for a session on a device; plugins are put into the options instead."""
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
    if not is_installed(device):
        raise device_error(device, "it is not installed")
    if device.plugin and not plugin_devices(device):
        raise device_error(device, "it finds no hardware that it can use")


def device_error(device: Device, reason: object) -> DeviceError:
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
