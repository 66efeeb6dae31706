"""Layers on graphics processors: how those are found, what a plan says of them, and what llama.cpp is asked for.

The CPU stands in for one, as llama.cpp's device of that name.
"""

from __future__ import annotations

import ctypes
import itertools
import types
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.core.options.load import LoadOptions

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

import edgeinfer
from edgeinfer.bundle.gguf import library
from edgeinfer.bundle.gguf.library import cpu_device, functions, llama_library
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import DeviceError, UsageError
from edgeinfer.runtime.backends.llamacpp import graphics
from edgeinfer.runtime.backends.llamacpp.model import LlamaModel
from tests.cli import edgeinfer as run
from tests.gguf_models import builtin_gguf, random_gguf
from tests.tables import each_row

pytestmark = pytest.mark.gguf

GIB = 1024**3
DISCRETE, INTEGRATED = 1, 2
PROMPT = "Once upon a time"


def install(patch: pytest.MonkeyPatch, *devices: tuple[str, int, int]) -> None:
    """Makes llama.cpp find devices of these names, types and free bytes, all of which are the CPU, and the CPU last."""
    cpu = cpu_device(functions(llama_library()._lib._name)).value or 0
    # Two pointers may not be one, as they are looked up; the one that is loaded on comes first, and is real.
    found = {cpu + index: device for index, device in enumerate(devices)} | {1: ("CPU", 0, GIB)}

    def memory(device: ctypes.c_void_p, free: Any, total: Any) -> None:
        free._obj.value = total._obj.value = found[device.value or 0][2]

    ggml = types.SimpleNamespace(
        ggml_backend_dev_count=lambda: len(found),
        ggml_backend_dev_get=lambda index: list(found)[index.value],
        ggml_backend_dev_type=lambda device: found[device.value or 0][1],
        ggml_backend_dev_name=lambda device: found[device.value or 0][0].encode(),
        ggml_backend_dev_description=lambda device: b"A processor",
        ggml_backend_dev_memory=memory,
    )
    patch.setattr(graphics, "functions", lambda name: ggml)
    patch.setattr(llama_library(), "llama_supports_gpu_offload", lambda: True)


def test_a_build_for_the_cpu_refuses_and_tells_how_to_build_another() -> None:
    assert graphics.graphics_processors() == ()
    for option in (["--gpu-layers", "auto"], ["--gpu-layers", "2"], ["--device", "vulkan"], ["--device", "CUDA0"]):
        result = run("run", "-m", str(builtin_gguf()), "--backend", "llamacpp", "-p", PROMPT, *option)
        assert result.returncode == DeviceError.exit_code and b"CMAKE_ARGS" in result.stderr


def test_processors_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("Vulkan0", INTEGRATED, 3), ("Vulkan1", DISCRETE, 5), ("MTL0", DISCRETE, 7))
    found = graphics.graphics_processors()
    assert [(each.name, each.free, each.shared) for each in found] == [
        ("Vulkan1", 5, False),
        ("Vulkan0", 3, True),
        ("MTL0", 7, True),
    ]
    asked = ("auto", "vulkan", "Vulkan0", "vulkan1", "metal", "mtl0")
    wanted = ["Vulkan1", "Vulkan1", "Vulkan0", "Vulkan1", "MTL0", "MTL0"]
    assert [graphics.find_processor(name).name for name in asked] == wanted
    with pytest.raises(DeviceError, match="Vulkan1, Vulkan0, MTL0"):
        graphics.find_processor("cuda")


def test_plans_count_memory_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Layers move from the process to the device, the last first; what fits is as many as its free memory holds."""
    path = random_gguf(tmp_path, "llama", num_hidden_layers=5)
    gguf = open_bundle(path).gguf
    plans = []
    for layers in range(7):
        install(monkeypatch, ("Vulkan0", DISCRETE, 8 * GIB))
        plans.append(edgeinfer.plan(path, context=64, gpu_layers=layers, device="Vulkan0"))
    sizes = [sum(tensor.nbytes for tensor in gguf.tensors if f"blk.{layer}." in tensor.name) for layer in range(5)]
    weights = [plan.footprint.device.get("weights", 0) for plan in plans]
    assert [later - one for one, later in itertools.pairwise(weights[1:])] == sizes[::-1]
    embedding = gguf.by_name["token_embd.weight"].nbytes
    assert weights[6] == gguf.tensor_bytes - embedding and plans[0].footprint.device == {}
    kept = [plan.footprint.device.get("kv", 0) for plan in plans]
    assert kept[1] == 0 and kept[6] == plans[0].terms["kv"] and plans[6].terms["kv"] == 0
    mapped = [plan.terms["weights_mapped"] + plan.terms["weights_packed"] for plan in plans]
    assert mapped == sorted(mapped, reverse=True) and mapped[6] <= embedding
    for layers in range(1, 7):
        taken = sum(plans[layers].footprint.device.values())
        install(monkeypatch, ("Vulkan0", DISCRETE, taken * 8 // 7 + 8))
        fitting = edgeinfer.plan(path, context=64, gpu_layers="auto")
        assert fitting.configuration.gpu_layers == layers and fitting.device == "Vulkan0"
    install(monkeypatch, ("Vulkan0", INTEGRATED, 8 * GIB))
    shared = edgeinfer.plan(path, context=64, device="vulkan")
    assert shared.terms["graphics"] == sum(plans[6].footprint.device.values()) and not shared.footprint.device
    install(monkeypatch, ("Vulkan0", DISCRETE, 0))
    with pytest.raises(DeviceError, match="does not tell"):
        edgeinfer.plan(path, context=64, device="vulkan")


def test_texts_are_the_same_with_layers_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("Vulkan0", DISCRETE, 8 * GIB))
    asked: list[tuple[int, int]] = []
    load = LlamaModel._load

    def watched(model: LlamaModel, *args: Any) -> Any:
        asked.append((model._devices[0] or 0, model._gpu_layers))
        return load(model, *args)

    monkeypatch.setattr(LlamaModel, "_load", watched)
    replies = []
    for options in ({}, {"gpu_layers": 2}, {"device": "vulkan", "kv": "q8_0"}, {"kv": "q8_0"}):
        with edgeinfer.load(builtin_gguf(), backend="llamacpp", context=128, **options) as model:
            replies.append(model.generate(PROMPT, max_tokens=24).token_ids)
            device = model.info.device
        assert device == ("Vulkan0" if len(options) and options.keys() != {"kv"} else "cpu")
    assert replies[0] == replies[1] and replies[2] == replies[3]
    assert [(device != 0, layers) for device, layers in asked] == [(False, 0), (True, 2), (True, 7), (False, 0)]


def failing(patch: pytest.MonkeyPatch, lines: str) -> None:
    """Makes llama.cpp log an error of these lines, and load nothing, where layers are to lie on a device."""
    lib = llama_library()
    load = lib.llama_model_load_from_file

    def refused(path: bytes, params: Any) -> Any:
        if not ctypes.c_void_p.from_address(params.devices).value:
            return load(path, params)
        library._remember(4, lines.encode(), None)
        return None

    patch.setattr(lib, "llama_model_load_from_file", refused)


def test_processors_are_listed_behind_the_devices_and_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "llama.cpp" not in {device.provider for device in edgeinfer.list_devices(check=False)}
    install(monkeypatch, ("Vulkan0", DISCRETE, GIB))
    *_, cpu, found = edgeinfer.list_devices()
    assert (cpu.name, found.name) == ("cpu", "Vulkan0")
    assert (found.provider, found.bundles, found.description) == ("llama.cpp", "gguf", "A processor")
    assert found.hardware and found.check == "ok" and not found.traits["custom_ops"]
    failing(monkeypatch, "ErrorOutOfDeviceMemory\nsecond line")
    refused = edgeinfer.list_devices()[-1].check
    assert "Vulkan0" in refused and refused.endswith("ErrorOutOfDeviceMemory.") and "\n" not in refused
    line = run("devices").stdout.decode().splitlines()[-1]
    assert line.startswith("Vulkan0") and "A processor" in line and "GGUF files" in line
    assert edgeinfer.list_devices(check=False)[-1].check == ""


def test_a_processor_that_fails_while_loading_is_one_line_and_the_cpu_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ("Vulkan0", DISCRETE, 8 * GIB))
    failing(monkeypatch, "llama_model_load: error loading model: unable to allocate Vulkan0 buffer\nanother line\n")
    result = run("run", "-m", str(builtin_gguf()), "-p", PROMPT, "-n", "2", "--device", "vulkan")
    assert result.returncode == 0 and result.stdout
    [line] = [line for line in result.stderr.decode().splitlines() if "Vulkan0" in line]
    assert "The device Vulkan0 (llama.cpp) fails" in line and "unable to allocate Vulkan0 buffer. The CPU runs" in line
    assert b"another line" not in result.stderr


@each_row(
    ("options", "says"),
    [
        ({"gpu_layers": "all"}, "must be auto or a whole number"),
        ({"gpu_layers": -1}, "must be auto or a whole number"),
        ({"gpu_layers": True}, "must be auto or a whole number"),
        ({"gpu_layers": 3, "device": "cpu"}, "Leave one of the two options out"),
        ({"device": "vulkan1000"}, "Choose auto or one of"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        LoadOptions(**options)


def test_models_of_other_engines_are_refused() -> None:
    with pytest.raises(UsageError, match="load a GGUF file"):
        edgeinfer.plan(gpu_layers=3)
    with pytest.raises(DeviceError, match="GGUF files alone"):
        edgeinfer.plan(device="Vulkan0")
