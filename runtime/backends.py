"""Which backend runs a bundle: the registry; knows nothing of what the backends do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgeinfer.bundle import NATIVE, Bundle, KVScales, Layout
from edgeinfer.bundle.experts import find_expert
from edgeinfer.bundle.kv_types import FLOAT32, find_kv_type
from edgeinfer.config import LoadConfig
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.runtime.contracts import Backend
from edgeinfer.runtime.experts.watched_backend import WatchedBackend
from edgeinfer.runtime.kv_profile import kv_scales
from edgeinfer.runtime.layouts import Progress, choose_layout, kernel_of
from edgeinfer.runtime.machine import physical_cores
from edgeinfer.runtime.memory import releases_pages
from edgeinfer.runtime.packed_cache import is_packed
from edgeinfer.runtime.planning.configuration import TOKENIZER, Configuration, Subject
from edgeinfer.runtime.text.transient import tokenizer_facts

__all__ = ["BACKENDS", "kernel_name", "make_backend", "run_layout", "subject_of", "thread_count"]

Maker = Callable[[Bundle, Layout, LoadConfig, Configuration, Progress | None], Backend]


@dataclass(frozen=True)
class _Kind:
    """How a backend is made and what it can do.

    Attributes:
        layout: of a bundle's weights that it runs.
        kv_types: kinds of cache that it has for a bundle in a layout.
        weights_modes: of a bundle in a layout, the fastest first.
        kernel: what multiplies, as its own attribute says.
        floats: as `Subject` has it.
    """

    make: Maker
    layout: Callable[[Bundle, LoadConfig], Layout]
    kv_types: Callable[[Bundle, Layout], tuple[str, ...]]
    weights_modes: Callable[[Bundle, Layout], tuple[str, ...]]
    kernel: Callable[[Bundle, Layout], str]
    floats: bool = False


def _onnx(
    bundle: Bundle, layout: Layout, config: LoadConfig, configuration: Configuration, progress: Progress | None
) -> Backend:
    from edgeinfer.runtime.experts.resident_backend import ResidentBackend
    from edgeinfer.runtime.onnx_backend import OnnxBackend
    from edgeinfer.runtime.streamed_backend import StreamedBackend

    backend = OnnxBackend(
        bundle,
        configuration.context,
        threads=thread_count(config),
        exact=config.exact,
        layout=layout,
        kv=configuration.kv,
        kv_scales=_scales(bundle, configuration),
        weights="packed" if configuration.weights == "packed" else "mapped",
        progress=progress,
    )
    decoder = bundle.manifest.decoder
    if decoder is not None and configuration.expert_bytes:
        resident = ResidentBackend(backend, decoder, configuration.expert_bytes)
        return WatchedBackend(resident, decoder, resident.residency)
    if configuration.window_layers:
        return _watched(bundle, StreamedBackend(backend, configuration.window_layers))
    return _watched(bundle, backend)


def _onnx_optimum(
    bundle: Bundle, layout: Layout, config: LoadConfig, configuration: Configuration, progress: Progress | None
) -> Backend:
    from edgeinfer.runtime.concat_backend import ConcatBackend

    return ConcatBackend(bundle, configuration.context, threads=thread_count(config))


def _reference(
    bundle: Bundle, layout: Layout, config: LoadConfig, configuration: Configuration, progress: Progress | None
) -> Backend:
    from edgeinfer.runtime.reference import ReferenceBackend

    backend = ReferenceBackend(
        bundle, configuration.context, kv=configuration.kv, kv_scales=_scales(bundle, configuration)
    )
    return _watched(bundle, backend)


def _watched(bundle: Bundle, backend: Backend) -> Backend:
    """With its experts counted, where it has any."""
    decoder = bundle.manifest.decoder
    return backend if decoder is None or decoder.moe is None else WatchedBackend(backend, decoder)


def _scales(bundle: Bundle, configuration: Configuration) -> KVScales | None:
    return kv_scales(bundle) if find_kv_type(configuration.kv).quantized else None


def _stored(bundle: Bundle, config: LoadConfig) -> Layout:
    return bundle.manifest.layout


def _with_scales(bundle: Bundle, layout: Layout) -> tuple[str, ...]:
    kinds = bundle.kv_types(layout)
    return kinds if len(kinds) == 1 or kv_scales(bundle) is not None else (FLOAT32,)


def _floats(bundle: Bundle, layout: Layout) -> tuple[str, ...]:
    return (FLOAT32,)


def _packed(bundle: Bundle, layout: Layout) -> tuple[str, ...]:
    return ("packed",)


def _onnx_weights(bundle: Bundle, layout: Layout) -> tuple[str, ...]:
    modes = ("mapped",) if layout == NATIVE else ("packed", "mapped")
    if not releases_pages():
        return modes
    # In the other layout the experts of a layer are one matrix, and onnxruntime packs it.
    apart = layout == NATIVE and any(find_expert(t.name) and t.bits < 32 for t in bundle.manifest.tensors)
    return (*modes, "experts", "streamed") if apart else (*modes, "streamed")


BACKENDS: dict[str, _Kind] = {
    "onnx": _Kind(
        _onnx,
        lambda bundle, config: choose_layout(bundle, config.native),
        _with_scales,
        _onnx_weights,
        kernel_of,
    ),
    "onnx-optimum": _Kind(_onnx_optimum, _stored, _floats, _packed, lambda bundle, layout: "onnxruntime"),
    "reference": _Kind(_reference, _stored, _with_scales, _packed, lambda bundle, layout: "numpy", True),
}


def thread_count(config: LoadConfig) -> int:
    """Threads of the linear algebra."""
    return config.threads or physical_cores()


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


def subject_of(
    bundle: Bundle, layout: Layout, config: LoadConfig, drafter: tuple[Bundle, Layout] | None = None
) -> Subject:
    """What a plan of this bundle has to choose from.

    Args:
        drafter: a small model that drafts, and the layout of its weights.

    Raises:
        UsageError, BundleError: as `make_backend`.
    """
    kind = _kind(bundle, config)
    tokenizer = tokenizer_facts(bundle.path / TOKENIZER)
    return Subject(
        bundle,
        layout,
        drafter,
        kv_types=kind.kv_types(bundle, layout),
        weights_modes=kind.weights_modes(bundle, layout),
        transient_tokenizer=tokenizer.can_rest,
        merge_pairs=tokenizer.merge_pairs,
        packed_ready=layout != NATIVE and is_packed(bundle),
        threads=thread_count(config),
        floats=kind.floats,
    )


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
        progress: called while weights are converted to the layout that runs.

    Raises:
        UsageError: no backend has the name asked for.
        BundleError: the bundle needs a backend that this edgeinfer lacks, or cannot be run by the one asked for.
    """
    return _kind(bundle, config).make(bundle, layout, config, configuration, progress)


def _kind(bundle: Bundle, config: LoadConfig) -> _Kind:
    name = config.backend or bundle.manifest.backend
    if name in BACKENDS:
        return BACKENDS[name]
    if config.backend:
        raise UsageError(f"There is no backend {name!r}.", f"Choose one of {', '.join(BACKENDS)}.")
    raise BundleError(f"The bundle needs the backend {name!r}.", "Update edgeinfer, or export the model again.")
