"""Options by which a model is loaded for a device, and for certain replies."""

from __future__ import annotations

import dataclasses
import re
from typing import Self

from edgeinfer.errors import Setting, UsageError
from edgeinfer.options import LARGEST_COUNT, Range, option, require, suggestion
from edgeinfer.records import dataclass

# Where models run; runtime/devices has them, a test holds the two equal.
DEVICES = (
    "cpu", "cuda", "directml", "webgpu", "qnn", "coreml", "openvino", "openvino:NPU", "openvino:GPU", "openvino:CPU",
    "xnnpack",
)  # fmt: skip
# llama.cpp's names of graphics processors, such as Vulkan0, and the interfaces alone, which mean their first one.
_GRAPHICS = re.compile(r"(?:cuda|rocm|vulkan|metal|mtl|sycl)\d{0,3}", re.IGNORECASE)
AUTO = "auto"


def is_graphics(name: str) -> bool:
    """Whether a device is a graphics processor as llama.cpp names them, such as Vulkan0 or cuda."""
    return _GRAPHICS.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """Where a model runs."""

    # Where a device fails, the CPU runs the model.
    device: str = option(
        AUTO,
        help="device to run on: auto, or one listed by `edgeinfer devices`, such as openvino:NPU, or Vulkan0 for GGUF "
        "models (default: auto)",
        cli="--device",
        metavar="NAME",
        group="resources",
    )
    # None is "auto" where the device is a graphics processor, else 0.
    gpu_layers: int | str | None = option(
        None,
        help="layers of a GGUF model to run on a graphics processor, the last first: a number, or auto for as many as "
        "fit into its memory (default: none, or auto with --device)",
        cli="--gpu-layers",
        metavar="N|auto",
        group="resources",
    )

    def check_device(self) -> None:
        """Refuses devices that do not exist and numbers of layers that are none, and makes the number one.

        Raises:
            UsageError: an option has such a value, or they contradict each other.
        """
        if self.device not in (AUTO, *DEVICES) and not is_graphics(self.device):
            hint = f"{suggestion(self.device, DEVICES)}Choose auto or one of {', '.join(DEVICES)}."
            raise UsageError(f"There is no device {self.device!r}.", hint)
        layers = self.gpu_layers
        if isinstance(layers, str) and layers.isascii() and layers.isdigit():
            layers = int(layers[:10])
        counted = Range(0, LARGEST_COUNT, whole=True, optional=True)
        allowed = layers == AUTO or counted.holds(layers)
        require(allowed, "gpu_layers", self.gpu_layers, f"auto or {counted}")
        object.__setattr__(self, "gpu_layers", layers)
        if self.device == "cpu" and layers not in (None, 0):
            message = "No layers can run on a graphics processor with " + Setting("device", "cpu") + "."
            raise UsageError(message, "Leave one of the two options out.")

    @property
    def wants_graphics(self) -> bool:
        """Whether a graphics processor is asked for: by its name, or for some layers."""
        return self.gpu_layers not in (None, 0) or is_graphics(self.device)

    def on_device(self, device: str) -> Self:
        """The same on another device; on the CPU all layers run there."""
        return dataclasses.replace(self, device=device, gpu_layers=None if device == "cpu" else self.gpu_layers)

    def refuse_gpu_layers(self, engine: str) -> None:
        """Refuses layers on a graphics processor where what runs the model divides none.

        Raises:
            UsageError: some are asked for.
        """
        if self.gpu_layers not in (None, 0):
            message = f"{engine} runs this model, which does not divide it between processors."
            raise UsageError(message, "Leave " + Setting("gpu_layers") + " out, or load a GGUF file.")


@dataclass(frozen=True, kw_only=True)
class LoadReplies:
    """Which replies there is memory and time for."""

    # How many there are, batches and servers say; for these there is memory.
    parallel: int = option(
        1,
        help="number of replies side by side to plan memory for (default: 1)",
        low=1,
        high=1024,
        metavar="N",
        cli="--parallel",
        group="resources",
    )
    # Without it memory is planned for them when the first is asked for, and what was loaded by then stays as it is.
    structured: bool = option(
        False,
        help="plan memory for replies by a schema, an expression or a grammar from the start (default: when the first "
        "is asked for)",
        cli="--structured",
        group="resources",
    )
    # As Sarathi-Serve's bound on the time between tokens; by default a multiple of what passes take here.
    inter_token_latency: float | None = option(
        None,
        help="milliseconds between tokens of replies while the prompt of another is evaluated beside them (default: "
        "twice as many as without it)",
        low=0,
        high=4_000_000,
        above=True,
        metavar="MS",
    )
