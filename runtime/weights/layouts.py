"""The layout of a bundle's weights that runs here, and where it lies: converted once if it is not the stored one. A
converted file is kept in the user's cache, named by what it was made of, so that it serves every bundle with the same
weights and is never taken for another."""

from __future__ import annotations

import functools
import logging
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import field
from pathlib import Path

from edgeinfer.bundle.conversion import convert_weights, is_converted
from edgeinfer.bundle.layouts import (
    LAYOUT_VERSIONS,
    NATIVE,
    PORTABLE,
    STATIC,
    WEIGHTS,
    Layout,
    model_name,
    weights_name,
)
from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.core.errors import BundleError, NativeUnavailableError, StorageError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import user_cache
from edgeinfer.runtime.native.library import native_kernel, switched_off
from edgeinfer.runtime.system.forks import finalize_here
from edgeinfer.runtime.weights.verification import FileCheck, VerifiedFiles, accept_file, check_file

Progress = Callable[[str, int, int], None]

_log = logging.getLogger("edgeinfer")


@dataclass(frozen=True)
class RunnableGraph:
    """A graph and the weights that it reads."""

    layout: Layout
    model: Path
    weights: Path
    folder: Path | None = None  # a folder that only this process uses; None where nothing has to be removed
    _remove: Callable[[], object] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.folder is not None:
            finalizer = finalize_here(self, functools.partial(shutil.rmtree, self.folder, ignore_errors=True))
            object.__setattr__(self, "_remove", finalizer)

    def close(self) -> None:
        """Remove files made for this process alone; otherwise they are removed when it ends."""
        if self._remove is not None:
            self._remove()


def choose_layout(bundle: Bundle, native: bool | None, kv: str | None = None) -> Layout:
    """The layout that will run: the stored one where it can. With `native` None the native kernel is used where it
    works and the bundle stores its layout, or has the wanted cache in it alone."""
    stored = bundle.manifest.layout
    if stored == STATIC:
        message = f"{bundle.path} has static graphs, which only their own backend runs."
        raise BundleError(message, "Leave the backend out, or export the model without --static.")
    if native:
        if NATIVE not in bundle.layouts:
            message = f"{bundle.path} has no graph for the native kernel."
            raise UsageError(message, "Load it without native, or export it again.")
        native_kernel()
        return NATIVE
    # The native graph alone may have a type of cache.
    needed = NATIVE in bundle.layouts and kv in bundle.kv_types(NATIVE) and kv not in bundle.kv_types(PORTABLE)
    if native is None and (stored == NATIVE or needed) and runs_native():
        return NATIVE
    if PORTABLE not in bundle.layouts:
        hint = "Export it again, or run it where the native kernel works."
        raise BundleError(f"{bundle.path} has no graph for the portable layout.", hint)
    return PORTABLE


def kernel_of(bundle: Bundle, layout: Layout) -> str:
    """What multiplies matrices in a layout: an instruction set of the native kernel, else the operator."""
    if not bundle.quantized:
        return "MatMul"
    return native_kernel().isa if layout == NATIVE else "MatMulNBits"


def runs_native() -> bool:
    """Whether the native kernel works and is not switched off; why it does not is logged once."""
    if switched_off():
        return False
    try:
        native_kernel()
    except NativeUnavailableError as error:
        _warn(str(error))
        return False
    return True


@functools.cache
def _warn(text: str) -> None:
    """Once a process: a model, its drafter and every plan ask."""
    _log.warning("%s", text)


def prepare(bundle: Bundle, layout: Layout, progress: Progress | None = None) -> RunnableGraph:
    """The graph of a layout with its weights, which are converted if they are not there yet."""
    model, weights = bundle.model_file(layout), bundle.weights_file(layout)
    if layout == bundle.manifest.layout or not bundle.quantized or _is_sound(bundle, layout, weights):
        return RunnableGraph(layout, model, weights)
    try:
        folder = _cache_folder(bundle, layout)
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return _convert(bundle, layout, folder, progress)
    except StorageError as error:
        _log.warning("%s The weights are converted for this run only.", error.message)
    with storage_errors(Path(tempfile.gettempdir())):
        temporary = Path(tempfile.mkdtemp(prefix="edgeinfer-"))
    try:
        graph = _convert(bundle, layout, temporary, progress)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return RunnableGraph(layout, graph.model, graph.weights, temporary)


def weights_place(bundle: Bundle, layout: Layout) -> Path:
    """Where `prepare` has the weights of a layout lie, which need not be there yet."""
    weights = bundle.weights_file(layout)
    if layout == bundle.manifest.layout or not bundle.quantized or is_converted(bundle, layout, weights):
        return weights
    try:
        return _cache_folder(bundle, layout) / weights_name(bundle.manifest.layout, layout)
    except (StorageError, KeyError):  # there is no place, or nothing to convert
        return weights


def _is_sound(bundle: Bundle, layout: Layout, weights: Path) -> bool:
    """Whether converted weights exist and have not changed since they were made."""
    if not is_converted(bundle, layout, weights):
        return False
    try:
        check_file(_as_made(weights), VerifiedFiles())
    except BundleError:
        _log.warning("%s is damaged and is made again.", weights)
        return False
    return True


def _as_made(weights: Path) -> FileCheck:
    return FileCheck(weights, weights.name, weights.stat().st_size, None, plain=True)


def _convert(bundle: Bundle, layout: Layout, folder: Path, progress: Progress | None) -> RunnableGraph:
    """Puts weights and graph into the folder, unless they are there."""
    stored = bundle.manifest.layout
    model, weights = folder / model_name(stored, layout), folder / weights_name(stored, layout)
    if not _is_sound(bundle, layout, weights):
        _log.info("Converting the weights of %s to the %s layout, once: %s", bundle.manifest.name, layout, weights)
        convert_weights(bundle, layout, weights, progress)
        accept_file(_as_made(weights), VerifiedFiles())
    # The graph must lie next to its weights. It is small, and another export of the same weights may have another.
    graph = bundle.model_file(layout).read_bytes()
    if not model.is_file() or model.read_bytes() != graph:
        write_file(model, graph)
    return RunnableGraph(layout, model, weights)


def _cache_folder(bundle: Bundle, layout: Layout) -> Path:
    digest = bundle.manifest.files[WEIGHTS].sha256
    return user_cache() / "edgeinfer" / "weights" / f"{digest}-{layout}-v{LAYOUT_VERSIONS[layout]}"
