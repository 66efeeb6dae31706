"""A float32 bundle whose matrices hold what formats without a backend make of them, codebooks among them.

python -m edgeinfer.apps.bench.research.simulation BUNDLE OUT --form uniform|codebook --bits 3 [--group 32]
    [--method rtn] [--symmetric] [--head-bits 8] [--calibration FILE]

Three bits, or codebooks shared by rows: their predictions are those of a float model with the numbers they stand for.
Prints a JSON object with the bytes that the weights would take.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import MANIFEST, WEIGHTS, Bundle, TensorEntry, bfloat16, open_bundle, seal, write_bundle
from edgeinfer.bundle.packing import packed_bytes
from edgeinfer.bundle.tables import stored_tensors
from edgeinfer.config import BITS
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.export.source.calibration_text import read_calibration_text
from edgeinfer.export.weights.writer import write_floats
from edgeinfer.quant import METHODS, Grid, InputStatistics, approximate
from edgeinfer.quant.blocks import check_finite
from edgeinfer.quant.calibration import CalibrationOptions, calibrate

__all__ = ["CODEBOOK_BITS", "FORMS", "CodebookMatrix", "Form", "grid_bytes", "main", "quantize_codebook", "simulate"]

Floats = NDArray[np.float32]
CODEBOOK_BITS = (2, 3, 4)
_ROUNDS = 50
# Scales, values of codebooks (bfloat16) and the places of rows take two bytes each; more rows need four for a place.
_SHORT, _LONG = 2, 4
_LEAST_WEIGHT = 1e-3
FORMS = ("uniform", "codebook")
_VOCABULARY = ("embed", "head")
# Decide rather than compute: no format of ours touches them.
_KEPT = (".router", ".shared.gate")
_HEAD_BLOCK = 32
_FLOAT_BYTES, _SCALE_BYTES, _ZERO_BYTES = 4, 2, 1


@dataclass(frozen=True)
class CodebookMatrix:
    """A matrix whose rows, in groups, take their values from codebooks.

    Attributes:
        order: which row of the matrix each row here is.
        codes: of rows in that order.
        scales: of rows in that order, bfloat16 by value.
        codebooks: ascending values of each group, bfloat16 by value.
        bits: per code.
        group: rows that share a codebook; the last group may be smaller.
    """

    order: NDArray[np.intp]  # (N,)
    codes: NDArray[np.uint8]  # (N, K)
    scales: Floats  # (N,)
    codebooks: Floats  # (ceil(N / group), 2 ** bits)
    bits: int
    group: int

    @property
    def nbytes(self) -> int:
        """What it takes in a file."""
        place = _SHORT if len(self.order) <= 1 << 16 else _LONG
        shared = _SHORT * (self.scales.size + self.codebooks.size) + place * self.order.size
        return shared + len(self.codes) * packed_bytes(self.codes.shape[1], self.bits)

    def dequantize(self) -> Floats:  # (N, K)
        """The float matrix it stands for."""
        out = np.empty(self.codes.shape, np.float32)
        for number, codebook in enumerate(self.codebooks):
            rows = slice(number * self.group, (number + 1) * self.group)
            out[self.order[rows]] = codebook[self.codes[rows]] * self.scales[rows, None]
        return out


def quantize_codebook(
    weight: Floats,  # (N, K)
    bits: int,
    group: int = 16,
    statistics: InputStatistics | None = None,
) -> CodebookMatrix:
    """Quantizes a matrix; with statistics, squared errors count by the mean squares of their inputs.

    Args:
        bits: 2, 3 or 4.
        group: rows that share a codebook.

    Raises:
        UsageError: other bits, no rows in a group, or statistics that are not finite or of another matrix.
        CheckpointError: a weight is NaN or infinite.
    """
    if bits not in CODEBOOK_BITS or group < 1:
        raise UsageError(
            f"Codebooks of {bits} bits for {group} rows are not supported.", "Choose 2, 3 or 4 bits and a row at least."
        )
    check_finite(weight)
    n, k = weight.shape
    importance: NDArray[np.float64] = np.ones(k)
    if statistics is not None:
        statistics.check(k)
        mean = float(statistics.mean_square.mean(dtype=np.float64))
        if mean > 0:
            importance = statistics.mean_square.astype(np.float64) / mean + _LEAST_WEIGHT
    # By the largest first, so that squares neither overflow nor vanish.
    largest = np.abs(weight).max(axis=1, initial=0).astype(np.float64)
    relative = weight / np.where(largest > 0, largest, 1)[:, None]
    spread = np.sqrt(np.square(relative).mean(axis=1))
    scales = bfloat16.round_nearest((spread * largest).astype(np.float32))
    scales = np.where(scales == 0, np.float32(1), scales)
    # Rows whose largest weight is as many times their root mean square have about the same shape.
    order = np.argsort(np.where(spread > 0, 1 / np.where(spread > 0, spread, 1), 0), kind="stable")
    codes = np.empty((n, k), np.uint8)
    codebooks = np.zeros((-(-n // group), 2**bits), np.float32)
    for number in range(len(codebooks)):
        rows = order[number * group : (number + 1) * group]
        values = weight[rows] / scales[rows, None]
        # Errors are scaled back with their rows.
        counts = importance * np.square(scales[rows, None].astype(np.float64) / scales[rows].max())
        codebooks[number] = _codebook(values.ravel(), counts.ravel(), bits)
        codes[number * group : number * group + len(rows)] = _nearest(values, codebooks[number])
    return CodebookMatrix(order, codes, scales[order], codebooks, bits, group)


def _codebook(values: Floats, counts: NDArray[np.float64], bits: int) -> Floats:  # (M,), (M,) -> (2 ** bits,)
    """The values that minimise the weighted squared error to the nearest one: Lloyd's algorithm on sorted weights."""
    order = np.argsort(values, kind="stable")
    values, counts = values[order], counts[order]
    total = np.concatenate([[0.0], np.cumsum(counts)])
    moment = np.concatenate([[0.0], np.cumsum(counts * values)])
    centres = _first_centres(values, counts, bits)
    for _ in range(_ROUNDS):
        edges = np.searchsorted(values, (centres[1:] + centres[:-1]) / 2)
        edges = np.concatenate([[0], edges, [len(values)]])
        mass = np.diff(total[edges])
        moved = np.where(mass > 0, np.diff(moment[edges]) / np.where(mass > 0, mass, 1), centres)
        if np.array_equal(moved, centres):
            break
        centres = moved
    return bfloat16.round_nearest(np.sort(centres).astype(np.float32))


def _first_centres(values: Floats, counts: NDArray[np.float64], bits: int) -> NDArray[np.float64]:
    """Centres whose density is that of the weights to the third: the best for many centres."""
    count = 2**bits
    heights, edges = np.histogram(values, bins=16 * count, weights=counts)
    share = np.cumsum(np.cbrt(heights))
    if share[-1] <= 0:
        return np.full(count, float(values.mean()))
    places = (np.arange(count) + 0.5) / count * share[-1]
    return np.asarray(np.interp(places, np.concatenate([[0.0], share]), edges))


def _nearest(values: Floats, codebook: Floats) -> NDArray[np.uint8]:  # (n, K)
    """The index of the nearest value of the codebook."""
    edges = (codebook[1:] + codebook[:-1]) / 2
    return np.searchsorted(edges, values).astype(np.uint8)


@dataclass(frozen=True)
class Form:
    """What the matrices become.

    Attributes:
        kind: "uniform" as the bundles' own formats, of any width; "codebook" of rows in groups.
        group: values of a block, or rows that share a codebook.
        method: a quantizer of edgeinfer.quant, of uniform ones.
        head_bits: of embedding and head, rounded to the nearest in blocks of 32.
    """

    kind: str
    bits: int
    group: int = 32
    method: str = "rtn"
    symmetric: bool = False
    head_bits: int = 8

    def __post_init__(self) -> None:
        widths = CODEBOOK_BITS if self.kind == "codebook" else BITS
        known = self.kind in FORMS and self.method in METHODS
        if not known or self.bits not in widths or self.head_bits not in BITS or self.group < 1:
            hint = "Choose 2, 3, 4 or 8 bits, of codebooks 2 to 4, and a method of edgeinfer export."
            raise UsageError(f"There is no form {self}.", hint)

    def apply(self, name: str, weight: Floats, statistics: InputStatistics | None) -> tuple[Floats, int]:
        """A matrix in this form, as floats, and the bytes it would take.  # (N, K) -> (N, K)"""
        if name in _VOCABULARY:
            grid = Grid(self.head_bits, _HEAD_BLOCK, self.symmetric)
            return approximate(weight, grid), grid_bytes(weight.shape, grid)
        if self.kind == "codebook":
            matrix = quantize_codebook(weight, self.bits, self.group, statistics)
            return matrix.dequantize(), matrix.nbytes
        grid = Grid(self.bits, self.group, self.symmetric)
        return approximate(weight, grid, statistics, self.method), grid_bytes(weight.shape, grid)


def grid_bytes(shape: tuple[int, ...], grid: Grid) -> int:
    """Packed codes, and a bfloat16 scale and a zero point of a byte per block, as our own layout has them."""
    rows, columns = shape
    blocks = -(-columns // grid.size)
    per_block = _SCALE_BYTES + (0 if grid.symmetric else _ZERO_BYTES)
    return rows * (packed_bytes(columns, grid.bits) + per_block * blocks)


def simulate(bundle: Path, out: Path, form: Form, calibration: Path | None = None, tokens: int = 16384) -> int:
    """Writes the float bundle again with its matrices in a form, replacing what is at `out`.

    Args:
        calibration: UTF-8 text that tells which weights matter; each layer sees what the ones before it became.

    Returns:
        The bytes that the weights would take.

    Raises:
        UsageError: the bundle is not of float32 with a table of its weights, or the text is too short.
        BundleError, StorageError: it is damaged, or cannot be written.
    """
    source = open_bundle(bundle)
    manifest = source.manifest
    if manifest.decoder is None or not manifest.tensors or any(t.bits != 32 for t in manifest.tensors):
        raise UsageError(f"{bundle} is not a float32 bundle.", "Export it with --bits 32.")
    # What is copied gets new digests.
    source.verify()
    with write_bundle(out, replace_existing=True) as work:
        shutil.copytree(bundle, work, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST))
        with (work / WEIGHTS).open("r+b") as file:
            model = _Model(source, form, file)
            if calibration is not None:
                context = manifest.geometry.max_positions
                tokenizer = source.file("tokenizer.json").read_bytes()
                texts = read_calibration_text(calibration, tokenizer, tokens, context).texts
                options = CalibrationOptions(hessian=METHODS[form.method].needs == "hessian")
                calibrate(manifest.decoder, model, texts, model, options)
            size = model.write_rest()
        seal(work, manifest)
    return size


class _Model:
    """The float model while its matrices are replaced; reader and visitor of edgeinfer.quant.calibration."""

    def __init__(self, source: Bundle, form: Form, file: BinaryIO) -> None:
        self._source, self._form, self._file = source, form, file
        self._left = {entry.name: entry for entry in stored_tensors(source.manifest.tensors)}
        self._size = 0

    def tensor(self, name: str) -> Floats:
        """A tensor as it was."""
        return self._source.tensor(name)

    def rows(self, name: str, rows: NDArray[np.int64]) -> Floats:  # (M,) -> (M, D)
        """Rows of a tensor as it was."""
        return self._source.tensor(name)[rows]

    def layer(self, layer: int, statistics: dict[str, InputStatistics]) -> None:
        """Nothing is moved between matrices."""

    def embedding(self, rows: Floats) -> Floats:  # (M, D) -> (M, D)
        """Rows are rounded each for itself."""
        return self._form.apply("embed", rows, None)[0]

    def matrix(self, name: str, weight: Floats, statistics: InputStatistics | None) -> Floats:  # (N, K) -> (N, K)
        """Replaces a matrix."""
        if name.endswith(_KEPT):
            return weight
        return self._write(self._left.pop(name), weight, statistics)

    def _write(self, entry: TensorEntry, weight: Floats, statistics: InputStatistics | None) -> Floats:
        values, size = self._form.apply(entry.name, weight, statistics)
        write_floats(self._file, entry, lambda start, stop: values[start:stop])
        self._size += size
        return values

    def write_rest(self) -> int:
        """Replaces what no text was there for, and counts what stays as it is; the bytes of all."""
        for entry in self._left.values():
            if len(entry.shape) == 2 and not entry.name.endswith(_KEPT):
                self._write(entry, self._source.tensor(entry.name), None)
            else:
                self._size += _FLOAT_BYTES * math.prod(entry.shape)
        return self._size


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = argparse.ArgumentParser(
        "python -m edgeinfer.apps.bench.research.simulation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("bundle", type=Path, help="float32 bundle")
    parser.add_argument("out", type=Path, help="bundle directory to make or replace")
    parser.add_argument("--form", choices=FORMS, default="uniform")
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group", type=int, default=32, help="values of a block, or rows of a codebook (default: 32)")
    parser.add_argument("--method", default="rtn", help="of uniform forms (default: rtn)")
    parser.add_argument("--symmetric", action="store_true")
    parser.add_argument("--head-bits", type=int, default=8, help="of embedding and head (default: 8)")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--calibration-tokens", type=int, default=16384, metavar="N")
    args = parser.parse_args(arguments)
    try:
        form = Form(args.form, args.bits, args.group, args.method, args.symmetric, args.head_bits)
        size = simulate(args.bundle, args.out, form, args.calibration, args.calibration_tokens)
    except EdgeInferError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(json.dumps({"bundle": str(args.out), "weight_bytes": size}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
