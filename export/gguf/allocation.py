"""Chooses the type of each tensor of a GGUF file so that the model loses least within a size; importance matrices.

The cost of a type is measured with llama.cpp's own quantizer on some of a tensor's rows, as the error of their output,
times what a probe of the whole model lost by a coarser rounding of the same matrix. The importance matrix holds the
mean square of each column's inputs when a text is read; the checkpoint is run layer by layer in numpy, so that memory
holds one layer.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.gguf.metadata import GgmlType, ggml_type
from edgeinfer.bundle.manifest import PlannedTensor, PlanRecord
from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.core.errors import BudgetError
from edgeinfer.core.options import format_size
from edgeinfer.core.results import Progress
from edgeinfer.export.gguf.tensors import PlannedGgufTensor, TensorRows
from edgeinfer.export.gguf.writer import gguf_package
from edgeinfer.export.options import fitting
from edgeinfer.quant.allocation import Choice, PricedOption, allocate
from edgeinfer.quant.calibration import CalibrationOptions, ModelReader, calibrate
from edgeinfer.quant.probing import coarse, expert_group, probe_decoder
from edgeinfer.quant.sensitivity import even, output_energy, sample_size, share_of, spread_rows
from edgeinfer.quant.statistics import InputStatistics

Floats = NDArray[np.float32]

Ints = NDArray[np.int64]
# From small to large, of rows that are whole blocks of 256, and of 32. Smaller ones than these are slow on CPUs and
# need importance data.
_WIDE = ("Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16")
_NARROW = ("IQ4_NL", "Q5_0", "Q5_1", "Q8_0", "F16")
_ODD = ("F16",)
# Types of files by the type of most of their tensors, which is what programs say of them.
_FILES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_EMBEDDING = "token_embd.weight"
_ALIGNMENT = 32


class RowQuantizer:
    """llama.cpp's quantizer of rows."""

    def __init__(self) -> None:
        self._package = gguf_package()
        # The bindings do not list it.
        self._quantize = llama_library()._lib.ggml_quantize_chunk
        self._quantize.restype = ctypes.c_size_t
        sizes = [ctypes.c_int64] * 3
        self._quantize.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p]

    def approximate(self, rows: Floats, kind: str, importance: Floats | None = None) -> Floats:  # (N, K) -> (N, K)
        """The rows as a type of tensors stores them, in whole blocks; importance of columns is (K,)."""
        into = ggml_type(kind)
        rows = np.ascontiguousarray(rows, np.float32)
        count, width = rows.shape
        packed = np.empty((count, into.row_bytes(width)), np.uint8)
        weights = None if importance is None else np.ascontiguousarray(importance, np.float32)
        pointer = None if weights is None else weights.ctypes.data
        self._quantize(into.number, rows.ctypes.data, packed.ctypes.data, 0, count, width, pointer)
        if kind == "F16":
            return packed.view(np.float16).astype(np.float32)
        values: Floats = self._package.dequantize(packed, self._package.GGMLQuantizationType[kind])
        return values.reshape(count, width)


@dataclass(frozen=True)
class TensorTypes:
    """The types of a file's tensors."""

    kind: str  # type of the file
    types: Mapping[str, str]  # of the tensors whose type is chosen; the file's type decides the others
    predicted: Mapping[str, float]  # cost by tensor, in nats of KL divergence per token
    budget: int | None  # bytes of all tensors; None where types were given

    def record(self, calibration_sha256: str | None = None, calibration_tokens: int = 0) -> PlanRecord:
        tensors = tuple(self._entry(name, ggml_type(kind)) for name, kind in self.types.items())
        return PlanRecord("llama.cpp", tensors, calibration_sha256, calibration_tokens, self.budget)

    def _entry(self, name: str, kind: GgmlType) -> PlannedTensor:
        cost = self.predicted.get(name)
        return PlannedTensor(name, kind.bits, kind.block_values, predicted_kl=cost, type=kind.name)


def choose_types(
    spec: DecoderSpec,
    reader: ModelReader,
    texts: Sequence[Ints],
    tensors: Sequence[PlannedGgufTensor],
    budget: int,
    importance: Importance | None = None,
    given: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> TensorTypes:
    """Chooses the types within a budget of the least predicted cost; probes the model once.

    Args:
        texts: token ids that probes read; texts do not see each other.
        budget: bytes of all tensors, with the padding between them.
    """
    # An impossible budget is refused before the model is probed, which takes a while.
    sizes = check_budget(tensors, budget, given)
    options = {name: tuple(by_kind) for name, by_kind in sizes.items()}
    costs = _costs(spec, reader, texts, tensors, options, importance or {}, progress)
    choices = [
        Choice(tuple(PricedOption(size, cost) for size, cost in zip(sizes[name].values(), costs[name], strict=True)))
        for name in options
    ]
    chosen = dict(zip(options, allocate(choices, budget - _fixed_bytes(tensors)).chosen, strict=True))
    types = {name: options[name][index] for name, index in chosen.items()}
    predicted = {name: costs[name][index] for name, index in chosen.items()}
    return TensorTypes(file_kind(types, tensors), types, predicted, budget)


def check_budget(
    tensors: Sequence[PlannedGgufTensor], budget: int, given: Mapping[str, str] | None = None
) -> dict[str, dict[str, int]]:
    """Refuses a budget that not even the smallest types fit; returns bytes by tensor and possible type."""
    sizes = {
        t.name: {kind: tensor_bytes(t.shape, kind) for kind in _candidates(t, (given or {}).get(t.name))}
        for t in tensors
        if not t.exact
    }
    least = _fixed_bytes(tensors) + sum(min(by_kind.values()) for by_kind in sizes.values())
    if least > budget:
        message = f"The tensors cannot be made to fit {format_size(budget)} ({budget:,} bytes)."
        hint = f"The smallest possible tensors take {format_size(least)} ({least:,} bytes): allow as much."
        raise BudgetError(message, hint, minimum_bytes=least)
    return sizes


def tensor_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Bytes of a tensor, with the padding after it."""
    return _padded(math.prod(shape[:-1]) * ggml_type(kind).row_bytes(shape[-1]))


def _padded(size: int) -> int:
    return size + -size % _ALIGNMENT


def _fixed_bytes(tensors: Iterable[PlannedGgufTensor]) -> int:
    return sum(_padded(4 * math.prod(tensor.shape)) for tensor in tensors if tensor.exact)


def _candidates(tensor: PlannedGgufTensor, given: str | None) -> tuple[str, ...]:
    columns = tensor.shape[-1]
    if given is not None:
        return (fitting(given, columns),)
    return _WIDE if columns % 256 == 0 else _NARROW if columns % 32 == 0 else _ODD


def file_kind(types: Mapping[str, str], tensors: Iterable[PlannedGgufTensor]) -> str:
    """The type of the file: that of most weights; a quantized one where any tensor is."""
    weights: Counter[str] = Counter()
    for tensor in tensors:
        kind = types.get(tensor.name)
        if kind is not None and ggml_type(kind).quantized:
            weights[kind] += math.prod(tensor.shape)
    if not weights:
        return "F16"
    most = weights.most_common(1)[0][0]
    return _FILES.get(most, most)


@dataclass(frozen=True)
class _Piece:
    """Rows of one of our matrices in a tensor of the file, and which of the tensor's slices they are."""

    tensor: PlannedGgufTensor
    part: TensorRows
    index: int


def _costs(
    spec: DecoderSpec,
    reader: ModelReader,
    texts: Sequence[Ints],
    tensors: Sequence[PlannedGgufTensor],
    options: Mapping[str, tuple[str, ...]],
    importance: Importance,
    progress: Progress | None,
) -> dict[str, list[float]]:
    """Predicted cost of each type of each tensor."""
    pieces: dict[str, list[_Piece]] = {}
    for tensor in tensors:
        if tensor.name in options:
            for index, part in enumerate(tensor.parts):
                pieces.setdefault(part.plan, []).append(_Piece(tensor, part, index))
    shared = Counter(expert_group(plan) for plan in pieces)
    quantizer = RowQuantizer()
    # By matrix: squared output errors of each type of each of its tensors, and of the probe's rounding.
    errors: dict[str, dict[str, list[float]]] = {}
    whole: dict[str, float] = {}

    def look(name: str, weight: Floats, x: Floats | None) -> None:
        sample, shown = sample_size(shared[expert_group(name)]), None if x is None else even(x)
        for piece in pieces.get("embed" if name == "head" and spec.tied else name, ()):
            rows = weight[piece.part.start : piece.part.stop]
            taken = spread_rows(rows, sample)
            scale = len(rows) / len(taken)
            columns, width = importance.get(piece.tensor.name), weight.shape[1]
            if columns is not None:
                columns = columns[piece.index * width : (piece.index + 1) * width]
            whole[name] = whole.get(name, 0.0) + scale * output_energy(coarse(taken, x) - taken, shown)
            errors.setdefault(name, {})[piece.tensor.name] = [
                scale * output_energy(quantizer.approximate(taken, kind, columns) - taken, shown)
                for kind in options[piece.tensor.name]
            ]

    probes = probe_decoder(spec, reader.tensor, texts, look, progress)
    costs = {name: np.zeros(len(kinds)) for name, kinds in options.items()}
    for plan, by_tensor in errors.items():
        share = share_of(probes[expert_group(plan)], plan) / max(whole[plan], 1e-30)
        for name, found in by_tensor.items():
            costs[name] += share * np.array(found)
    return {name: [float(cost) for cost in found] for name, found in costs.items()}


# By names of tensors: (K,), or of experts (E * K,), one expert after the other.
Importance = dict[str, Floats]

_HEAD = "output.weight"
# A column that never got a value still has a weight: llama.cpp divides by sums of these.
_LEAST = 1e-6


def gather_importance(
    spec: DecoderSpec,
    reader: ModelReader,
    texts: Sequence[Ints],
    tensors: Iterable[PlannedGgufTensor],
    progress: Progress | None = None,
) -> Importance:
    """Collects the importance of every matrix of a file except the embedding and routers, which are not quantized by
    it.

    An expert that no token reached counts all its columns the same.

    Args:
        texts: token ids; texts do not see each other.
    """
    gathered = _Gathered(spec, reader, progress)
    options = CalibrationOptions(streams="float", hessian=False, weigh_experts=False)
    found = calibrate(spec, reader, texts, gathered, options)
    squares = gathered.squares
    importance = {}
    for tensor in tensors:
        if tensor.name == _HEAD:
            importance[tensor.name] = _positive(found.head.mean_square)
        elif tensor.name != _EMBEDDING and all(part.plan in squares for part in tensor.parts):
            importance[tensor.name] = np.concatenate([_positive(squares[part.plan]) for part in tensor.parts])
    return importance


class _Gathered:
    """Collects the statistics of each matrix's inputs; see `edgeinfer.quant.calibration.Visitor`."""

    def __init__(self, spec: DecoderSpec, reader: ModelReader, progress: Progress | None) -> None:
        self.squares: dict[str, Floats] = {}
        self._layers, self._progress = spec.num_layers, progress
        self._done = 0

    def layer(self, layer: int, statistics: dict[str, InputStatistics]) -> None:
        """Nothing is moved between matrices."""

    def embedding(self, rows: Floats) -> Floats:  # (M, D) -> (M, D)
        return rows

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:  # (R, C) -> (R, C)
        """Returns the matrix unchanged; statistics are None where nothing enters it."""
        self.squares[name] = np.ones(weight.shape[1], np.float32) if statistics is None else statistics.mean_square
        if self._progress is not None and name.endswith("attn.out"):
            self._done += 1
            self._progress("calibration", self._done, self._layers)
        return weight


def _positive(squares: Floats) -> Floats:  # (K,) -> (K,)
    floor = _LEAST * float(squares.mean(dtype=np.float64))
    return np.maximum(squares, np.float32(floor)) if floor > 0 else np.ones_like(squares)
