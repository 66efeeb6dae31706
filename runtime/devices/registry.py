"""The table of devices, and the choice of the one that runs a model; makes no session. The order of the entries is the
one in which "auto" looks for a device: what computes most comes first, the CPU last."""

from __future__ import annotations

from edgeinfer.core.errors import DeviceError, Setting, UsageError
from edgeinfer.core.options.load import LoadOptions, is_graphics
from edgeinfer.runtime.devices.providers import (
    CPU,
    CPU_MEMORY,
    STATIC_ONLY,
    Device,
    DeviceEntry,
    Graphs,
    Traits,
    is_installed,
    plugin_devices,
)

# NVIDIA's processors through CUDA.
# Our graphs compute in float32. The provider's GroupQueryAttention takes float16 and bfloat16 alone (onnxruntime,
# docs/OperatorKernels.md), and refuses attention_bias, which our graphs always give (onnxruntime,
# contrib_ops/cuda/bert/group_query_attention.cc): attention would run on the CPU, and the cache cross over twice in
# every layer. All operators of the static graphs are there in float32.
_CUDA = DeviceEntry(
    (Device("cuda", "CUDAExecutionProvider", {}, STATIC_ONLY, "cuda", preloaded=True),),
    "onnxruntime-gpu[cuda,cudnn]",
    False,
    "run with onnxruntime-gpu 1.31.1 on an NVIDIA H200",
)

# Graphics processors of Windows through DirectML.
# There is no `If` among the provider's operators, and it compiles a graph as a whole where shapes are known
# (onnxruntime, docs/OperatorKernels.md and docs/execution-providers/DirectML-ExecutionProvider.md). Past and present
# of a static graph are rows that the host holds.
_DIRECTML = DeviceEntry(
    (Device("directml", "DmlExecutionProvider", {}, STATIC_ONLY, "dml"),),
    "onnxruntime-directml",
    False,
    "not run: Windows alone; its static graphs on the CPU",
)

# Graphics processors of any make through WebGPU.
# Run with onnxruntime-ep-webgpu 0.4.0 on onnxruntime 1.31.1: the ordinary graphs give the CPU's tokens; `If` is
# decided on the CPU, which costs a copy of a truth value, and what is inside runs on the device.
# GroupQueryAttention there takes no notice of position_ids (onnxruntime, contrib_ops/webgpu/bert/
# group_query_attention.cc), so siblings in a draft tree would be rotated as if they followed each other; its quantized
# caches are of another layout than ours (onnxruntime, pull requests 28059 and 32284).
_WEBGPU_TRAITS = Traits(
    dynamic_shapes=True, in_place_kv=True, quantized_kv=False, branches=False, tree_bias=False, custom_ops=False
)
_WEBGPU = DeviceEntry(
    (Device("webgpu", "WebGpuExecutionProvider", {}, _WEBGPU_TRAITS, "webgpu", plugin="onnxruntime_ep_webgpu"),),
    "onnxruntime-ep-webgpu",
    True,
    "run with onnxruntime-ep-webgpu 0.4.0 on a graphics processor in software (SwiftShader)",
    # A graphics processor in software is listed only where its environment says so.
    hardware=lambda device: bool(plugin_devices(device)),
)

# Qualcomm's neural processor through QNN.
# Dynamic shapes are not supported (onnxruntime, docs/execution-providers/QNN-ExecutionProvider.md). Since 2.0 the
# package is a plugin of onnxruntime (onnxruntime-qnn, README.md); older ones came in its place.
_QNN = DeviceEntry(
    (Device("qnn", "QNNExecutionProvider", {}, STATIC_ONLY, CPU_MEMORY, plugin="onnxruntime_qnn"),),
    "onnxruntime-qnn>=2",
    True,
    "not run: no such hardware; its static graphs on the CPU",
    # The provider would run on other processors too, no better than theirs.
    hardware=lambda device: any(found.device.type.name == "NPU" for found in plugin_devices(device)),
)

# Apple's neural engine, graphics and CPU through Core ML.
# Without static shapes the provider leaves nodes to the CPU or runs them slower, and it knows none of the operators
# outside the ONNX standard; ML programs, unlike the older networks, multiply matrices of activations (onnxruntime,
# docs/execution-providers/CoreML-ExecutionProvider.md).
_COREML_OPTIONS = {"ModelFormat": "MLProgram", "RequireStaticInputShapes": "1"}
_COREML = DeviceEntry(
    (Device("coreml", "CoreMLExecutionProvider", _COREML_OPTIONS, STATIC_ONLY, CPU_MEMORY),),
    "onnxruntime for macOS",
    True,
    "not run: macOS alone; its static graphs on the CPU",
)

# Intel's neural, graphics and central processors through OpenVINO.


def _openvino_seen(device: Device) -> bool:
    """Whether OpenVINO lists such a processor; two of a kind are GPU.0 and GPU.1."""
    from onnxruntime.capi import _pybind_state as state

    kind = device.options["device_type"]
    return any(seen.partition(".")[0] == kind for seen in state.get_available_openvino_device_ids())


_OPENVINO = DeviceEntry(
    # Tried on onnxruntime-openvino 1.24.1: the provider takes the ordinary graphs whole and then cannot read them
    # ("Exception while Reading network"), so no session is made of them.
    tuple(
        Device(f"openvino:{kind}", "OpenVINOExecutionProvider", {"device_type": kind}, STATIC_ONLY, CPU_MEMORY)
        for kind in ("NPU", "GPU", "CPU")
    ),
    "onnxruntime-openvino",
    False,
    "CPU: run with onnxruntime-openvino 1.24.1; NPU and GPU not run: no such hardware",
    _openvino_seen,
)

# The CPU through XNNPACK's kernels.
# A few operators with static shapes (onnxruntime, docs/execution-providers/Xnnpack-ExecutionProvider.md); no package
# for Python has it: onnxruntime must be built with --use_xnnpack. Never chosen automatically: nothing shows that it is
# faster than onnxruntime's own kernels on the same processor.
_XNNPACK = DeviceEntry(
    (Device("xnnpack", "XnnpackExecutionProvider", {}, STATIC_ONLY, CPU_MEMORY),),
    "onnxruntime built with --use_xnnpack",
    False,
    "not run: no package for Python; its static graphs on the CPU",
    automatic=False,
)

# The CPU, on onnxruntime's own provider and our kernel.
_CPU = DeviceEntry((CPU,), "onnxruntime", True, "all tests")

ENTRIES: tuple[DeviceEntry, ...] = (_CUDA, _DIRECTML, _WEBGPU, _QNN, _COREML, _OPENVINO, _XNNPACK, _CPU)


def find_device(name: str) -> tuple[DeviceEntry, Device]:
    """The device of a name such as "openvino:NPU". A bare name is the first of its devices that has hardware."""
    for entry in ENTRIES:
        if name == entry.name:
            seen = (device for device in entry.devices if is_installed(device) and entry.hardware(device))
            return entry, next(seen, entry.devices[0])
        for device in entry.devices:
            if name == device.name:
                return entry, device
    known = [entry.name for entry in ENTRIES] + [d.name for entry in ENTRIES for d in entry.devices if ":" in d.name]
    raise UsageError(f"There is no device {name!r}.", f"Choose auto or one of {', '.join(known)}.")


def choose_device(config: LoadOptions, graphs: Graphs) -> Device:
    """The device asked for; for "auto" the first of the registry that is there and runs such graphs as asked. A budget
    keeps "auto" on the CPU, the only device on which all that a model takes is known beforehand."""
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


def _asked_for(config: LoadOptions, graphs: Graphs) -> Device:
    if is_graphics(config.device) and config.device not in {entry.name for entry in ENTRIES}:
        message = f"The device {config.device} is llama.cpp's, which runs GGUF files alone."
        raise DeviceError(message, "Export it with --format gguf, or use " + Setting("device", "cpu") + ".")
    entry, device = find_device(config.device)
    if device.on_cpu:
        return device
    if not is_installed(device):
        how = "together with onnxruntime" if entry.plugin else "in place of onnxruntime, in an environment of its own"
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


def _missing(device: Device, config: LoadOptions, graphs: Graphs) -> str:
    """The wanted ability that a device lacks, in words; empty if it has all."""
    if device.on_cpu or graphs != "ordinary":
        return ""
    if config.native and not device.traits.custom_ops:
        return "native kernel"
    if config.kv not in (None, "float32") and not device.traits.quantized_kv:
        return f"cache of {config.kv}"
    if config.weights not in (None, "packed"):
        return f"weights that are {config.weights}"
    return ""
