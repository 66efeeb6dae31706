"""Packed weights, read as floats or as they are: MXFP4, the ternary weights of BitNet, and the types of GGUF files.

MXFP4 has 4 bits a value and a power of two for each block. Ternary matrices are -1, 0 and 1 times one scale.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.bfloat16 import round_nearest
from edgeinfer.bundle.kinds import KINDS, read_blocks
from edgeinfer.bundle.packing import (
    QuantizedMatrix,
    blocks_of_file,
    blocks_per_row,
    dequantize_e2m1,
    midpoint,
    pack,
)
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.source.checkpoint import FLOATS, FP8_BLOCK, TensorFile
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.quant.policy import QuantScheme, effective_block

MXFP4 = "mxfp4"
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Shape = tuple[int, ...]
# Name, shape and types of a checkpoint's tensor.
Stored = tuple[str, Shape, tuple[str, ...]]

# E8M0 scales of blocks; those above the largest overflow float32 or are not numbers.
_BLOCK, _SCALE_BIAS, _LARGEST_SCALE = 32, 127, 252
_PER_BYTE = 4
# Source: transformers' WeightQuant.
_LEAST_MEAN = 1e-5
_RUN_VALUES = 1 << 22
_DAMAGED = "The checkpoint is damaged: download it again."


class PackedSource(Protocol):
    """Rows of one packed matrix (N, K); both methods raise CheckpointError where they are damaged."""

    def floats(self, start: int, stop: int) -> Floats:
        """Rows start..stop-1."""

    def kept(self, start: int, stop: int, scheme: QuantScheme) -> QuantizedMatrix:
        """Rows start..stop-1 unchanged, in the scheme of the packing."""


class Packing(Protocol):
    """How a matrix is packed, or matrices that are stacked along a first axis."""

    def tensors(self, name: str, shape: Shape) -> Iterator[Stored]:
        """The checkpoint's tensors that hold one of this name and unpacked shape."""

    def open(self, checkpoint: TensorFile, name: str, shape: Shape, within: int | None) -> PackedSource:
        """A matrix (N, K), or the one at index `within` of a stack."""

    def scheme(self, k: int, bits: int) -> QuantScheme | None:
        """The scheme that holds rows of K values unchanged at this number of bits, if any."""


def mxfp4_tensors(name: str) -> tuple[str, str]:
    """Names of the blocks and scales of a packed tensor."""
    return f"{name}_blocks", f"{name}_scales"


class _Mxfp4Matrix:
    """Two values per byte, the first in the lower half; transformers' Mxfp4Config."""

    def __init__(self, checkpoint: TensorFile, name: str, within: int | None) -> None:
        self._checkpoint, self._name, self._within = checkpoint, name, within

    def _read(self, start: int, stop: int) -> tuple[Bytes, NDArray[np.int32]]:  # (N, blocks, 16), (N, blocks)
        """Codes, and exponents of the blocks' scales."""
        names = mxfp4_tensors(self._name)
        codes, scales = (self._checkpoint.read_packed(n, start, stop, within=self._within) for n in names)
        if (scales > _LARGEST_SCALE).any():
            raise CheckpointError(f"Tensor {names[1]!r} has scales beyond the range of float32.", _DAMAGED)
        return codes, scales.astype(np.int32) - _SCALE_BIAS

    def floats(self, start: int, stop: int) -> Floats:
        codes, exponents = self._read(start, stop)
        return dequantize_e2m1(codes, np.ldexp(np.float32(0.5), exponents))

    def kept(self, start: int, stop: int, scheme: QuantScheme) -> QuantizedMatrix:
        codes, exponents = self._read(start, stop)
        return QuantizedMatrix(codes, np.ldexp(np.float32(0.5), exponents), None)


class _Mxfp4:
    def tensors(self, name: str, shape: Shape) -> Iterator[Stored]:
        if shape[-1] % _BLOCK:
            message = f"Tensor {name!r} is packed in blocks of {_BLOCK}, but has rows of {shape[-1]} values."
            raise CheckpointError(message, "Check that config.json belongs to these weights.")
        blocks = (*shape[:-1], shape[-1] // _BLOCK)
        packed, scales = mxfp4_tensors(name)
        yield packed, (*blocks, _BLOCK // 2), ("U8",)
        yield scales, blocks, ("U8",)

    def open(self, checkpoint: TensorFile, name: str, shape: Shape, within: int | None) -> PackedSource:
        return _Mxfp4Matrix(checkpoint, name, within)

    def scheme(self, k: int, bits: int) -> QuantScheme | None:
        return QuantScheme(4, _BLOCK, symmetric=True, e2m1=True) if bits >= 4 else None


class _TernaryMatrix(ABC):
    def __init__(self, checkpoint: TensorFile, name: str, shape: Shape) -> None:
        self._checkpoint, self._name, self._shape = checkpoint, name, shape

    @property
    @abstractmethod
    def _scale(self) -> float:
        """Scale of all values."""

    @abstractmethod
    def _codes(self, start: int, stop: int) -> Bytes:  # (N, K)
        """0, 1 and 2 for -1, 0 and 1."""

    def floats(self, start: int, stop: int) -> Floats:
        return (self._codes(start, stop).astype(np.float32) - 1) * np.float32(self._scale)

    def kept(self, start: int, stop: int, scheme: QuantScheme) -> QuantizedMatrix:
        """The scale is rounded to bfloat16, in which such models are published."""
        count, k = stop - start, self._shape[1]
        blocks = blocks_per_row(k, scheme.block_size)
        codes = np.full((count, blocks * scheme.block_size), midpoint(scheme.bits), np.uint8)
        codes[:, :k] = self._codes(start, stop) + np.uint8(midpoint(scheme.bits) - 1)
        scale = round_nearest(np.array([self._scale], np.float32))
        data = pack(codes.reshape(count, blocks, -1), scheme.bits)
        return QuantizedMatrix(data, np.full((count, blocks), scale, np.float32), None)


class _PackedTernary(_TernaryMatrix):
    """Four values per byte, from four quarters of the rows; transformers' `pack_weights`."""

    def __init__(self, checkpoint: TensorFile, name: str, shape: Shape, divided: bool) -> None:
        super().__init__(checkpoint, name, shape)
        self._divided = divided

    @cached_property
    def _scale(self) -> float:
        name = _scale_name(self._name)
        scale = float(self._checkpoint.read(name)[0])
        if not 0 < scale < math.inf:
            raise CheckpointError(f"Tensor {name!r} has a scale of {scale}.", _DAMAGED)
        return 1 / scale if self._divided else scale

    def _codes(self, start: int, stop: int) -> Bytes:
        quarter, parts = self._shape[0] // _PER_BYTE, []
        for place in range(start // quarter, -(-stop // quarter)):
            first, last = max(start - place * quarter, 0), min(stop - place * quarter, quarter)
            packed = self._checkpoint.read_packed(self._name, first, last)
            parts.append(packed >> np.uint8(2 * place) & np.uint8(3))
        codes: Bytes = np.concatenate(parts)
        if (codes == 3).any():
            raise CheckpointError(f"Tensor {self._name!r} has values that are not ternary.", _DAMAGED)
        return codes


class _RoundedTernary(_TernaryMatrix):
    """Floats that are rounded to ternary values of their mean magnitude; transformers' `WeightQuant`."""

    @cached_property
    def _scale(self) -> float:
        count, width = self._shape
        step, total = max(1, _RUN_VALUES // width), 0.0
        for start in range(0, count, step):
            rows = self._checkpoint.read(self._name, start, min(start + step, count))
            total += float(np.abs(rows).sum(dtype=np.float64))
        if not math.isfinite(total):
            raise CheckpointError(f"Tensor {self._name!r} contains values that are not finite.", _DAMAGED)
        return max(total / (count * width), _LEAST_MEAN)

    def _codes(self, start: int, stop: int) -> Bytes:
        rows = self._checkpoint.read(self._name, start, stop) * np.float32(1 / self._scale)
        codes: Bytes = (np.clip(np.rint(rows), -1, 1) + 1).astype(np.uint8)
        return codes


class _Ternary:
    """Ternary matrices.

    Args:
        packed: as codes; otherwise floats that are rounded.
        divided: the checkpoint's scale divides.
    """

    def __init__(self, *, packed: bool, divided: bool = False) -> None:
        self._packed, self._divided = packed, divided

    def tensors(self, name: str, shape: Shape) -> Iterator[Stored]:
        if not self._packed:
            yield name, shape, FLOATS
            return
        if shape[0] % _PER_BYTE:
            message = f"Tensor {name!r} packs {_PER_BYTE} rows into one, and {shape[0]} rows are no multiple of that."
            raise CheckpointError(message, "Check that config.json belongs to these weights.")
        yield name, (shape[0] // _PER_BYTE, *shape[1:]), ("U8",)
        yield _scale_name(name), (1,), FLOATS

    def open(self, checkpoint: TensorFile, name: str, shape: Shape, within: int | None) -> PackedSource:
        if self._packed:
            return _PackedTernary(checkpoint, name, shape, self._divided)
        return _RoundedTernary(checkpoint, name, shape)

    def scheme(self, k: int, bits: int) -> QuantScheme | None:
        """Two bits, whatever is asked for."""
        return QuantScheme(2, effective_block(k, 128), symmetric=True)


def _scale_name(name: str) -> str:
    return name.removesuffix("weight") + "weight_scale"


class _BlocksMatrix:
    """Rows of a GGUF file's tensor."""

    def __init__(self, checkpoint: TensorFile, name: str, k: int, kind: str, within: int | None) -> None:
        self._checkpoint, self._name, self._k, self._kind, self._within = checkpoint, name, k, kind, within

    def _read(self, start: int, stop: int) -> Bytes:  # (N, bytes of a row)
        return self._checkpoint.read_packed(self._name, start, stop, within=self._within)

    def floats(self, start: int, stop: int) -> Floats:
        return read_blocks(self._kind, self._read(start, stop), self._k, self._name)

    def kept(self, start: int, stop: int, scheme: QuantScheme) -> QuantizedMatrix:
        return blocks_of_file(self._read(start, stop))


class _Blocks:
    """A type of GGUF files."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def tensors(self, name: str, shape: Shape) -> Iterator[Stored]:
        yield name, shape, (self._kind,)

    def open(self, checkpoint: TensorFile, name: str, shape: Shape, within: int | None) -> PackedSource:
        return _BlocksMatrix(checkpoint, name, shape[-1], self._kind, within)

    def scheme(self, k: int, bits: int) -> QuantScheme | None:
        """None: rows of several types make one scheme (`TensorPlan.kept`)."""
        return None


PACKINGS: Mapping[str, Packing] = {
    MXFP4: _Mxfp4(),
    "ternary": _Ternary(packed=True),
    "ternary-divided": _Ternary(packed=True, divided=True),
    "ternary-rounded": _Ternary(packed=False),
    **{kind: _Blocks(kind) for kind in KINDS},
}


def ternary_packing(config: HFConfig) -> str:
    """The packing of a BitNet checkpoint's layers; "" for other checkpoints."""
    given = config.get("quantization_config")
    if not isinstance(given, dict) or given.get("quant_method") != "bitnet":
        return ""
    left_out = given.get("modules_to_not_convert") or []
    if given.get("use_rms_norm") or not set(left_out) <= {"lm_head"}:
        message = "BitNet with use_rms_norm, or with layers among modules_to_not_convert, is not supported."
        raise UnsupportedArchitectureError(message, "Choose a checkpoint without.")
    if given.get("linear_class", "bitlinear") == "bitlinear":
        return "ternary-divided"
    return "ternary-rounded" if given.get("quantization_mode") == "online" else "ternary"


def require_fp8_blocks(config: HFConfig) -> None:
    """Refuses 8-bit floats with scales of other blocks, which shapes alone need not show."""
    given = config.get("quantization_config")
    if not isinstance(given, dict) or given.get("quant_method") != "fp8":
        return
    blocks = given.get("weight_block_size")
    if blocks is not None and blocks != [FP8_BLOCK, FP8_BLOCK]:
        message = f"FP8 weights with scales of blocks of {blocks!r} are not supported."
        raise UnsupportedArchitectureError(message, f"Choose a checkpoint with blocks of {[FP8_BLOCK] * 2}.")
