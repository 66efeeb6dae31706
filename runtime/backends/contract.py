"""The interface of backends to the engine: passes over new tokens of one sequence, and optional abilities. A pass
appends its S rows to the cache at rows `length .. length + S`; the engine then trims the cache or keeps some of them.
Arrays returned by a pass are views that the next pass overwrites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.core.errors import BackendError, CapabilityError, Setting, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.cache import ForkableCache, KVCache
from edgeinfer.runtime.backends.paged_cache import PagedCache

C = TypeVar("C", bound=ForkableCache)


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


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
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


class Backend(Protocol):
    """One sequence of one model, evaluated pass by pass."""

    @property
    def name(self) -> str:
        """Name for people: "onnx", "reference"."""

    @property
    def kernel(self) -> str:
        """What multiplies matrices: an instruction set of the native kernel, else the operator or library."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of the model."""

    @property
    def capabilities(self) -> Capabilities:
        """Abilities of `forward`."""

    @property
    def cache(self) -> KVCache:
        """Keys and values of the text so far, which a pass reads and appends to."""

    def forward(self, batch: Pass) -> PassResult:
        """Runs the model over S new tokens and appends their keys and values.

        A tree needs at least one token in the cache, which a prompt always leaves. With one, a row is what it is in a
        pass of its own text to the last bit where `Capabilities.paged` is; elsewhere up to rounding only: sums run over
        the cache in the order of its rows, those of other paths in between.
        """

    def cancel(self) -> None:
        """Ends the running pass from another thread; its `forward` raises PassCancelledError."""

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated now, by term: at least "kv" and "buffers"."""

    def close(self) -> None:
        """Frees everything; the backend is unusable afterwards."""


class ForkingBackend(Protocol[C]):
    """A backend that evaluates several sequences that are forks of one."""

    @property
    def cache(self) -> C:
        """The cache of `Backend.forward`; its forks are sequences too."""

    def forward_together(self, sequences: Sequence[tuple[C, Pass]]) -> list[PassResult]:
        """Evaluates new tokens of several sequences, each appended to its own cache. Every row is what it is in a pass
        of its own sequence alone."""


@runtime_checkable
class TogetherBackend(ForkingBackend[PagedCache], Protocol):
    """A backend that evaluates several sequences in one pass."""

    @property
    def free_pages(self) -> int:
        """Planned pages that sequences can still take."""

    def new_sequence(self, capacity: int) -> PagedCache:
        """An empty sequence, for `forward_together`."""

    def forward_together(self, sequences: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        """One pass over new tokens of several sequences, each appended to its own cache. Every row is what it is in a
        pass of its own sequence alone. Arrays are views that the next pass overwrites."""

    def forward_checked(self, sequences: Sequence[tuple[PagedCache, Pass]]) -> list[PassResult]:
        """`forward_together` for passes that `check_pass` has let through already."""


# Called with the row of the cache that a pass began at, the pass, and what it gave, in views as of `Backend.forward`.
PassObserver = Callable[[int, Pass, PassResult], None]


@runtime_checkable
class ObservedBackend(Protocol):
    """A backend whose passes over the text can be followed by a draft module."""

    observe_pass: PassObserver | None


@runtime_checkable
class RotatingBackend(Protocol):
    """A backend whose model rotates long texts differently from short ones (LongRoPE)."""

    # Tokens of the longest text that is rotated as a short one; None where a context is no longer.
    rotation_border: int | None
    rotates_long: bool  # whether passes rotate as in longer texts; rows in the cache are to be rotated alike

    def rotate_long(self, long: bool) -> None:
        """Rotates as in texts beyond the border from the next pass on, or as in those within it."""


def require(able: bool, backend: Backend, what: str, hint: str) -> None:
    if not able:
        raise CapabilityError(f"The {backend.name} backend cannot {what}.", hint)


def check_pass(backend: Backend, batch: Pass, cache: KVCache | None = None) -> None:
    """Refuses a pass that the backend's contract excludes; `cache`, by default the backend's own, is appended to."""
    tokens, tree, layer_mask, hidden = batch.tokens, batch.tree, batch.layer_mask, batch.hidden
    planes, experts = batch.planes, batch.experts
    size, can = len(tokens), backend.capabilities
    cache = backend.cache if cache is None else cache
    refused = {
        "skip layers": layer_mask is not None and not can.layer_skip,
        "resume from hidden states": hidden is not None and not can.hidden,
        "verify trees": tree is not None and not can.tree,
        "read one plane of its weights": planes == 1 and not can.high_planes,
        "choose experts of this model": experts is not None and not can.expert_counts,
    }
    for what, wanted in refused.items():
        if wanted:
            raise CapabilityError(f"The {backend.name} backend cannot {what}.", "Use a natively exported bundle.")
    if experts is not None and experts.count not in can.expert_counts:
        known = ", ".join(map(str, can.expert_counts))
        message = f"This model cannot run with {experts.count} experts for each token here."
        raise CapabilityError(message, f"Choose one of {known}.")
    if planes not in (1, 2):
        raise BackendError(f"A pass cannot read {planes} planes of the weights, only 1 or 2.")
    if size == 0 or len(batch.positions) != size:
        raise BackendError(f"A pass of {size} tokens has {len(batch.positions)} positions.")
    if cache.length + size > cache.capacity:
        rows = f"the cache holds {cache.length} of {cache.capacity}"
        raise BackendError(f"A pass of {size} tokens does not fit: {rows}.")
    # Python's own min and max: on the few numbers of a decoding step they take a tenth of numpy's time.
    wanted, ids = batch.rows.tolist(), tokens.tolist()
    if wanted and not 0 <= min(wanted) <= max(wanted) < size:
        raise BackendError(f"Logit rows {wanted} are outside a pass of {size} tokens.")
    if not 0 <= min(ids) <= max(ids) < backend.geometry.vocab_size:
        raise BackendError(f"A token id is outside the vocabulary of {backend.geometry.vocab_size}.")
    if tree is not None and (len(tree) != size or not all(-1 <= int(p) < i for i, p in enumerate(tree))):
        raise BackendError("A draft tree must name an earlier row, or -1, as the parent of each row.")
    if tree is not None and cache.length == 0:
        raise BackendError("A draft tree needs at least one token in the cache.")
    layers = backend.geometry.num_layers
    if layer_mask is not None and layer_mask.shape != (2 * layers,):
        raise BackendError(f"A layer mask of shape {layer_mask.shape} does not fit {layers} layers.")
    if hidden is not None and hidden.shape != (size, backend.geometry.hidden_size):
        raise BackendError(f"Hidden states of shape {hidden.shape} do not fit a pass of {size} tokens.")
    bias = None if experts is None else experts.bias
    if bias is not None and (bias.ndim != 2 or len(bias) != layers):
        raise BackendError(f"A bias of experts of shape {bias.shape} does not fit {layers} layers.")


# The adapter of rows that have none.
NO_ADAPTER = -1


@runtime_checkable
class AdaptingBackend(Protocol):
    """A backend whose rows may have adapters, each sequence one of them or none."""

    @property
    def adapters(self) -> Mapping[str, str]:
        """A digest of each, by its name."""

    def use_adapter(self, name: str | None) -> None:
        """Evaluates the next rows of the sequence with one of them, or with none; its cache must hold no others."""


def adapters_of(backend: Backend) -> Mapping[str, str]:
    """A digest of each adapter that rows of a backend may have, by its name."""
    return backend.adapters if isinstance(backend, AdaptingBackend) else {}


def adapter_place(adapters: Mapping[str, str], name: str | None) -> int:
    """The number of an adapter in passes."""
    return NO_ADAPTER if name is None else [*adapters].index(name)


def choose_adapter(backend: Backend, name: str | None) -> None:
    """Evaluates the next rows of a backend's sequence with an adapter, or with none."""
    known = adapters_of(backend)
    if name is not None and name not in known:
        hint = f"Choose one of {', '.join(known)}." if known else "Load the model with it, by " + Setting("adapters")
        raise UsageError(f"There is no adapter {name!r}.", hint)
    if isinstance(backend, AdaptingBackend):
        backend.use_adapter(name)


# Rows that are asked for at once: as many as the native kernel multiplies by one reading of the weights. Where all rows
# of a long draft are read after all, several such passes may take longer than one over all of them: 52.0 ms instead of
# 49.7 for 16 rows of a 0.5B (docs/log/2026-11-27.md).
HEAD_ROWS = 4


@runtime_checkable
class HeadBackend(Protocol):
    """A backend that computes the logits of a pass's rows later, a few at a time."""

    head_apart: bool

    def head(self, hidden: Floats) -> Floats:  # (R, D) -> (R, V)
        """The logits of rows by their states after the last layer: the bits that the rows' own pass would give. A view
        that the next pass overwrites, as this overwrites what the pass before gave; the cache stays as it is."""


def runs_apart(manifest: Manifest, layout: Layout) -> bool:
    """Whether the head of a model can run without its layers. A pass of the head alone overwrites which experts the
    pass before used, and what a draft module reads of it."""
    decoder = manifest.decoder
    if decoder is None or decoder.moe is not None or manifest.taps or manifest.module is not None:
        return False
    return manifest.capabilities_in(layout).paged
