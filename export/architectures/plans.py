"""Which checkpoint tensors make up each of a bundle's, and what is done to them on their way."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from edgeinfer.bundle.experts import find_expert
from edgeinfer.bundle.peft import Module
from edgeinfer.bundle.tables import is_looked_up
from edgeinfer.export.source.packed import PACKINGS
from edgeinfer.quant.policy import QuantScheme

Shape = tuple[int, ...]

_WEIGHT = ".weight"


@dataclass(frozen=True)
class HeadPadding:
    """Zeros after each attention head along one axis; see edgeinfer.export.architectures.described.

    Attributes:
        axis: 0 for rows, 1 for columns.
        width, wide: of a head, before and after.
        scale: multiplies the values.
    """

    axis: int
    heads: int
    width: int
    wide: int
    scale: float = 1.0


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor, or one of those stacked in it, and what is done to it on its way into the bundle.

    Attributes:
        shape: of the one that is taken.
        index, stacked: which of how many of this shape the checkpoint's tensor stacks along a first axis of its own; 0
            where it stacks none.
        joined: of a matrix, the axis along which they follow one another instead.
        split: rows of ours that a row of the checkpoint's matrix holds one behind the other.
        turned: the checkpoint's matrix has columns for rows.
        packing: how the checkpoint's numbers are packed, by edgeinfer.export.source.packed; "" for floats.
        scale: multiplies the values.
        offset: is added to them before that (norms stored as what is more than one).
        softplus: log(1 + exp(x)) of them is taken before all else.
        pieces: of each how many rows of the checkpoint's tensor, from which on, how many are taken; empty for all.
        heads: of a matrix, those of which each has columns for rows in the bundle; 0 where none has.
    """

    name: str
    shape: Shape
    padding: HeadPadding | None = None
    index: int = 0
    stacked: int = 0
    joined: int | None = None
    split: int = 1
    turned: bool = False
    packing: str = ""
    scale: float = 1.0
    offset: float = 0.0
    softplus: bool = False
    pieces: tuple[int, int, int] | tuple[()] = ()
    heads: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the checkpoint's tensor, row for row and column for column, times a factor at most."""
        plain = Source(self.name, self.shape, turned=self.turned, scale=self.scale)
        return self == plain

    @property
    def stored_shape(self) -> Shape:
        """Shape of the checkpoint's tensor, unpacked."""
        if self.joined is not None:
            return tuple(size * self.stacked if axis == self.joined else size for axis, size in enumerate(self.shape))
        if self.split > 1:
            return (self.shape[0] // self.split, self.shape[1] * self.split)
        shape = self.shape
        if self.pieces:
            period, _, share = self.pieces
            shape = (shape[0] // share * period, *shape[1:])
        shape = shape[::-1] if self.turned else shape
        return (self.stacked, *shape) if self.stacked else shape

    @property
    def padded_shape(self) -> Shape:
        """Shape in the bundle."""
        if self.heads:
            return (self.heads * self.shape[1], self.shape[0] // self.heads)
        if self.padding is None:
            return self.shape
        axis, size = self.padding.axis, self.padding.heads * self.padding.wide
        return (*self.shape[:axis], size, *self.shape[axis + 1 :])


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the bundle: checkpoint tensors put together along the rows."""

    name: str
    sources: tuple[Source, ...]

    def changed(self, *, scale: float = 1.0, offset: float = 0.0) -> TensorPlan:
        """The same with other values: what is stored plus the offset, times the scale."""
        changed = (dataclasses.replace(source, scale=scale, offset=offset) for source in self.sources)
        return TensorPlan(self.name, tuple(changed))

    def packed(self, packing: str) -> TensorPlan:
        """The same of packed tensors."""
        return TensorPlan(self.name, tuple(dataclasses.replace(source, packing=packing) for source in self.sources))

    @property
    def shape(self) -> Shape:
        """Shape of the whole."""
        first = self.sources[0].padded_shape
        return (sum(s.padded_shape[0] for s in self.sources), *first[1:])

    @property
    def parameters(self) -> int:
        """Number of the checkpoint's weights in it; padding does not count."""
        return sum(math.prod(s.shape) for s in self.sources)

    def kept(self, bits: int) -> QuantScheme | None:
        """The scheme that holds the checkpoint's packed values as they are, where so many bits are asked for."""
        packing, *others = {source.packing for source in self.sources}
        if others or not packing:
            return None
        return PACKINGS[packing].scheme(self.shape[1], bits)

    @property
    def is_vocabulary(self) -> bool:
        """Whether this is the LM head or an embedding."""
        return self.name == "head" or is_looked_up(self.name)


def plan(name: str, *sources: tuple[str, Shape]) -> TensorPlan:
    """Plans a tensor that concatenates whole checkpoint tensors, given by name and shape."""
    return TensorPlan(name, tuple(Source(*s) for s in sources))


def adaptable_modules(plan: TensorPlan) -> tuple[Module, ...]:
    """The linear modules whose rows follow one another in a planned matrix; none where adapters of them would not fit
    it: of experts and embeddings, and where columns are moved, or rows and columns filled up."""
    if len(plan.shape) != 2 or is_looked_up(plan.name) or find_expert(plan.name) is not None:
        return ()
    whole = (dataclasses.replace(source, pieces=()).is_whole for source in plan.sources)
    if not all(whole) or not all(source.name.endswith(_WEIGHT) for source in plan.sources):
        return ()
    return tuple(Module(s.name.removesuffix(_WEIGHT), s.shape[0], s.scale, s.pieces) for s in plan.sources)
