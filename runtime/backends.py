"""Which backend runs a bundle: the registry; knows nothing of what the backends do."""

from __future__ import annotations

from collections.abc import Callable

import psutil

from edgeinfer.bundle import Bundle
from edgeinfer.config import LoadConfig
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.plan import MemoryPlan

__all__ = ["BACKENDS", "make_backend"]

Maker = Callable[[Bundle, LoadConfig, MemoryPlan], Backend]


def _onnx(bundle: Bundle, config: LoadConfig, plan: MemoryPlan) -> Backend:
    from edgeinfer.runtime.onnx_backend import OnnxBackend

    return OnnxBackend(bundle, plan.context, threads=_threads(config), exact=config.exact)


def _onnx_optimum(bundle: Bundle, config: LoadConfig, plan: MemoryPlan) -> Backend:
    from edgeinfer.runtime.concat_backend import ConcatBackend

    return ConcatBackend(bundle, plan.context, threads=_threads(config))


def _reference(bundle: Bundle, config: LoadConfig, plan: MemoryPlan) -> Backend:
    from edgeinfer.runtime.reference import ReferenceBackend

    return ReferenceBackend(bundle, plan.context)


BACKENDS: dict[str, Maker] = {"onnx": _onnx, "onnx-optimum": _onnx_optimum, "reference": _reference}


def _threads(config: LoadConfig) -> int:
    return config.threads or psutil.cpu_count(logical=False) or 1


def make_backend(bundle: Bundle, config: LoadConfig, plan: MemoryPlan) -> Backend:
    """The backend asked for, else the bundle's own.

    Raises:
        UsageError: no backend has the name asked for.
        BundleError: the bundle needs a backend that this edgeinfer lacks, or cannot be run by the one asked for.
    """
    name = config.backend or bundle.manifest.backend
    if name in BACKENDS:
        return BACKENDS[name](bundle, config, plan)
    if config.backend:
        raise UsageError(f"There is no backend {name!r}.", f"Choose one of {', '.join(BACKENDS)}.")
    raise BundleError(f"The bundle needs the backend {name!r}.", "Update edgeinfer, or export the model again.")
