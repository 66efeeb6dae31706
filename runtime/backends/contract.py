"""The contract of backends: one model, which evaluates passes over new tokens of sequences, each with its own cache. A
pass appends its S rows to the cache at rows `length .. length + S`; its sequence then trims the cache or keeps some of
them. Arrays of a result are views that the next pass overwrites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.core.errors import BackendError, CapabilityError, Setting, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import CacheSnapshot, Edit


class PassCancelledError(BackendError):
    """`Backend.cancel` ended the pass; the cache is as it was before it."""


class PreemptedError(BackendError):
    """The pass did not take place, as older sequences need the pages of this one: empty its cache, and evaluate its
    text again, which waits until there are pages for it."""


@dataclass(frozen=True)
class ExpertChoice:
    """The experts that tokens of a pass may use where the routers do not choose alone."""

    count: int  # experts for each token, one of `Capabilities.expert_counts`
    # Added to the routers' scores before choosing: 0, or -1e9 for an expert that may not be chosen; None is 0 for all.
    # (L, E).
    bias: Floats | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Input of one pass: S new tokens and how they are evaluated."""

    tokens: Ints  # (S,)
    positions: Ints  # (S,)
    # Indices of the new tokens whose logits are wanted; may be empty.
    rows: Ints  # (R,)
    _: KW_ONLY
    # Parent row of each row, -1 for the context; None is a chain.
    tree: Ints | None = None  # (S,)
    # [2i] attention and [2i+1] MLP of layer i, true where they run; None runs all.
    layer_mask: NDArray[np.bool_] | None = None  # (2 L,)
    # Enters the first layer that runs instead of the embeddings.
    hidden: Floats | None = None  # (S, D)
    planes: int = 2  # 1 reads the layers' 8-bit matrices by their high 4-bit plane alone, 2 whole
    experts: ExpertChoice | None = None  # None leaves the choice to the routers: the whole model
    # The target's states that a draft module reads for each row, where `hidden` is not given.
    tapped: Floats | None = None  # (S, W), or (S - block, W)
    # How many of the last rows are the block of a module that drafts in blocks: they see the cache and each other.
    # `tapped` has the rows before them, whose keys and values are kept.
    block: int | None = None
    # Tokens that each draft row behind the root is expected to add; a pass shared with other texts may leave out the
    # last rows, and gives the logits of the rows it has. None leaves out nothing.
    gains: tuple[float, ...] | None = None  # (S,)

    @property
    def is_chain(self) -> bool:
        """Whether each row follows the one before it, so that the rows may as well be evaluated in several passes."""
        return self.tree is None and self.block is None

    def goes_with(self, other: Pass) -> bool:
        """Whether the rows of both go through the same weights in the same way, so that one pass can have both."""
        if self.planes != other.planes or (self.hidden is None) != (other.hidden is None):
            return False
        if not _same(self.layer_mask, other.layer_mask):
            return False
        if self.experts is None or other.experts is None:
            return self.experts is other.experts
        return self.experts.count == other.experts.count and _same(self.experts.bias, other.experts.bias)


def _same(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


class PassResult(NamedTuple):
    """Outcome of one pass."""

    logits: Floats  # (R, V), one row for each requested row
    # (S, D) after the last layer that ran, before the final norm; None where the backend has none.
    hidden: Floats | None
    # (L, S, k) chosen for each token, -1 in layers without experts, in those that did not run, and for experts that
    # were not used; None where the model has none.
    experts: Ints | None = None
    # (S, W) hidden states that a draft module reads; None where the bundle has none inside.
    tapped: Floats | None = None

    def copy(self) -> PassResult:
        """A copy in arrays that no pass overwrites."""
        hidden, tapped = (None if array is None else array.copy() for array in (self.hidden, self.tapped))
        experts = None if self.experts is None else self.experts.copy()
        return PassResult(self.logits.copy(), hidden, experts, tapped)


class PassObserver(Protocol):
    """Follows the passes of a backend; what it is shown are views."""

    def passed(self, cache: KVCache, start: int, batch: Pass, result: PassResult) -> None:
        """A pass appended its rows to a cache, from row `start` on."""

    def kept(self, cache: KVCache, start: int, rows: Sequence[int]) -> None:
        """Only these rows stay of the pass that began at row `start`."""


class KVCache(ABC):
    """Keys and values of one sequence in every layer, a row for each token that was evaluated. The defaults are those
    of caches that can be trimmed to any length."""

    length: int  # rows in use
    capacity: int  # rows there may be
    adapter: str | None = None  # name of the adapter of the rows that passes append; all rows have the same
    copyable: bool = True  # whether rows can be copied out and in
    editable: bool = True  # whether rows can be rewritten
    observers: Sequence[PassObserver] = ()  # the backend's

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return 0

    @abstractmethod
    def trim(self, length: int) -> None:
        """Drops all rows from `length` on. Costs nothing. Until they are overwritten they stay what they are, for a
        pass that starts there and masks the layers that wrote them."""

    @abstractmethod
    def clear(self) -> None:
        """Drops all rows and gives their memory back, as far as it was not all taken at the beginning."""

    @abstractmethod
    def fork(self) -> KVCache:
        """A sequence with the same rows, if `Backend.can_fork`. Where it is none of its own, the rows must stay in this
        one for as long as it is used."""

    def keep(self, start: int, rows: Sequence[int]) -> None:
        """After a pass that began at row `start`: keeps these of its rows, in this order, and drops the others."""
        self._keep(start, rows)
        for observer in self.observers:
            observer.kept(self, start, rows)

    @abstractmethod
    def _keep(self, start: int, rows: Sequence[int]) -> None:
        """Does what `keep` says."""

    @abstractmethod
    def snapshot(self, start: int = 0, stop: int | None = None) -> CacheSnapshot:
        """All rows, or rows start..stop-1, as they are now: copied, or held where they lie."""

    @abstractmethod
    def append(self, snapshot: CacheSnapshot) -> None:
        """Adds rows behind those in use, as the pass that made them had done."""

    @abstractmethod
    def rewrite(self, edit: Edit) -> None:
        """Replaces the rows in use: calls `edit` for each layer in order and stores what it returns. Keys are as
        cached, rotated by the position they were fed with. One layer's floats are alive at a time. Where `edit` fails,
        the cache is empty afterwards."""

    def drop(self, start: int, stop: int) -> None:
        """Drops the rows start..stop-1 from within the text, where the cache is not `editable`; those behind them come
        to be as if they had been fed at their new places."""
        raise CapabilityError("The rows of this cache cannot move.", "Use " + Setting("overflow", "stop") + ".")

    def rewindable_to(self, length: int) -> int:
        """To how many rows, `length` at most, the cache can be trimmed for a text to go on there. All of them, but
        where recurrent layers have a state, which cannot go back to any row."""
        return length

    def mark(self) -> None:  # noqa: B027
        """Keeps the state needed to trim the cache to this length later, if it could not be otherwise."""

    @property
    def marked(self) -> int:
        """To how many rows it can be trimmed for a mark; 0 where that takes none, or there is none."""
        return 0

    def hold(self, length: int | None) -> None:  # noqa: B027
        """Has passes from now on leave it possible to trim the cache to `length` again; None: to where each begins. Of
        a cache that can be trimmed to any length nothing changes."""


class Backend(ABC):
    """One model. It holds no text: `new_sequence` makes caches, `forward` evaluates new tokens of some of them."""

    name: str  # for people: "onnx", "reference"
    kernel: str  # what multiplies matrices: an instruction set of the native kernel, else the operator or library
    geometry: Geometry
    capabilities: Capabilities  # of `forward`
    max_sequences: int = 1  # that can have rows at the same time, besides forks
    adapters: Mapping[str, str] = MappingProxyType({})  # a digest of each adapter that a cache may have, by its name
    # Tokens of the longest text that is rotated as a short one (LongRoPE); None where a context is no longer.
    rotation_border: int | None = None
    rotates_long: bool = False  # whether passes rotate as in longer texts; rows in caches are to be rotated alike
    shows_states: bool = False  # whether a draft module can read the states that passes show observers
    head_apart: bool = False  # whether `head` can compute logits of a pass's rows later

    def __init__(self) -> None:
        self.observers: list[PassObserver] = []

    @property
    def free_pages(self) -> int:
        """Pages that sequences can still take; a large number where nothing is paged."""
        return 1 << 40

    @abstractmethod
    def new_sequence(self, capacity: int) -> KVCache:
        """An empty cache for a text of at most this many tokens; a BackendError where there can be no further one."""

    def can_fork(self, cache: KVCache) -> bool:
        return self.max_sequences > 1 or (cache.copyable and self.capabilities.copies)

    def fork_bytes(self, cache: KVCache, rows: int) -> int:
        """Bytes of copies of so many rows in forks; none where sequences share what holds them."""
        return 0 if self.max_sequences > 1 else cache.snapshot(0, 0).bytes_for(rows)

    @abstractmethod
    def forward(self, passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        """Runs the model over new tokens of several sequences, each appended to its own cache. Every row is what it is
        in a pass of its own sequence alone. Passes that share one must go together, see `Pass.goes_with`.

        A tree needs at least one token in the cache, which a prompt always leaves. With one, a row is what it is in a
        pass of its own text to the last bit where `Capabilities.paged` is; elsewhere up to rounding only: sums run over
        the cache in the order of its rows, those of other paths in between.
        """

    def head(self, cache: KVCache, hidden: Floats) -> Floats:  # (R, D) -> (R, V)
        """The logits of rows of a sequence by their states after the last layer: the bits that the rows' own pass would
        give. A view that the next pass overwrites, as this overwrites what the pass before gave."""
        raise CapabilityError(f"The {self.name} backend has no head of its own.", "Use a natively exported bundle.")

    def rotate_long(self, long: bool) -> None:  # noqa: B027
        """Rotates as in texts beyond the border from the next pass on, or as in those within it."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends the running pass from another thread; its `forward` raises PassCancelledError."""

    @abstractmethod
    def nbytes(self) -> dict[str, int]:
        """Bytes allocated now, by term: at least "kv" and "buffers"."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; the backend is unusable afterwards."""


def require(able: bool, backend: Backend, what: str, hint: str) -> None:
    if not able:
        raise CapabilityError(f"The {backend.name} backend cannot {what}.", hint)


def check_pass(backend: Backend, cache: KVCache, batch: Pass) -> None:
    """Refuses a pass that the backend's contract excludes."""
    size, length = len(batch.tokens), cache.length
    if size == 0 or len(batch.positions) != size:
        raise BackendError(f"A pass of {size} tokens has {len(batch.positions)} positions.")
    if length + size > cache.capacity:
        rows = f"the cache holds {length} of {cache.capacity}"
        raise BackendError(f"A pass of {size} tokens does not fit: {rows}.")
    # Python's own min and max: on the few numbers of a decoding step they take a tenth of numpy's time.
    wanted, ids = batch.rows.tolist(), batch.tokens.tolist()
    if wanted and not 0 <= min(wanted) <= max(wanted) < size:
        raise BackendError(f"Logit rows {wanted} are outside a pass of {size} tokens.")
    if not 0 <= min(ids) <= max(ids) < backend.geometry.vocab_size:
        raise BackendError(f"A token id is outside the vocabulary of {backend.geometry.vocab_size}.")
    tree, layer_mask, hidden, planes, experts = batch.tree, batch.layer_mask, batch.hidden, batch.planes, batch.experts
    if tree is None and layer_mask is None and hidden is None and planes == 2 and experts is None:
        return
    can = backend.capabilities
    refused = {
        "skip layers": layer_mask is not None and not can.layer_skip,
        "resume from hidden states": hidden is not None and not can.hidden,
        "verify trees": tree is not None and not can.tree,
        "read one plane of its weights": planes == 1 and not can.high_planes,
        "choose experts of this model": experts is not None and not can.expert_counts,
    }
    for what, asked in refused.items():
        if asked:
            raise CapabilityError(f"The {backend.name} backend cannot {what}.", "Use a natively exported bundle.")
    if experts is not None and experts.count not in can.expert_counts:
        known = ", ".join(map(str, can.expert_counts))
        message = f"This model cannot run with {experts.count} experts for each token here."
        raise CapabilityError(message, f"Choose one of {known}.")
    if planes not in (1, 2):
        raise BackendError(f"A pass cannot read {planes} planes of the weights, only 1 or 2.")
    if tree is not None and (len(tree) != size or not all(-1 <= int(p) < i for i, p in enumerate(tree))):
        raise BackendError("A draft tree must name an earlier row, or -1, as the parent of each row.")
    if tree is not None and length == 0:
        raise BackendError("A draft tree needs at least one token in the cache.")
    layers = backend.geometry.num_layers
    if layer_mask is not None and layer_mask.shape != (2 * layers,):
        raise BackendError(f"A layer mask of shape {layer_mask.shape} does not fit {layers} layers.")
    if hidden is not None and hidden.shape != (size, backend.geometry.hidden_size):
        raise BackendError(f"Hidden states of shape {hidden.shape} do not fit a pass of {size} tokens.")
    bias = None if experts is None else experts.bias
    if bias is not None and (bias.ndim != 2 or len(bias) != layers):
        raise BackendError(f"A bias of experts of shape {bias.shape} does not fit {layers} layers.")


def check_adapter(backend: Backend, name: str | None) -> None:
    """Refuses an adapter that the rows of a backend cannot have."""
    known = backend.adapters
    if name is not None and name not in known:
        hint = f"Choose one of {', '.join(known)}." if known else "Load the model with it, by " + Setting("adapters")
        raise UsageError(f"There is no adapter {name!r}.", hint)


# Rows that are asked for at once: as many as the native kernel multiplies by one reading of the weights. Where all rows
# of a long draft are read after all, several such passes may take longer than one over all of them: 52.0 ms instead of
# 49.7 for 16 rows of a 0.5B (docs/log/2026-11-27.md).
HEAD_ROWS = 4


def runs_apart(manifest: Manifest, layout: Layout) -> bool:
    """Whether the head of a model can run without its layers. A pass of the head alone overwrites which experts the
    pass before used, and what a draft module reads of it."""
    decoder = manifest.decoder
    if decoder is None or decoder.moe is not None or manifest.taps or manifest.module is not None:
        return False
    return manifest.capabilities_in(layout).paged
