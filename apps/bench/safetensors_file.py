"""Safetensors files read and written with numpy alone, one tensor at a time; knows nothing of models."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from edgeinfer.bundle.array_file import ArrayFileError, encode_header, read_index
from edgeinfer.errors import CheckpointError

__all__ = ["Dtype", "TensorFile", "convert_checkpoint", "encode", "write_header"]

Dtype = Literal["float32", "float16", "bfloat16"]

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class TensorFile:
    """A safetensors file whose tensors are read when asked for.

    Raises:
        CheckpointError: it is missing or not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                index = read_index(file, path.stat().st_size)
        except (OSError, ArrayFileError) as error:
            raise CheckpointError(f"Cannot read {path}: {error}.", "Give a checkpoint in one file.") from error
        self._entries = {stored.name: stored for stored in index.arrays}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor."""
        return {name: stored.shape for name, stored in self._entries.items()}

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32, of the shape it is stored in.

        Raises:
            CheckpointError: the file has no such tensor, or one of another type.
        """
        entry = self._entries.get(name)
        if entry is None or entry.dtype not in _STORED:
            wrong = "is missing" if entry is None else f"has the type {entry.dtype}"
            raise CheckpointError(f"The tensor {name} {wrong} in {self._path}.", "Give a checkpoint in floating point.")
        count, kind = math.prod(entry.shape), _STORED[entry.dtype]
        data: npt.NDArray[Any] = np.fromfile(self._path, kind, count, offset=entry.offset)
        if entry.dtype == "BF16":
            data = (data.astype(np.uint32) << 16).view(np.float32)
        values: npt.NDArray[np.float32] = data.astype(np.float32, copy=False).reshape(entry.shape)
        return values


def write_header(file: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtype: Dtype) -> None:
    """Writes the header; the tensors' data follow it in its order."""
    file.write(encode_header({name: (_TYPES[dtype], shape) for name, shape in shapes.items()}, {"format": "pt"}))


def encode(values: npt.NDArray[np.float32], dtype: Dtype) -> npt.NDArray[Any]:
    """Little-endian storage of the values; bfloat16 keeps the upper half of each float32."""  # any shape, kept
    if dtype == "float32":
        return values.astype("<f4", copy=False)
    if dtype == "float16":
        return values.astype("<f2")
    return (values.view(np.uint32) >> 16).astype("<u2")


def convert_checkpoint(source: Path, target: Path, dtype: Dtype) -> None:
    """Writes a checkpoint of one safetensors file again in another type, with whatever else its folder holds.

    Raises:
        CheckpointError: there is no such file, or it holds something else than floating point.
    """
    tensors = TensorFile(source / _WEIGHTS)
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.name not in (_WEIGHTS, _CONFIG):
            shutil.copyfile(path, target / path.name)
    config = json.loads((source / _CONFIG).read_text("utf-8"))
    (target / _CONFIG).write_text(json.dumps(config | {"torch_dtype": dtype, "dtype": dtype}, indent=2) + "\n", "utf-8")
    with (target / _WEIGHTS).open("wb") as file:
        write_header(file, tensors.shapes, dtype)
        for name in tensors.shapes:
            file.write(encode(tensors.read(name), dtype).data)
