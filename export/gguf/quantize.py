"""llama.cpp's own quantizer on GGUF files: types, importance, layers left out.

llama.cpp ends the process on some requests, so that everything is checked before it is asked.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.bundle.gguf.library import listening, llama_library
from edgeinfer.bundle.gguf.metadata import ggml_type
from edgeinfer.bundle.gguf.reader import GgufFile, GgufTensor, read_gguf
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.core.errors import BackendError, BundleError, EdgeInferError, StorageError, UsageError
from edgeinfer.core.results import Progress
from edgeinfer.export.gguf.pruning import check_prunable, is_pruned, renumbered
from edgeinfer.export.options import COPY, PACKED_KIND, FileType, find_file_type, find_tensor_type, needs_importance

Floats = npt.NDArray[np.float32]

_ALIGNMENT = 32
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_STEP = re.compile(r"\[\s*(\d+)/\s*(\d+)\]\s+(\S+)")
# Rows of a tensor that llama.cpp has in memory at a time.
_BUFFER_BYTES = 256 << 20
_POLL_SECONDS = 0.1
# What llama.cpp logs before its reason.
_FAILURE = "failed to quantize: "


def quantize_gguf(
    source: Path,
    target: Path,
    kind: str,
    *,
    importance: Mapping[str, Floats] | None = None,
    tensor_types: Mapping[str, str] | None = None,
    prune_layers: Sequence[int] = (),
    requantize: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes a GGUF file again in one of llama.cpp's types, as its command line would, completely or not at all.

    Rows that a type's blocks do not divide fall back to another type, by llama.cpp's rules.

    Args:
        kind: of FILE_TYPES, or "COPY", which keeps every tensor's type.
        importance: mean squared input of every column, by names of tensors: (K,), or (E * K,) of experts.
        threads: None for as many as there are processors for this process.
        progress: called with a tensor's name, the number of finished tensors and their total.
    """
    file_type = COPY if kind.upper() == COPY.name else find_file_type(kind)
    file = read_gguf(source)
    layers = tuple(sorted(set(prune_layers)))
    check_prunable(file, layers)
    if target.exists() and target.samefile(source):
        raise UsageError(f"{target} is the input file itself.", "Choose another name.")
    types = {name: find_tensor_type(wanted) for name, wanted in (tensor_types or {}).items()}
    _check(file, file_type, types, importance, requantize=requantize)
    lib = llama_library()
    request = _Request(lib, file, file_type, types, importance or {}, layers)
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    request.params.nthread = threads if threads is not None else processors
    request.params.allow_requantize = requantize
    with storage_errors(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        scratch = Path(folder) / target.name
        status, reason = _run(lib, source, scratch, request, progress)
        if status != 0:
            raise _refused(source, target, file_type, reason)
        _check_result(scratch, file, layers)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        scratch.replace(target)


def _run(lib: Any, source: Path, target: Path, request: _Request, progress: Progress | None) -> tuple[int, str]:
    """llama.cpp's status, and why it failed.

    It runs in a thread of its own, which Ctrl-C abandons, as it cannot be interrupted.
    """
    status: list[int] = []
    heard: list[tuple[str, int, int]] = []
    reasons: list[str] = []

    def hear(line: str) -> None:
        if found := _STEP.match(line):
            heard[:] = [(found[3], int(found[1]) - 1, int(found[2]))]
        elif _FAILURE in line:
            reasons.append(line.partition(_FAILURE)[2].strip())

    def work() -> None:
        with listening(hear):
            arguments = os.fsencode(source), os.fsencode(target), ctypes.byref(request.params)
            status.append(int(lib.llama_model_quantize(*arguments)))

    thread = threading.Thread(target=work, name="edgeinfer-quantize", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_SECONDS)
        if progress is not None and heard:
            progress(*heard[-1])
    return (status[0] if status else 1), " ".join(reasons)


class _Request:
    """The arguments of llama.cpp, whose structs point into arrays that this object keeps alive."""

    def __init__(
        self,
        lib: Any,
        file: GgufFile,
        kind: FileType,
        types: Mapping[str, str],
        importance: Mapping[str, Floats],
        layers: tuple[int, ...],
    ) -> None:
        self.params = params = lib.llama_model_quantize_default_params()
        params.ftype, params.only_copy = kind.number, kind is COPY
        params.max_buf_size = _BUFFER_BYTES
        kept = {name: wanted for name, wanted in types.items() if not is_pruned(name, layers)}
        patterns = _patterns({renumbered(name, layers): wanted for name, wanted in kept.items()})
        if patterns and kind is not COPY:
            params.tt_overrides = self._types = _type_array(lib, patterns)
        if importance:
            self._columns = [np.ascontiguousarray(values, np.float32) for values in importance.values()]
            params.imatrix = self._importance = _importance_array(lib, list(importance), self._columns)
        if layers:
            params.prune_layers = self._layers = (ctypes.c_int32 * (len(layers) + 1))(*layers, -1)
        if file.splits[0].alignment != _ALIGNMENT:
            # It lays tensors out at its default whatever the key says.
            params.kv_overrides = self._keys = (lib.llama_model_kv_override * 2)()
            key = self._keys[0]
            key.tag, key.key, key.value.val_i64 = lib.LLAMA_KV_OVERRIDE_TYPE_INT, b"general.alignment", _ALIGNMENT


def _type_array(lib: Any, patterns: Sequence[tuple[str, str]]) -> Any:
    """llama.cpp's structs of types by pattern, ended by one without a pattern."""
    entries = (lib.llama_model_tensor_override * (len(patterns) + 1))()
    for entry, (pattern, wanted) in zip(entries, patterns, strict=False):
        entry.pattern, entry.type = pattern.encode(), ggml_type(wanted).number
    return entries


def _importance_array(lib: Any, names: Sequence[str], columns: Sequence[Floats]) -> Any:
    """llama.cpp's structs of importance, ended by one without a name."""
    entries = (lib.llama_model_imatrix_data * (len(names) + 1))()
    for entry, name, values in zip(entries, names, columns, strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    return entries


def _patterns(types: Mapping[str, str]) -> list[tuple[str, str]]:
    """Regular expressions that match exactly these names; few, as every tensor is matched against each."""
    layers: dict[tuple[str, str], list[str]] = {}
    patterns = []
    for name, wanted in types.items():
        if found := _LAYER.fullmatch(name):
            layers.setdefault((found[2], wanted), []).append(found[1])
        else:
            patterns.append((f"^{re.escape(name)}$", wanted))
    for (rest, wanted), numbers in layers.items():
        patterns.append((rf"^blk\.({'|'.join(numbers)})\.{re.escape(rest)}$", wanted))
    return patterns


def _check(
    file: GgufFile,
    kind: FileType,
    types: Mapping[str, str],
    importance: Mapping[str, Floats] | None,
    *,
    requantize: bool,
) -> None:
    """Refuses requests that would make llama.cpp abort, or fail without a clear message."""
    if not file.metadata.get("general.architecture") or not file.tensors:
        raise BundleError(f"{file.path} contains no model.", "Use a GGUF file of a language model.")
    if kind.needs_importance and not importance:
        hint = "Export the checkpoint with --calibration FILE, or choose a larger type."
        raise UsageError(f"{kind.name} needs importance data.", hint)
    if types and (kind.is_float or kind is COPY):
        message = f"A file of type {kind.name} cannot have tensors of other types."
        raise UsageError(message, "Choose a quantized type for the others, such as Q8_0.")
    # Experts in MXFP4 stay as they are.
    stays = kind.base if kind.name == PACKED_KIND else ""
    quantized = next((t for t in file.tensors if t.type.quantized and t.type.name != stays), None)
    if kind is not COPY and quantized is not None and not requantize:
        message = f"{file.path} is already quantized: {quantized.name} is {quantized.type.name}."
        raise UsageError(message, "Start from a float file; quantizing twice loses more.")
    tensors = {tensor.name: tensor for tensor in file.tensors}
    for name, values in (importance or {}).items():
        _check_importance(tensors.get(name), name, values)
    for name, wanted in types.items():
        if name not in tensors:
            raise UsageError(f"{file.path} has no tensor {name}.", "List them with edgeinfer inspect --tensors.")
        if needs_importance(wanted) and name not in (importance or {}):
            hint = "Use a calibration text, or choose another type; embeddings have no importance data."
            raise UsageError(f"{name} cannot be {wanted} without importance data.", hint)


def _check_importance(tensor: GgufTensor | None, name: str, values: Floats) -> None:
    if tensor is None or len(tensor.shape) < 2:
        raise UsageError(
            f"There are importance data for {name}, which is not a matrix of the file.", "Gather it again."
        )
    experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
    if values.shape != (experts * tensor.shape[-1],):
        message = (
            f"The importance data of {name} have shape {values.shape}, not {experts} x {tensor.shape[-1]} columns."
        )
        raise UsageError(message, "Gather it from the checkpoint of this file.")
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise UsageError(f"The importance data of {name} are not finite and positive.", "Gather it again.")


def _refused(source: Path, target: Path, kind: FileType, reason: str) -> EdgeInferError:
    if "basic_ios" in reason or "iostream" in reason:
        return StorageError(f"Cannot write {target}.", "Check the free disk space and permissions.")
    message = f"llama.cpp cannot make {source} {kind.name}" + (f": {reason}." if reason else ".")
    return BackendError(message, "Choose another type.")


def _check_result(path: Path, source: GgufFile, layers: tuple[int, ...]) -> None:
    """Checks the written file, which llama.cpp does not."""
    try:
        written = {tensor.name: _counted(tensor.shape) for tensor in read_gguf(path).tensors}
    except BundleError as error:
        raise BackendError(
            f"llama.cpp wrote a file that is damaged: {error.message}", "Choose another type."
        ) from error
    kept = [tensor for tensor in source.tensors if not is_pruned(tensor.name, layers)]
    wanted = {renumbered(tensor.name, layers): _counted(tensor.shape) for tensor in kept}
    differing = sorted(name for name in wanted.keys() | written.keys() if wanted.get(name) != written.get(name))
    if differing:
        asked, found = (shapes.get(differing[0], "none") for shapes in (wanted, written))
        message = f"llama.cpp wrote {differing[0]} with another shape than requested: {found}, not {asked}."
        raise BackendError(message, "Choose another type.")


def _counted(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with the dimensions that llama.cpp counts: a norm's (1, K) of one group becomes (K,)."""
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape
