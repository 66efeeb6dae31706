"""The choice of a bundle's backend: made once for a load, with its device and the layout of the weights."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.options.load import LoadConfig
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder, thread_count
from edgeinfer.runtime.planning.plan_input import BackendChoice, Configuration, PlanInput, memory_on, weights_modes_on
from edgeinfer.runtime.profile.kept import with_measured_policy
from edgeinfer.runtime.profile.settings import UNTUNED, TunedSettings
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.weights.layouts import Progress

_BACKENDS = "edgeinfer.runtime.backends"
# Modules and classes of the factories, imported when one is needed: a model is run by one of them.
FACTORIES = {
    "onnx": (f"{_BACKENDS}.onnx.factory", "OnnxFactory"),
    "onnx-static": (f"{_BACKENDS}.static.factory", "StaticFactory"),
    "onnx-optimum": (f"{_BACKENDS}.onnx.factory", "OptimumFactory"),
    "llamacpp": (f"{_BACKENDS}.llamacpp.factory", "LlamaCppFactory"),
    "reference": (f"{_BACKENDS}.reference.backend", "ReferenceFactory"),
}


@cache
def factory_of(name: str) -> BackendFactory:
    """The factory of a backend."""
    module, made = FACTORIES[name]
    factory: BackendFactory = getattr(import_module(module), made)()
    return factory


def choose_backend(bundle: Bundle, config: LoadConfig) -> BackendChoice:
    """Choose the backend of a bundle, the requested one or its own, its device and the layout of the weights."""
    name = config.backend or bundle.manifest.backend
    if name not in FACTORIES:
        if config.backend:
            raise UsageError(f"There is no backend {name!r}.", f"Choose one of {', '.join(FACTORIES)}.")
        raise BundleError(f"The bundle needs the backend {name!r}.", "Update edgeinfer, or export the model again.")
    factory = factory_of(name)
    device = factory.device(config)
    return BackendChoice(name, bundle, factory.layout(bundle, config, device), device)


def kernel_name(choice: BackendChoice) -> str:
    return factory_of(choice.name).kernel(choice.bundle, choice.layout)


def engine_version(choice: BackendChoice) -> str:
    """Name and version of what runs the model, and on which device if not the CPU."""
    engine = factory_of(choice.name).engine()
    return engine if choice.device.on_cpu else f"{engine} on {choice.device.name}"


def tunable(choice: BackendChoice) -> tuple[str, ...]:
    """Names of the tuned settings that change how fast a backend is."""
    return factory_of(choice.name).tunes


def plan_input_of(
    choice: BackendChoice, config: LoadConfig, drafter: PlanInput | None = None, settings: TunedSettings = UNTUNED
) -> PlanInput:
    """The choices that a plan of a bundle has."""
    factory, bundle, layout, device = factory_of(choice.name), choice.bundle, choice.layout, choice.device
    return PlanInput(
        choice.name,
        bundle,
        layout,
        drafter,
        kv_types=factory.kv_types(bundle, layout),
        weights_modes=weights_modes_on(device, factory.weights_modes(bundle, layout)),
        tokenizer=factory.tokenizer_mode(bundle),
        threads=thread_count(config, settings),
        memory=memory_on(device, factory.memory(choice, config), cache=factory.graphs == "ordinary"),
        modes_differ=factory.modes_differ,
        loads_experts=factory.loads_experts,
        most_drafted=factory.most_drafted(bundle),
        head_apart=factory.head_apart(bundle, layout),
        settings=settings,
        device=device,
        offload=factory.offload(choice, config),
        weights_place=factory.weights_place(bundle, layout),
    )


def own_tokenizer(choice: BackendChoice, backend: Backend) -> TokenizerLike:
    """The tokenizer of a model's own file, for configurations whose tokenizer is "model"."""
    return factory_of(choice.name).tokenizer(backend)


def make_backend(
    choice: BackendChoice,
    config: LoadConfig,
    configuration: Configuration,
    progress: Progress | None = None,
    settings: TunedSettings = UNTUNED,
    room: int | None = None,
) -> Backend:
    factory = factory_of(choice.name)
    if not factory.adapts:
        config.refuse_adapters(factory.engine())
    config = with_measured_policy(config, choice.bundle)
    order = BackendOrder(choice.bundle, choice.layout, config, configuration, progress, choice.device, settings, room)
    return factory.make(order)
