"""Lazy reading of a Hugging Face safetensors checkpoint.

Tensors are read with plain file reads rather than through a memory map, because mapped pages would count against the
memory of an export: own code instead of the `safetensors` library for that reason, and because its numpy side has no
bfloat16.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Self, TypeGuard

import numpy as np
from numpy.typing import NDArray

from edgeinfer.errors import CheckpointError

__all__ = ["Checkpoint", "StoredTensor", "parse_object", "read_bytes"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_AGAIN = "Download the checkpoint again."
# The format's own limit on the header, from the safetensors specification.
_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_ITEM_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
# Bytes read at a time; the conversion of one piece to float32 stays small beside the tensor.
_PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in its file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Checkpoint:
    """The tensors of a checkpoint directory by name; opening reads the headers only.

    Args:
        folder: a directory with `model.safetensors`, or `model.safetensors.index.json` and its shards.

    Raises:
        CheckpointError: files are missing, truncated or malformed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, StoredTensor] = {}
        self._files: dict[Path, BinaryIO] = {}
        single, index = folder / _SINGLE, folder / _INDEX
        if single.is_file():
            self._tensors = _read_header(single)
        elif index.is_file():
            self._read_shards(index)
        else:
            raise _no_weights(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._tensors)

    def dtype(self, name: str) -> str:
        """The type a tensor is stored in, as the format spells it: F32, BF16 and so on."""
        return self._tensors[name].dtype

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Checks that a tensor is there with this shape and a floating-point type.

        Raises:
            CheckpointError: it is not.
        """
        stored = self._tensors.get(name)
        if stored is None:
            hint = "The checkpoint is incomplete, or config.json describes another model."
            raise CheckpointError(f"{self.folder} has no tensor {name!r} (expected shape {shape}).", hint)
        if stored.shape != shape:
            message = f"Tensor {name!r} in {stored.file.name} has shape {stored.shape}, config.json implies {shape}."
            raise CheckpointError(message, "Check that config.json belongs to these weights.")
        if stored.dtype not in ("F32", "F16", "BF16"):
            hint = "Export from float32, float16 or bfloat16 weights; quantized checkpoints cannot be converted."
            raise CheckpointError(f"Tensor {name!r} in {stored.file.name} has type {stored.dtype}.", hint)

    def read(
        self, name: str, start: int = 0, stop: int | None = None, *, within: int | None = None
    ) -> NDArray[np.float32]:
        """Rows `start` to `stop` of a tensor as float32; `require` must have accepted the tensor.

        Args:
            within: rows are those of the tensor with this index along the first axis.

        Raises:
            CheckpointError: the file ended early, or cannot be read.
        """
        stored = self._tensors[name]
        shape = stored.shape if within is None else stored.shape[1:]
        stop = shape[0] if stop is None else stop
        row_items = math.prod(shape[1:])
        values = np.empty((stop - start, *shape[1:]), np.float32)
        start += 0 if within is None else within * shape[0]
        flat = values.reshape(-1)
        item = _ITEM_BYTES[stored.dtype]
        try:
            self._read_into(flat, stored, stored.offset + start * row_items * item)
        except OSError as error:
            raise _unreadable(stored.file, error) from error
        return values

    def _read_into(self, flat: NDArray[np.float32], stored: StoredTensor, offset: int) -> None:
        """Fills a flat array from a place in a tensor's file, piece by piece."""
        item = _ITEM_BYTES[stored.dtype]
        file = self._open(stored.file)
        file.seek(offset)
        step = _PIECE_BYTES // item
        for begin in range(0, flat.size, step):
            piece = flat[begin : begin + step]
            if stored.dtype == "F32":
                _fill(file, piece.view(np.uint8), stored)
                continue
            raw = np.empty(piece.size, np.uint16)
            _fill(file, raw.view(np.uint8), stored)
            if stored.dtype == "F16":
                piece[:] = raw.view(np.float16)
            else:
                # bfloat16 is the upper half of a float32.
                np.left_shift(raw, 16, out=piece.view(np.uint32), dtype=np.uint32)

    def _open(self, path: Path) -> BinaryIO:
        if path not in self._files:
            try:
                # Unbuffered: reads are large, and a buffer would be copied through.
                self._files[path] = path.open("rb", buffering=0)
            except OSError as error:
                raise _unreadable(path, error) from error
        return self._files[path]

    def _read_shards(self, index: Path) -> None:
        data = parse_object(read_bytes(index), str(index))
        shards = data.get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(f, str) for f in shards.values()):
            raise CheckpointError(f"{index} has no weight_map from tensors to files.", _AGAIN)
        present = {entry.name for entry in self.folder.iterdir() if entry.is_file()}
        headers: dict[str, dict[str, StoredTensor]] = {}
        for name, file in shards.items():
            if file not in headers:
                if PurePosixPath(file).name != file or "\\" in file:
                    raise CheckpointError(f"{index} names {file!r}, which is outside its folder.", "Do not use it.")
                if file not in present:
                    raise CheckpointError(f"{self.folder / file} is missing, although {index.name} lists it.", _AGAIN)
                headers[file] = _read_header(self.folder / file)
            if name not in headers[file]:
                raise CheckpointError(
                    f"{self.folder / file} has no tensor {name!r}, although {index.name} lists it.", _AGAIN
                )
            self._tensors[name] = headers[file][name]


def _fill(file: BinaryIO, out: NDArray[np.uint8], stored: StoredTensor) -> None:
    view, done = out.data, 0
    while done < len(view):
        try:
            count = file.readinto(view[done:])  # type: ignore[attr-defined]  # typeshed's BinaryIO lacks it
        except OSError as error:
            raise _unreadable(stored.file, error) from error
        if not count:
            raise CheckpointError(f"{stored.file} ended before a tensor did.", _AGAIN)
        done += count


def _no_weights(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return CheckpointError(f"{folder} is not a directory.", "Point to a Hugging Face checkpoint directory.")
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pth")):
        hint = "Load it with transformers once and save it with save_pretrained(..., safe_serialization=True)."
        return CheckpointError(f"{folder} has pickled weights only, and pickles are never loaded.", hint)
    return CheckpointError(f"{folder} has neither {_SINGLE} nor {_INDEX}.", _AGAIN)


def read_bytes(path: Path) -> bytes:
    """Contents of a small file of a checkpoint.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.")


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Parses bytes that must be a JSON object.

    Raises:
        CheckpointError: they are not; `what` names them.
    """
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not valid JSON: {error}.", _AGAIN) from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{what} is not a JSON object.", _AGAIN)
    return parsed


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Reads and checks the header: eight bytes of length, JSON, then the tensors' bytes without gaps."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            valid = length <= min(size - 8, _MAX_HEADER_BYTES)
            header = file.read(length) if valid else b""
    except OSError as error:
        raise _unreadable(path, error) from error
    if not valid:
        message = f"{path} is truncated or not a safetensors file: {size} bytes, header of {length}."
        raise CheckpointError(message, _AGAIN)
    entries = parse_object(header, f"The header of {path}")
    entries.pop("__metadata__", None)
    tensors = {name: _read_entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_extent(path, tensors, 8 + length, size)
    return tensors


def _read_entry(path: Path, name: str, entry: Any, base: int) -> StoredTensor:
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in _ITEM_BYTES or not _naturals(shape) or not _is_pair(offsets):
        raise CheckpointError(f"{path}: the header entry of {name!r} is malformed.", _AGAIN)
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        message = f"{path}: {name!r} has {offsets[1] - offsets[0]} bytes, its shape and type need {nbytes}."
        raise CheckpointError(message, _AGAIN)
    return StoredTensor(path, dtype, tuple(shape), base + offsets[0], nbytes)


def _is_pair(value: Any) -> TypeGuard[list[int]]:
    return _naturals(value) and len(value) == 2


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)


def _check_extent(path: Path, tensors: dict[str, StoredTensor], start: int, size: int) -> None:
    """Tensors must fill the file from the header to its end, one after another."""
    end = start
    for stored in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if stored.offset != end:
            raise CheckpointError(f"{path}: tensors overlap or leave gaps at byte {end}.", _AGAIN)
        end += stored.nbytes
    if end > size:
        raise CheckpointError(f"{path} is truncated: {size} bytes, its header describes {end}.", _AGAIN)
    if end < size:
        raise CheckpointError(f"{path} has {size - end} bytes that its header does not describe.", _AGAIN)
