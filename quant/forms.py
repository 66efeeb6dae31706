"""The values that blocks of each format may take, a scale times a code plus a base, and which scales and bases exist.

Everything is transposed: columns of a matrix are rows here, so that arithmetic runs along many matrix rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle import bfloat16
from edgeinfer.quant.blocks import Codes, Grid

Floats = NDArray[np.float32]


@dataclass
class State:
    """Quantized rows while they change: values are points times scales plus bases."""

    points: Floats  # (K', n), codes, or what a code stands for in a book
    scales: Floats  # (blocks, n)
    bases: Floats  # (blocks, n)
    # What scales, and minima, are multiples of, for some blocks each; empty where they are numbers of their own.
    units: Floats  # (0, 1 or 2, units, n)

    @classmethod
    def joined(cls, parts: Sequence[State]) -> State:
        """The state of some rows and more."""
        fields = zip(*((part.points, part.scales, part.bases, part.units) for part in parts), strict=True)
        return cls(*(np.concatenate(field, axis=-1) for field in fields))

    def values(self) -> Floats:  # (K', n)
        blocks, n = self.scales.shape
        values = self.points.reshape(blocks, -1, n) * self.scales[:, None]
        values += self.bases[:, None]
        return values.reshape(-1, n)

    def replace(self, columns: NDArray[np.bool_], other: State) -> None:
        """Takes these columns of another state with the same units."""
        for mine, others in ((self.points, other.points), (self.scales, other.scales), (self.bases, other.bases)):
            mine[:, columns] = others[:, columns]


@dataclass(frozen=True)
class BlockForm:
    """A format: its codes, and what its scales and bases may be."""

    bits: int
    size: int  # values that share a scale
    # What a base is: minus the scale times the middle, or times a code; or minus a minimum.
    zero: Literal["middle", "code", "minimum"]
    middle: int = 0
    # Scales, and minima, are these multiples of units, each shared by some blocks; or else numbers of their own.
    levels: tuple[int, int] | None = None
    shared: int = 1
    halves: bool = False  # own numbers and units are float16, not bfloat16
    book: tuple[int, ...] | None = None  # what codes stand for, ascending

    @classmethod
    def of(cls, grid: Grid) -> BlockForm:
        """The form of the bundle's own layouts."""
        return cls(grid.bits, grid.size, "middle" if grid.symmetric else "code", grid.middle)

    @property
    def top(self) -> int:
        return (1 << self.bits) - 1

    @cached_property
    def _nearest(self) -> Floats:  # (512,)
        """The book's points nearest to multiples of a half from the least on."""
        book = np.array(self.book, np.float32)
        places = book[0] + np.arange(2 * (book[-1] - book[0]) + 1) / 2
        nearest: Floats = book[np.abs(places[:, None] - book).argmin(axis=1)]
        return nearest

    def round(self, points: Floats) -> None:
        """Replaces values in units of a scale, less the base, by the nearest points."""
        if self.book is None:
            np.rint(points, out=points)
            np.maximum(points, np.float32(0), out=points)
            np.minimum(points, np.float32(self.top), out=points)
            return
        least, most = np.float32(self.book[0]), np.float32(self.book[-1])
        np.clip(points, least, most, out=points)
        places = np.rint((points - least) * np.float32(2)).astype(np.int16)
        np.take(self._nearest, places, out=points, mode="clip")

    def codes(self, points: Floats) -> NDArray[np.uint8]:
        if self.book is None:
            return points.astype(np.uint8)
        places = np.zeros(256, np.uint8)
        places[np.array(self.book) - self.book[0]] = np.arange(len(self.book))
        return places[(points - np.float32(self.book[0])).astype(np.uint8)]

    def scales_near(self, wanted: Floats, state: State, block: int) -> Floats:  # (..., n)
        """The nearest scales that a block may have; never zero where there is a choice."""
        if self.levels is None:
            return half(wanted) if self.halves else bfloat16.round_nearest(wanted)
        unit = state.units[0, block // self.shared]
        level = np.clip(np.rint(wanted * inverse(unit)), *self.levels)
        return np.asarray(np.where(level == 0, 1, level) * unit, np.float32)

    def bases_near(self, wanted: Floats, scale: Floats, state: State, block: int) -> Floats:  # (..., n)
        """The nearest bases that a block may have with these scales."""
        if self.zero == "middle":
            return np.float32(-self.middle) * scale
        if self.zero == "code":
            return np.asarray(-scale * np.clip(np.rint(-wanted * inverse(scale)), 0, self.top), np.float32)
        if self.levels is None:
            return half(wanted)
        unit = state.units[1, block // self.shared]
        return np.asarray(-unit * np.clip(np.rint(-wanted * inverse(unit)), 0, self.levels[1]), np.float32)

    def scale_step(self, state: State, block: int) -> Floats | np.float32:  # (n,)
        """The least by which scales differ, if all do by the same."""
        if self.levels is None:
            return np.float32(0)
        unit: Floats = state.units[0, block // self.shared]
        return unit

    def base_step(self, scale: Floats, state: State, block: int) -> Floats:  # (n,)
        """About the least by which bases differ that matters."""
        if self.zero == "code" or self.levels is None:
            return scale
        unit: Floats = state.units[1, block // self.shared]
        return unit

    def state(self, codes: Codes) -> State:
        """The state of codes of the bundle's own layouts."""
        scales, zeros = np.ascontiguousarray(codes.scales.T), codes.zeros.T
        points = np.ascontiguousarray(codes.values.T.astype(np.float32))
        return State(points, scales, -scales * zeros, np.empty((0, 0, scales.shape[1]), np.float32))

    def own_codes(self, state: State) -> Codes:
        """Reverses `state`."""
        zeros = np.rint(state.bases / -state.scales)
        return Codes(
            np.ascontiguousarray(state.points.T.astype(np.uint8)),
            np.ascontiguousarray(state.scales.T),
            np.ascontiguousarray(zeros.T.astype(np.uint8)),
        )


def inverse(values: Floats) -> Floats:
    """One over each value, 0 for zeros."""
    shares: Floats = np.divide(np.float32(1), values, out=np.zeros_like(values), where=values != 0)
    return shares


def half(values: Floats) -> Floats:
    """Values as float16 has them."""
    return values.astype(np.float16).astype(np.float32)
