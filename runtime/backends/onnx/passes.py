"""The arrays that a pass of the ONNX backends is bound to: buffers, padding, attention, experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgeinfer.bundle import graph
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.parts import MoESpec
from edgeinfer.core.errors import BackendError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import ExpertChoice
from edgeinfer.runtime.backends.kv_buffers import KVBuffers, visible_rows
from edgeinfer.runtime.backends.onnx.session import Binding
from edgeinfer.runtime.devices.arrays import DeviceArray

# Hides a score from the softmax: exp underflows to exactly 0, and unlike -inf no row can become NaN.
_HIDDEN = np.float32(-1e9)


def _copy_padding(bias: Floats, real: int) -> None:  # (S, T)
    """Lets each row of padding see itself in place of the last real row, and else what that sees. So it is that row
    again, up to rounding, and its experts are the same: any others would have to be fetched for nothing."""
    size, total = bias.shape
    start = total - size
    bias[real:] = bias[real - 1]
    bias[real:, start + real - 1 :] = _HIDDEN
    padding = np.arange(real, size)
    bias[padding, start + padding] = 0


class Buffers:
    """Memory for inputs and outputs of passes of up to `size` tokens and `rows` logit rows, shared by all shapes.
    `top_k` and `tapped`, the width of what is read of the target, are 0 in models without."""

    def __init__(self, geometry: Geometry, size: int, rows: int, top_k: int, tapped: int = 0, logits: int = 0) -> None:
        self.size, self.rows, self.layers = size, rows, geometry.num_layers
        self.tokens = np.zeros((1, size), np.int64)
        self.positions = np.zeros((1, size), np.int64)
        self.logit_rows = np.zeros(rows, np.int64)
        self.hidden_in = np.zeros((1, size, geometry.hidden_size), np.float32)
        self.hidden_out = np.zeros((1, size, geometry.hidden_size), np.float32)
        self.logits = np.zeros((rows, logits or geometry.vocab_size), np.float32)
        self.tapped = np.zeros((1, size, tapped), np.float32)
        self.experts = np.zeros(geometry.num_layers * size * top_k, np.int64)

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))


class BoundPass:
    """Views into the shared buffers for passes of one shape, and their binding."""

    binding: Binding
    bound: object = None  # whose rows attention reads: what is bound to lives as long as this is kept

    def __init__(self, buffers: Buffers, size: int, rows: int, resumes: bool, experts: int, block: int = 0) -> None:
        self._tokens = buffers.tokens[:, :size]
        self.positions = buffers.positions[0, :size]
        self._positions = buffers.positions[:, :size]
        self._rows = buffers.logit_rows[:rows]
        self._hidden = buffers.hidden_in[:, : size if resumes else 1]
        self.logits = buffers.logits[:rows]  # (R, V)
        self.tapped = buffers.tapped[:, : size - block]  # (1, S - block, W)
        self.hidden_out = buffers.hidden_out[:, :size]  # (1, S, D)
        chosen = (buffers.layers, size, experts)
        self.experts = buffers.experts[: math.prod(chosen)].reshape(chosen) if experts else None  # (L, S, k)
        self.inputs: dict[str, NDArray[Any]] = {
            graph.INPUT_IDS: self._tokens,
            graph.POSITION_IDS: self._positions,
            graph.LOGIT_ROWS: self._rows,
            graph.HIDDEN_IN: self._hidden,
            graph.USE_HIDDEN: np.array([resumes]),
        }

    def fill(self, tokens: Ints, positions: Ints, rows: Ints, hidden: Floats | None, *, apart: bool) -> None:
        """Writes the inputs of the next pass; padding repeats the last token, at the positions that follow if `apart`,
        else at its own."""
        size = len(tokens)
        self._tokens[0, :size] = tokens
        self._positions[0, :size] = positions
        self._rows[: len(rows)] = rows
        self._rows[len(rows) :] = 0
        for extra in range(self._tokens.shape[1] - size):
            self._tokens[0, size + extra] = tokens[-1]
            self._positions[0, size + extra] = positions[-1] + (1 + extra if apart else 0)
        if hidden is not None:
            self._hidden[0, :size] = hidden
            self._hidden[0, size:] = hidden[-1]

    def fill_tapped(self, tapped: Floats) -> None:  # (S, W)
        """Writes what a draft module reads of its target's rows; padding repeats the last."""
        self.tapped[0, : len(tapped)] = tapped
        self.tapped[0, len(tapped) :] = tapped[-1]


class ExpertInputs:
    """Arrays that stay where they are, so that they are bound once; a pass that chooses nothing writes one number."""

    def __init__(self, moe: MoESpec, layers: int) -> None:
        self.top_k = moe.top_k  # experts of a token in the whole model
        self.count = np.full(1, moe.top_k, np.int64)  # experts for each token. (1,)
        self.bias = np.zeros((layers, moe.experts), np.float32)  # added to the routers' scores before choosing. (L, E)
        self._biased = False

    def choose(self, choice: ExpertChoice | None) -> None:
        """Sets what the next pass may use; None is the whole model."""
        bias = None if choice is None else choice.bias
        if bias is not None and bias.shape != self.bias.shape:
            raise BackendError(f"A bias of experts of shape {bias.shape} does not fit {self.bias.shape}.")
        self.count[0] = self.top_k if choice is None else choice.count
        if bias is not None:
            self.bias[...] = bias
        elif self._biased:
            self.bias[...] = 0
        self._biased = bias is not None


class AttentionBias:
    """The attention bias, bound to every pass, as its shape changes with each; with `copies_padding` rows of padding
    are the last real row again, so that they choose its experts."""

    def __init__(self, window: int, copies_padding: bool) -> None:
        self._window = window
        self._copies_padding = copies_padding
        self._zeros = np.zeros(0, np.float32)

    def bind(self, step: BoundPass, room: int, tree: Ints | None, real: int, total: int) -> None:
        """Binds the bias of a pass of `real` rows and padding, with `total` rows in the cache after it, which has
        `room`."""
        size = len(step.positions)
        plain = tree is None and not (self._copies_padding and size > real)
        bias = self._no_bias(size, total, room) if plain else self._hiding(size, total, real, tree)
        step.binding.bind_ortvalue_input(graph.ATTENTION_BIAS, ort.OrtValue.ortvalue_from_numpy(bias))
        if self._window:
            windowed = self._hiding(size, total, real, tree, self._window)
            step.binding.bind_ortvalue_input(graph.WINDOW_BIAS, ort.OrtValue.ortvalue_from_numpy(windowed))

    def _hiding(self, size: int, total: int, real: int, tree: Ints | None, window: int = 0) -> Floats:  # (1, 1, S, T)
        """Hides from each row the slots it does not see."""
        bias, start = np.zeros((1, 1, size, total), np.float32), total - size
        seen = visible_rows(start, real, tree, window)
        bias[0, 0, :real, : start + real][~seen] = _HIDDEN
        if self._copies_padding and size > real:
            _copy_padding(bias[0, 0], real)
        return bias

    def _no_bias(self, size: int, total: int, room: int) -> Floats:  # (1, 1, S, T)
        if self._zeros.size < size * total:
            # Never written, so the zero pages of this buffer take no memory.
            self._zeros = np.zeros(size * room, np.float32)
        return self._zeros[: size * total].reshape(1, 1, size, total)


def bind_cache(binding: Binding, cache: KVBuffers) -> None:
    for layer, arrays in enumerate(zip(cache.keys, cache.values, strict=True)):
        names = zip(graph.past_names(layer), graph.present_names(layer), arrays, strict=True)
        for past, present, array in names:
            if isinstance(array, DeviceArray):  # a device may not write to the cache that it reads
                before, after = array.value, array.written
            else:
                before = after = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(past, before)
            binding.bind_ortvalue_output(present, after)


# Columns of the number of first slots, and of a row's own where it names that.
_PREFIX, _OWN = 1, 2
_NAMES_ITS_SLOT = -1

# Slots of a row: how many of the first, and the further ones.
Path = tuple[int, Sequence[int]]


class PathTables:
    """Memory for the paths of passes of up to `size` rows, which paged attention reads. A path is the first slots of
    its sequence and then some further ones, the last of all the row's own (edgeinfer.bundle.graph)."""

    def __init__(self, size: int, capacity: int, slots: int = 1) -> None:
        # For each row its sequence, the number of first slots it sees, where its further slots begin in `slots`, and
        # their number. (S, 4).
        self.rows: NDArray[np.int32] = np.zeros((size, 4), np.int32)
        self.slots: NDArray[np.int32] = np.zeros(slots, np.int32)  # further slots. (X,)
        self._counting: NDArray[np.int32] = np.arange(capacity + 1, dtype=np.int32)
        self._plain = True  # nothing but the second column is in use

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.slots.nbytes + self._counting.nbytes

    def tell_chain(self, start: int, size: int) -> None:
        """Set the paths of rows that follow `start` ones of the first sequence, each seeing all before it."""
        if not self._plain:
            self.rows[:] = 0
            self._plain = True
        self.rows[:size, _PREFIX] = self._counting[start + 1 : start + 1 + size]

    def tell_block(self, start: int, size: int, block: int) -> None:
        """Set the paths of rows that follow `start` ones of the first sequence: the last see all, the others nothing. A
        row sees something, be it the first slot. Who reads keys and values alone does not mind."""
        rows = self.rows[:size]
        rows[:] = 0, 1, 0, _NAMES_ITS_SLOT
        rows[:, _OWN] = self._counting[start : start + size]
        rows[size - block :, _PREFIX] = start + size
        self._plain = False

    def tell(self, sequences: Sequence[Sequence[Path]]) -> None:
        """Set the paths of the rows of each sequence, for whose further slots there must be room."""
        row = first = 0
        for sequence, paths in enumerate(sequences):
            for prefix, further in paths:
                self.rows[row] = sequence, prefix, first, len(further)
                self.slots[first : first + len(further)] = further
                first += len(further)
                row += 1
        self._plain = False


def paths_of(start: int, size: int, tree: Ints | None) -> list[Path]:
    """The paths of `size` rows behind `start` ones: of a chain, where there is no tree."""
    if tree is None:
        return [(start + row + 1, ()) for row in range(size)]
    paths: list[Path] = []
    for slot, parent in enumerate(tree.tolist(), start):
        prefix, further = paths[parent] if parent >= 0 else (start, ())
        paths.append((slot + 1, ()) if prefix == slot else (prefix, (*further, slot)))
    return paths


def repeated(path: Path, slot: int) -> Path:
    """The path of a row that is another one again, in a slot behind all others."""
    prefix, further = path
    return (prefix, (*further[:-1], slot)) if further else (prefix - 1, (slot,))
