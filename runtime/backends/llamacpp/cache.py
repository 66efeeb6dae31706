"""The KV cache of a llama.cpp context, whose sequence 0 holds the text, and the one of models with recurrent layers. A
draft tree's other paths are sequences of their own, which share its cells, and so is what is copied in and out; between
calls only those of a tree that waits for `keep` are there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import BackendError, CapabilityError, Setting
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Ints
from edgeinfer.runtime.backends.cache import (
    CacheSnapshot,
    Edit,
    OpaqueRows,
    RowBlob,
    check_length,
    check_type,
    row_range,
)
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.backends.forks import CopiedFork
from edgeinfer.runtime.backends.llamacpp.context import LlamaContext

TEXT = 0  # sequence
_PIECE = 64  # rows of a text that are copied together


@dataclass(frozen=True)
class TreePaths:
    """The paths of a draft tree, from the root to a leaf each. The first belongs to sequence 0, which holds the
    context, the next to sequence 1 and so on."""

    start: int  # tokens of the context
    paths: tuple[tuple[int, ...], ...]  # rows of each path, from the root on
    members: tuple[tuple[int, ...], ...]  # sequences that each row belongs to, ascending

    @classmethod
    def of(cls, tree: Ints, start: int) -> TreePaths:  # (S,)
        """The paths of a tree, each row naming its parent among the earlier rows, or -1, behind so many tokens."""
        parents = tree.tolist()
        leaves = sorted(set(range(len(parents))) - set(parents))
        paths, members = [], [list[int]() for _ in parents]
        for sequence, leaf in enumerate(leaves):
            path, row = [], leaf
            while row >= 0:
                path.append(row)
                members[row].append(sequence)
                row = parents[row]
            paths.append(tuple(reversed(path)))
        return cls(start, tuple(paths), tuple(map(tuple, members)))

    @property
    def depths(self) -> list[int]:
        """The depth of each row, 0 for roots."""
        depths = [0] * len(self.members)
        for path in self.paths:
            for depth, row in enumerate(path):
                depths[row] = depth
        return depths


class LlamaCache(KVCache):
    """Implements `KVCache` over the cells of a context, whose layers may have a sliding `window` of tokens, else 0."""

    editable = False

    def __init__(self, context: LlamaContext, kind: tuple[str, str, int], capacity: int, window: int) -> None:
        self._context = context
        self._kind = kind  # of snapshots: type, engine with sizes, bytes of a row
        self.capacity = capacity
        # A copy lacks what a window hides from its last row; windows of some models begin at multiples of their length.
        self._piece = _PIECE if window % _PIECE == 0 else window
        self.length = 0  # tokens it holds, all rows of a pending tree counted
        self.pending: TreePaths | None = None  # the draft tree of which no rows were kept yet

    @property
    def nbytes(self) -> int:
        return self._context.kv_bytes

    def check_kept(self) -> None:
        """Refuses to go on with a tree of which no rows were kept; one of a single path is a chain."""
        if self.pending is not None and len(self.pending.paths) == 1:
            self.pending = None
        if self.pending is not None:
            raise BackendError("No rows of the last draft tree were kept or dropped yet.")

    def begin(self, start: int, size: int) -> int:
        """Number of rows of a pass behind `start` that can be evaluated at once: all of them."""
        return size

    def passed(self, start: int, size: int) -> None:
        self.length = start + size

    def branch(self, tree: TreePaths) -> None:
        """Share the text with all sequences of a tree."""
        for sequence in range(1, len(tree.paths)):
            self._context.copy(TEXT, sequence, 0, tree.start)

    def drop_pass(self, start: int, tree: TreePaths | None) -> None:
        """Drops what a failed pass left behind `start`."""
        for sequence in range(1, 1 if tree is None else min(len(tree.paths), self._context.options.sequences)):
            self._context.cut(sequence, 0)
        self._context.cut(TEXT, start)
        self.length, self.pending = start, None

    def trim(self, length: int) -> None:
        """Drops all rows from `length` on; of a pending tree, the first rows can stay where they are a path."""
        check_length(length, self.length)
        tree = self.pending
        if tree is not None:
            self._keep(tree.start, range(max(length - tree.start, 0)))
        if length < self.length:
            self._context.cut(TEXT, length)
            self.length = length

    def clear(self) -> None:
        self._context.clear()
        self.length, self.pending = 0, None

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        tree = self.pending
        if tree is None:
            if list(rows) != list(range(len(rows))):
                raise BackendError(f"Rows {list(rows)} of a pass do not follow each other.")
            self.trim(start + len(rows))
            return
        wanted = tuple(rows)
        sequence = next((s for s, path in enumerate(tree.paths) if path[: len(wanted)] == wanted), None)
        if sequence is None or start != tree.start:
            raise BackendError(f"Rows {list(rows)} of a draft tree are no path from token {tree.start} on.")
        stop = start + len(rows)
        if sequence != TEXT:
            self._context.cut(TEXT, start)
            self._context.copy(sequence, TEXT, start, stop)
        else:
            self._context.cut(TEXT, stop)
        for other in range(1, len(tree.paths)):
            self._context.cut(other, 0)
        self.pending, self.length = None, stop

    def fork(self) -> CopiedFork:
        return CopiedFork(self, self.length)

    def snapshot(self, start: int = 0, stop: int | None = None) -> OpaqueRows:
        self.check_kept()
        start, stop = row_range(start, stop, self.length)
        borders = [start, *range(start - start % self._piece + self._piece, stop, self._piece), stop]
        blobs = [RowBlob(a, b, self._copy(a, b)) for a, b in itertools.pairwise(borders) if a < b]
        return OpaqueRows(start, stop - start, blobs, *self._kind)

    def _copy(self, start: int, stop: int) -> NDArray[np.uint8]:  # (bytes,)
        spare = self._context.options.spare
        self._context.copy(TEXT, spare, start, stop)
        try:
            return self._context.state(spare)
        finally:
            self._context.cut(spare, 0)

    def append(self, snapshot: CacheSnapshot) -> None:
        self.check_kept()
        rows, spare = self._checked(snapshot), self._context.options.spare
        for blob in rows.blobs:
            self._context.set_state(spare, blob.data)
            stop = min(blob.stop, rows.start + rows.length)
            self._context.copy(spare, TEXT, self.length, stop)
            self._context.cut(spare, 0)
            self.length = stop

    def _checked(self, snapshot: CacheSnapshot) -> OpaqueRows:
        """A snapshot of this kind of cache, of rows behind those in use."""
        kv, form, _ = self._kind
        if isinstance(snapshot, OpaqueRows) and snapshot.kv == kv and snapshot.scales != form:
            raise BackendError("The snapshot belongs to another model.")
        check_type(snapshot, self.capacity - self.length, kv, form)
        assert isinstance(snapshot, OpaqueRows), "other copies have other scales"
        if snapshot.length and snapshot.start != self.length:
            raise BackendError(f"Rows copied behind {snapshot.start} others cannot follow {self.length}.")
        return snapshot

    def rewrite(self, edit: Edit) -> None:
        raise CapabilityError("llama.cpp's cache cannot be edited.", "Use " + Setting("overflow", "window") + ".")

    def drop(self, start: int, stop: int) -> None:
        """llama.cpp turns the keys itself, before the next pass."""
        self.check_kept()
        self._context.drop(TEXT, start, stop)
        self.length -= stop - start


@dataclass(frozen=True)
class _States:
    """The states of all recurrent layers behind so many tokens, in llama.cpp's own format."""

    position: int
    blob: NDArray[np.uint8]


class RecurrentCache(LlamaCache):
    """Implements `KVCache` where some layers, or all, keep a state instead of keys and values.

    llama.cpp keeps the states behind the last rows of a pass where it was asked for some and the architecture has them
    (`n_rs_seq`), so these rows can be cut off again at no cost, but one row stays. Going back further takes a copy of
    the states: the one of `mark`, or the one of `hold`.
    """

    def __init__(self, context: LlamaContext, kind: tuple[str, str, int], capacity: int, window: int) -> None:
        super().__init__(context, kind, capacity, window)
        self.copyable = not window  # there are no sliding windows, of which llama.cpp copies only what they show
        self._mark: _States | None = None
        self._base: _States | None = None
        self._wanted: int | None = None
        self._lowest = 0  # that the states can be cut to without a copy
        self._lost = self._cut = False
        self._whole: RowBlob | None = None  # a copy of all, while parts of it are asked for

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(each.blob.nbytes for each in self._copies)

    def begin(self, start: int, size: int) -> int:
        if self._lost:
            raise BackendError(f"The state of recurrent layers is not there after {start} tokens.")
        self._whole = None
        if self._cut:
            # Only now, as llama.cpp goes back once behind a pass, and a round may go back twice.
            self._context.cut(TEXT, start)
            self._cut = False
        ahead = (self._wanted or 0) - start
        return ahead if 0 < ahead < size else size

    def passed(self, start: int, size: int) -> None:
        self.length = start + size
        self._lowest = max(start + 1, self.length - self._context.options.rollback)
        if self._wanted == self.length:
            self._base = self._copied()

    def drop_pass(self, start: int, tree: TreePaths | None) -> None:
        """Mark the states as lost back to the last copy, as a failed pass has changed them."""
        self.length, self._lost, self._whole = start, True, None

    def rewindable_to(self, length: int) -> int:
        length = min(length, self.length)
        if not self._lost and length >= self._lowest:
            return length
        return max((each.position for each in self._copies if each.position <= length), default=0)

    def trim(self, length: int) -> None:
        check_length(length, self.length)
        self._whole = None
        if length == self.length and not self._lost:
            return
        found = next((each for each in self._copies if each.position == length), None)
        if length == 0:
            self._context.cut(TEXT, 0)
            self._cut = False
        elif not self._lost and length >= self._lowest:
            self._cut = True
        elif found is not None:
            self._context.set_state(TEXT, found.blob, partial=True)
            self._context.cut(TEXT, length)
            self._cut = False
        else:
            raise BackendError(f"The state of recurrent layers cannot go back to {length} tokens.")
        self.length, self._lowest = length, min(self._lowest, length)
        self._lost = False
        self._mark, self._base = (
            None if each is None or each.position > length else each for each in (self._mark, self._base)
        )

    def _keep(self, start: int, rows: Sequence[int]) -> None:
        if list(rows) != list(range(len(rows))):
            raise BackendError(f"Rows {list(rows)} of a pass do not follow each other.")
        self.trim(start + len(rows))

    def clear(self) -> None:
        super().clear()
        self._mark = self._base = self._wanted = None
        self._lowest, self._lost, self._cut, self._whole = 0, False, False, None

    def mark(self) -> None:
        if not self._lost and self.length:
            self._mark = self._copied()

    @property
    def marked(self) -> int:
        return 0 if self._mark is None else self._mark.position

    def hold(self, length: int | None) -> None:
        self._wanted = length
        if self._wanted is None:
            self._base = None
        elif self._wanted == self.length and not self._lost:
            self._base = self._copied()

    def snapshot(self, start: int = 0, stop: int | None = None) -> OpaqueRows:
        start, stop = row_range(start, stop, self.length)
        size = self._context.state_bytes(TEXT, partial=True)
        if start == stop or self._lost:
            return OpaqueRows(start, stop - start, (), *self._kind, None, size)
        if self._whole is None:
            self._cut_now()
            self._whole = RowBlob(0, self.length, self._context.state(TEXT))
        found = next((each.blob for each in self._copies if each.position == stop), None)
        state = None if stop == self.length else found
        return OpaqueRows(start, stop - start, [self._whole], *self._kind, state, size)

    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds copied rows behind those in use; a text goes on once rows with a state were added."""
        rows = self._checked(snapshot)
        if rows.length == 0:
            return
        self.length, self._lost, self._whole = self.length + rows.length, True, None
        if not rows.rewindable_to(rows.length) or not rows.blobs:
            return
        # llama.cpp replaces a sequence as a whole; the rows before these are those of the same tokens.
        self._context.set_state(TEXT, rows.blobs[-1].data)
        if rows.state is not None:
            self._context.set_state(TEXT, rows.state, partial=True)
            self._context.cut(TEXT, self.length)
        self._lowest, self._lost, self._cut = self.length, False, False

    def drop(self, start: int, stop: int) -> None:
        raise CapabilityError(
            "The states of recurrent layers cannot forget tokens.", "Load it with " + Setting("overflow", "stop") + "."
        )

    @property
    def _copies(self) -> tuple[_States, ...]:
        return tuple(each for each in (self._mark, self._base) if each is not None)

    def _cut_now(self) -> None:
        """Makes a delayed cut, so that a copied state is the one at the end of the text."""
        if self._cut:
            self._context.cut(TEXT, self.length)
            self._cut, self._lowest = False, self.length

    def _copied(self) -> _States:
        if self._base is not None and self._base.position == self.length:
            return self._base
        self._cut_now()
        return _States(self.length, self._context.state(TEXT, partial=True))
