"""Which backend runs a bundle: the registry; knows nothing of what the backends do."""

from __future__ import annotations

from edgeinfer.bundle import Bundle, Layout
from edgeinfer.config import LoadConfig
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendKind, Order, thread_count
from edgeinfer.runtime.backends.llamacpp.factory import LlamaCppKind
from edgeinfer.runtime.backends.onnx.factory import OnnxKind, OptimumKind
from edgeinfer.runtime.backends.reference.factory import ReferenceKind
from edgeinfer.runtime.backends.static.factory import StaticKind
from edgeinfer.runtime.devices.contract import Device
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.planning.plan_input import PlanInput, kv_types_on, memory_on, weights_modes_on
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.weights.layouts import Progress

__all__ = [
    "BACKENDS",
    "device_of",
    "engine_version",
    "kernel_name",
    "make_backend",
    "own_tokenizer",
    "run_layout",
    "subject_of",
    "tunable",
]

BACKENDS: dict[str, BackendKind] = {
    "onnx": OnnxKind(),
    "onnx-static": StaticKind(),
    "onnx-optimum": OptimumKind(),
    "llamacpp": LlamaCppKind(),
    "reference": ReferenceKind(),
}


def run_layout(bundle: Bundle, config: LoadConfig) -> Layout:
    """The layout of the bundle's weights that its backend will run on this machine.

    Raises:
        UsageError, BundleError: as `make_backend`.
        DeviceError: as `device_of`.
        NativeUnavailableError: the native kernel is asked for and not there.
    """
    return _kind(bundle, config).layout(bundle, config)


def kernel_name(bundle: Bundle, layout: Layout, config: LoadConfig) -> str:
    """What will multiply, as `Backend.kernel` will say; errors as `run_layout`."""
    return _kind(bundle, config).kernel(bundle, layout)


def engine_version(bundle: Bundle, config: LoadConfig) -> str:
    """Name and version of what runs the model, and on which device if not the CPU; errors as `run_layout`."""
    kind = _kind(bundle, config)
    device = kind.device(config)
    return kind.engine() if device.on_cpu else f"{kind.engine()} on {device.name}"


def device_of(bundle: Bundle, config: LoadConfig) -> Device:
    """The device that the model will run on.

    Raises:
        UsageError: there is no device of the name asked for, or it cannot run the model as asked.
        DeviceError: it is not installed, or does not run such a bundle.
    """
    return _kind(bundle, config).device(config)


def tunable(bundle: Bundle, config: LoadConfig) -> tuple[str, ...]:
    """Names of the tuned settings that change how fast a bundle's backend is; errors as `run_layout`."""
    return _kind(bundle, config).tunes


def subject_of(
    bundle: Bundle,
    layout: Layout,
    config: LoadConfig,
    drafter: PlanInput | None = None,
    settings: TunedSettings = UNTUNED,
) -> PlanInput:
    """What a plan of this bundle has to choose from.

    Args:
        drafter: a small model that drafts.
        settings: that were tuned, and hold beside what the caller set.

    Raises:
        UsageError, BundleError: as `make_backend`.
    """
    kind = _kind(bundle, config)
    device = kind.device(config)
    return PlanInput(
        config.backend or bundle.manifest.backend,
        bundle,
        layout,
        drafter,
        kv_types=kv_types_on(device, kind.kv_types(bundle, layout)),
        weights_modes=weights_modes_on(device, kind.weights_modes(bundle, layout)),
        tokenizers=kind.tokenizers(bundle),
        threads=thread_count(config, settings),
        memory=memory_on(device, kind.memory(bundle, layout, config), cache=kind.graphs == "ordinary"),
        modes_differ=kind.modes_differ,
        loads_experts=kind.loads_experts,
        settings=settings,
        device=device,
    )


def own_tokenizer(bundle: Bundle, config: LoadConfig, backend: Backend) -> TokenizerLike:
    """The tokenizer of a model's own file, for configurations whose tokenizer is "model"."""
    return _kind(bundle, config).tokenizer(backend)


def make_backend(
    bundle: Bundle,
    layout: Layout,
    config: LoadConfig,
    configuration: Configuration,
    progress: Progress | None = None,
    settings: TunedSettings = UNTUNED,
) -> Backend:
    """The backend asked for, else the bundle's own.

    Args:
        layout: of the weights, as `run_layout` says.
        configuration: as planned.
        progress: called while weights are converted to the layout that runs, or loaded.
        settings: that were tuned, and hold beside what the caller set.

    Raises:
        UsageError: no backend has the name asked for.
        BundleError: the bundle needs a backend that this edgeinfer lacks, or cannot be run by the one asked for.
        DeviceError: the device fails.
    """
    kind = _kind(bundle, config)
    device = kind.device(config)
    return kind.make(Order(bundle, layout, config, configuration, progress, device, settings))


def _kind(bundle: Bundle, config: LoadConfig) -> BackendKind:
    name = config.backend or bundle.manifest.backend
    if name in BACKENDS:
        return BACKENDS[name]
    if config.backend:
        raise UsageError(f"There is no backend {name!r}.", f"Choose one of {', '.join(BACKENDS)}.")
    raise BundleError(f"The bundle needs the backend {name!r}.", "Update edgeinfer, or export the model again.")
