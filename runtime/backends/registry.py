"""The choice of a bundle's backend: made once for a load, with its device and the layout of the weights."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError, UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.factory import BackendFactory, BackendOrder
from edgeinfer.runtime.planning.facts import BundleFacts, Configuration
from edgeinfer.runtime.profile.kept import with_measured_policy
from edgeinfer.runtime.text.contract import TokenizerLike
from edgeinfer.runtime.weights.layouts import Progress

_BACKENDS = "edgeinfer.runtime.backends"
# Modules and classes of the factories, imported when one is needed: a model is run by one of them.
FACTORIES = {
    "onnx": (f"{_BACKENDS}.onnx.factory", "OnnxFactory"),
    "onnx-encoder": (f"{_BACKENDS}.onnx.encoder", "EncoderFactory"),
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


def facts_of(bundle: Bundle, config: LoadOptions) -> BundleFacts:
    """Choose the backend of a bundle, the requested one or its own, and ask it about the bundle."""
    name = config.backend or bundle.manifest.backend
    if name not in FACTORIES:
        if config.backend:
            raise UsageError(f"There is no backend {name!r}.", f"Choose one of {', '.join(FACTORIES)}.")
        raise BundleError(f"The bundle needs the backend {name!r}.", "Update edgeinfer, or export the model again.")
    return factory_of(name).facts(name, bundle, config)


def own_tokenizer(facts: BundleFacts, backend: Backend) -> TokenizerLike:
    """The tokenizer of a model's own file, for configurations whose tokenizer is "model"."""
    return factory_of(facts.backend).tokenizer(backend)


def make_backend(
    facts: BundleFacts,
    config: LoadOptions,
    configuration: Configuration,
    progress: Progress | None = None,
    room: int | None = None,
) -> Backend:
    factory = factory_of(facts.backend)
    if not factory.adapts:
        config.refuse_adapters(factory.engine())
    config = with_measured_policy(config, facts.bundle, facts.backend)
    return factory.make(BackendOrder(facts, config, configuration, progress, room))
