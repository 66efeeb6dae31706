"""Makes the rows of contexts: each behind the same prefix, whole, or of an earlier version of its text by its edits."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Iterator

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec, uncommon_fields
from edgeinfer.core.errors import CapabilityError, ContextLengthError, Setting
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.decoding.sequence import Passes, Sequence
from edgeinfer.runtime.kv_cache.contexts import ContextRows, EditPart, parts_of_edit, turn

# Parts of decoders whose keys cannot be turned, or are none of the layer's own.
_UNKNOWN = ("norm_after_rope", "full_heads", "kv_sources")


def require_contexts(sequence: Sequence, spec: DecoderSpec | None) -> tuple[PagedCache, DecoderSpec]:
    """The cache and the decoder that contexts are put together with."""
    cache = sequence.cache
    if not isinstance(cache, PagedCache) or spec is None:
        hint = "Load a bundle where the native kernel works, or put the texts into the prompt."
        raise CapabilityError(f"The {sequence.backend.name} backend cannot put contexts together.", hint)
    if odd := _odd(sequence, spec):
        message = f"This model has {odd}, so contexts cannot be evaluated apart."
        raise CapabilityError(message, "Put the texts into the prompt.")
    if sequence.context_shift is not None:
        message = "Contexts do not go with a context that forgets."
        raise CapabilityError(message, "Load the model with " + Setting("overflow", "stop"))
    return cache, spec


class ContextMaker:
    """Evaluates contexts behind a prefix of at least one token, in the cache of a sequence, whose text is forgotten."""

    def __init__(
        self,
        sequence: Sequence,
        spec: DecoderSpec | None,
        prefix: abc.Sequence[int],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._cache, self._spec = require_contexts(sequence, spec)
        self._sequence, self._prefix, self._progress = sequence, tuple(prefix), progress

    def prefix(self) -> Passes[CacheSnapshot]:
        yield from self._begin()
        return self._cache.snapshot(0, len(self._prefix))

    def whole(self, tokens: abc.Sequence[int]) -> Passes[CacheSnapshot]:
        """Rows of a context, all of which is evaluated."""
        self._check(tokens)
        yield from self._begin()
        yield from self._feed(tokens)
        return self._made()

    def edited(self, tokens: abc.Sequence[int], before: ContextRows) -> Passes[tuple[CacheSnapshot, int]]:
        """Rows of a context with an earlier version in the cache, and how many of its tokens were evaluated now."""
        self._check(tokens)
        yield from self._begin()
        evaluated, rows, behind = 0, _Reading(before), len(self._prefix)
        try:
            for part in parts_of_edit(before.tokens, tokens):
                if part.before is None:
                    yield from self._feed(tokens[part.start : part.stop])
                    evaluated += part.stop - part.start
                    continue
                first = self._cache.length
                self._sequence.append(tokens, rows.of(part), of=-behind)
                if part.before != part.start:
                    turn(self._cache, self._spec, first, behind + part.before, behind + part.start)
            return self._made(), evaluated
        finally:
            # They are not quite those of the text, so no other reply may go on from them.
            self._sequence.truncate(min(behind, self._cache.length))

    def _begin(self) -> Passes[None]:
        """Empties the cache of all but the prefix."""
        sequence, size = self._sequence, len(self._prefix)
        if sequence.cached_tokens[:size] == self._prefix:
            sequence.truncate(size)
        else:
            sequence.restart()
            yield from self._feed(self._prefix)

    def _feed(self, tokens: abc.Sequence[int]) -> Passes[None]:
        for start in range(0, len(tokens), self._sequence.chunk):
            piece = tokens[start : start + self._sequence.chunk]
            yield from self._sequence.feed(piece, np.zeros(0, np.int64))
            if self._progress is not None:
                self._progress(len(piece))

    def _made(self) -> CacheSnapshot:
        return self._cache.snapshot(len(self._prefix))

    def _check(self, tokens: abc.Sequence[int]) -> None:
        wanted, capacity = len(self._prefix) + len(tokens), self._cache.capacity
        if wanted > capacity:
            message = f"A context of {len(tokens)} tokens does not fit: the model was loaded for {capacity} in all."
            raise ContextLengthError(message, "Shorten it, or load the model with a larger " + Setting("context") + ".")


class _Reading:
    """Rows of an earlier version, read once from its beginning to its end."""

    def __init__(self, before: ContextRows) -> None:
        self._pieces = before.pieces()
        self._piece: CacheSnapshot | None = None
        self._start = self._stop = 0  # of the piece

    def of(self, part: EditPart) -> Iterator[CacheSnapshot]:
        """Rows of a part at its former place, behind all parts requested."""
        assert part.before is not None
        first, last = part.before, part.before + part.stop - part.start
        while first < last:
            while self._stop <= first:
                self._piece = next(self._pieces)
                self._start, self._stop = self._stop, self._stop + self._piece.length
            assert self._piece is not None
            stop = min(last, self._stop)
            yield self._piece.part(first - self._start, stop - self._start)
            first = stop


def _odd(sequence: Sequence, spec: DecoderSpec) -> str:
    """Say why a model's contexts cannot be evaluated separately; empty if they can."""
    backend = sequence.backend
    if spec.mixers:
        return "recurrent layers"
    if spec.window_size:
        return "sliding windows"
    if backend.rotation_border is not None:
        return "other rotations for long texts"
    unknown = [name for name in _UNKNOWN if name in uncommon_fields(spec)]
    return f"{unknown[0]}={getattr(spec, unknown[0])!r}" if unknown else ""
