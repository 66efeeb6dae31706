"""Which backend runs a bundle: the registry; knows nothing of what the backends do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import psutil

from edgeinfer.bundle import Bundle, Layout
from edgeinfer.config import LoadConfig
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.layouts import Progress, choose_layout
from edgeinfer.runtime.plan import MemoryPlan

__all__ = ["BACKENDS", "make_backend", "run_layout", "thread_count"]

Maker = Callable[[Bundle, LoadConfig, MemoryPlan, Progress | None], Backend]


@dataclass(frozen=True)
class _Kind:
    """How a backend is made, and which layout of a bundle's weights it runs."""

    make: Maker
    layout: Callable[[Bundle, LoadConfig], Layout]


def _onnx(bundle: Bundle, config: LoadConfig, plan: MemoryPlan, progress: Progress | None) -> Backend:
    from edgeinfer.runtime.onnx_backend import OnnxBackend

    return OnnxBackend(
        bundle, plan.context, threads=thread_count(config), exact=config.exact, layout=plan.layout, progress=progress
    )


def _onnx_optimum(bundle: Bundle, config: LoadConfig, plan: MemoryPlan, progress: Progress | None) -> Backend:
    from edgeinfer.runtime.concat_backend import ConcatBackend

    return ConcatBackend(bundle, plan.context, threads=thread_count(config))


def _reference(bundle: Bundle, config: LoadConfig, plan: MemoryPlan, progress: Progress | None) -> Backend:
    from edgeinfer.runtime.reference import ReferenceBackend

    return ReferenceBackend(bundle, plan.context)


def _stored(bundle: Bundle, config: LoadConfig) -> Layout:
    return bundle.manifest.layout


BACKENDS: dict[str, _Kind] = {
    "onnx": _Kind(_onnx, lambda bundle, config: choose_layout(bundle, config.native)),
    "onnx-optimum": _Kind(_onnx_optimum, _stored),
    "reference": _Kind(_reference, _stored),
}


def thread_count(config: LoadConfig) -> int:
    """Threads of the linear algebra."""
    return config.threads or psutil.cpu_count(logical=False) or 1


def run_layout(bundle: Bundle, config: LoadConfig) -> Layout:
    """The layout of the bundle's weights that its backend will run on this machine.

    Raises:
        UsageError, BundleError: as `make_backend`.
        NativeUnavailableError: the native kernel is asked for and not there.
    """
    return _kind(bundle, config).layout(bundle, config)


def make_backend(bundle: Bundle, config: LoadConfig, plan: MemoryPlan, progress: Progress | None = None) -> Backend:
    """The backend asked for, else the bundle's own.

    Args:
        progress: called while weights are converted to the layout that runs.

    Raises:
        UsageError: no backend has the name asked for.
        BundleError: the bundle needs a backend that this edgeinfer lacks, or cannot be run by the one asked for.
    """
    return _kind(bundle, config).make(bundle, config, plan, progress)


def _kind(bundle: Bundle, config: LoadConfig) -> _Kind:
    name = config.backend or bundle.manifest.backend
    if name in BACKENDS:
        return BACKENDS[name]
    if config.backend:
        raise UsageError(f"There is no backend {name!r}.", f"Choose one of {', '.join(BACKENDS)}.")
    raise BundleError(f"The bundle needs the backend {name!r}.", "Update edgeinfer, or export the model again.")
