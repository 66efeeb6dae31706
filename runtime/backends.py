"""Which backend runs a bundle: the registry; knows nothing of what the backends do."""

from __future__ import annotations

from edgeinfer.bundle import Bundle, Layout
from edgeinfer.config import LoadConfig
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.kinds.contract import BackendKind, Order, thread_count
from edgeinfer.runtime.kinds.llamacpp import LlamaCppKind
from edgeinfer.runtime.kinds.onnx import OnnxKind, OptimumKind
from edgeinfer.runtime.kinds.reference import ReferenceKind
from edgeinfer.runtime.layouts import Progress
from edgeinfer.runtime.planning.configuration import Configuration
from edgeinfer.runtime.planning.subject import Subject
from edgeinfer.runtime.text.contracts import TokenizerLike

__all__ = ["BACKENDS", "engine_version", "kernel_name", "make_backend", "own_tokenizer", "run_layout", "subject_of"]

BACKENDS: dict[str, BackendKind] = {
    "onnx": OnnxKind(),
    "onnx-optimum": OptimumKind(),
    "llamacpp": LlamaCppKind(),
    "reference": ReferenceKind(),
}


def run_layout(bundle: Bundle, config: LoadConfig) -> Layout:
    """The layout of the bundle's weights that its backend will run on this machine.

    Raises:
        UsageError, BundleError: as `make_backend`.
        NativeUnavailableError: the native kernel is asked for and not there.
    """
    return _kind(bundle, config).layout(bundle, config)


def kernel_name(bundle: Bundle, layout: Layout, config: LoadConfig) -> str:
    """What will multiply, as `Backend.kernel` will say; errors as `run_layout`."""
    return _kind(bundle, config).kernel(bundle, layout)


def engine_version(bundle: Bundle, config: LoadConfig) -> str:
    """Name and version of what runs the model; errors as `run_layout`."""
    return _kind(bundle, config).engine()


def subject_of(bundle: Bundle, layout: Layout, config: LoadConfig, drafter: Subject | None = None) -> Subject:
    """What a plan of this bundle has to choose from.

    Args:
        drafter: a small model that drafts.

    Raises:
        UsageError, BundleError: as `make_backend`.
    """
    kind = _kind(bundle, config)
    return Subject(
        config.backend or bundle.manifest.backend,
        bundle,
        layout,
        drafter,
        kv_types=kind.kv_types(bundle, layout),
        weights_modes=kind.weights_modes(bundle, layout),
        tokenizers=kind.tokenizers(bundle),
        threads=thread_count(config),
        memory=kind.memory(bundle, layout),
        modes_differ=kind.modes_differ,
        loads_experts=kind.loads_experts,
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
) -> Backend:
    """The backend asked for, else the bundle's own.

    Args:
        layout: of the weights, as `run_layout` says.
        configuration: as planned.
        progress: called while weights are converted to the layout that runs, or loaded.

    Raises:
        UsageError: no backend has the name asked for.
        BundleError: the bundle needs a backend that this edgeinfer lacks, or cannot be run by the one asked for.
    """
    return _kind(bundle, config).make(Order(bundle, layout, config, configuration, progress))


def _kind(bundle: Bundle, config: LoadConfig) -> BackendKind:
    name = config.backend or bundle.manifest.backend
    if name in BACKENDS:
        return BACKENDS[name]
    if config.backend:
        raise UsageError(f"There is no backend {name!r}.", f"Choose one of {', '.join(BACKENDS)}.")
    raise BundleError(f"The bundle needs the backend {name!r}.", "Update edgeinfer, or export the model again.")
