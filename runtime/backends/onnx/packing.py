"""Has onnxruntime pack one weight for this processor, and appends the packed copy to a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

import onnxruntime as ort

from edgeinfer.errors import BackendError, StorageError
from edgeinfer.runtime.backends.onnx.packed_graph import Copy, copies_in
from edgeinfer.runtime.system.allocation import is_refusal, refused

# The file of weights and their packed copies.
PACKED = "packed.bin"
# A packed copy begins at a page, so that what belongs to one layer can be dropped without another's.
PAGE = 4096
# Linux may keep what is written at once as one piece and map it whole at a touch. Packed copies are read whole.
_COPY_BYTES = 1 << 20
# One operator's model, what onnxruntime makes of it, and the file of that.
_PRODUCT, _OPTIMIZED, SAVED = "product.onnx", "optimized.onnx", "optimized.bin"


def pack_weights(product: bytes, work: Path) -> dict[str, tuple[Copy, ...]]:
    """Packed copies of the weights of a model of one operator, in the file that onnxruntime saves."""
    (work / _PRODUCT).write_bytes(product)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(work / _OPTIMIZED)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", SAVED)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "0")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    try:
        ort.InferenceSession(str(work / _PRODUCT), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        # onnxruntime raises a family of exceptions without a common base of its own.
        if is_refusal(error):
            raise refused("Packing the weights", error) from error
        free = shutil.disk_usage(work).free
        if free < (work / PACKED).stat().st_size // 2:
            raise StorageError(f"The disk is full: {work.parent}.", "Free some space.") from error
        raise BackendError(f"onnxruntime cannot pack a weight: {str(error).splitlines()[0]}") from error
    return copies_in((work / _OPTIMIZED).read_bytes())


def remove_scratch(work: Path) -> None:
    for name in (_PRODUCT, _OPTIMIZED, SAVED):
        (work / name).unlink(missing_ok=True)


def append_copy(copy: Copy, saved: Path, file: BinaryIO) -> Copy:
    """Moves a packed copy to the end of the file, each of its blobs to a page of its own."""
    places = []
    with saved.open("rb") as source:
        for offset, length in copy.blobs:
            place = -(-file.seek(0, 2) // PAGE) * PAGE
            file.seek(place)
            source.seek(offset)
            for start in range(0, length, _COPY_BYTES):
                file.write(source.read(min(_COPY_BYTES, length - start)))
            places.append((place, length))
    return Copy(copy.key, tuple(places))
