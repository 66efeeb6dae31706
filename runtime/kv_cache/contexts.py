"""Texts whose rows are made once, kept in files, edited, and put before any prompt.

PIE (He et al. 2024): an edit inside a text evaluates only the new tokens. Rows behind it keep what they know of the
text before the edit, so they are not those that evaluating the text again would give.

APE (Yang et al. 2025) lets all contexts begin at the position behind a prefix that they share, so that their keys need
not be touched, and divides the scores of their keys by a temperature. Placed in sequence, each begins where the one
before ends, by turning its keys.

Files are session files whose text is JSON: "format", "version", "tokenizer" (digest of the vocabulary), "prefix" (token
ids) and "edits", how often the rows were made from an earlier version of the text by its edits.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from edgeinfer.bundle.spec import DecoderSpec
from edgeinfer.bundle.writing import storage_errors
from edgeinfer.core.contexts import rows_folder
from edgeinfer.core.errors import ModelError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ContextUse
from edgeinfer.core.user_files import make_private, written
from edgeinfer.runtime.backends.cache import CacheSnapshot, CopiedRows
from edgeinfer.runtime.backends.paged_cache import PagedCache
from edgeinfer.runtime.kv_cache.context_shift.policy import LayerRotations
from edgeinfer.runtime.kv_cache.session_file import Origin, SessionFile, Stamp, open_session, write_session

# Runs that stay inside an edit have this many tokens at least: fewer are sooner evaluated than turned.
_LEAST = 16


@dataclass(frozen=True)
class EditPart:
    """A run of tokens of the edited text."""

    # `start`, `stop`: where it is now.
    start: int
    stop: int
    before: int | None  # where it was; None where it is new


def parts_of_edit(old: Sequence[int], new: Sequence[int]) -> Iterator[EditPart]:
    """The edited text in order, in parts that were there before and parts that were not."""
    start = _common(old, new)
    same = _common(old[start:][::-1], new[start:][::-1])
    if start:
        yield EditPart(0, start, 0)
    from difflib import SequenceMatcher  # takes time that other replies need not spend

    # What lies between the first and the last difference is compared alone: comparing takes more than its length.
    last = len(new) - same
    matcher = SequenceMatcher(None, old[start : len(old) - same], new[start:last], autojunk=False)
    done = start
    for run in matcher.get_matching_blocks():
        if run.size < _LEAST:
            continue
        if done < start + run.b:
            yield EditPart(done, start + run.b, None)
        done = start + run.b + run.size
        yield EditPart(start + run.b, done, start + run.a)
    if done < last:
        yield EditPart(done, last, None)
    if same:
        yield EditPart(last, len(new), len(old) - same)


def _common(old: Sequence[int], new: Sequence[int]) -> int:
    size = min(len(old), len(new))
    return next((place for place in range(size) if old[place] != new[place]), size)


class ContextRows(Protocol):
    """Rows of a text behind a prefix, wherever they are kept."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the rows."""

    @property
    def edits(self) -> int:
        """Number of times that rows were made by editing an earlier version's."""

    @property
    def there(self) -> bool:
        """Whether the rows are still where they were kept."""

    def pieces(self) -> Iterator[CacheSnapshot]:
        """The rows, one run after the other."""


@dataclass(frozen=True, eq=False)
class RowsInMemory:
    """Implements `ContextRows` by rows in memory."""

    tokens: tuple[int, ...]
    rows: CopiedRows
    edits: int = 0
    there: ClassVar[bool] = True

    @classmethod
    def of(cls, tokens: tuple[int, ...], rows: CacheSnapshot, edits: int = 0) -> RowsInMemory:
        return cls(tokens, CopiedRows(rows.length, rows.keys, rows.values, rows.kv, rows.scales), edits)

    def pieces(self) -> Iterator[CacheSnapshot]:
        yield self.rows


def _parallel(lengths: Sequence[int]) -> list[int]:
    return [0] * len(lengths)


def _in_sequence(lengths: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(lengths, initial=0))[:-1]


# How far behind the prefix contexts of these lengths begin.
PLACEMENTS: dict[str, Callable[[Sequence[int]], list[int]]] = {"parallel": _parallel, "sequence": _in_sequence}


class JoinedContexts:
    """A prefix and contexts as a cache holds them before a prompt; every context was evaluated behind the prefix."""

    def __init__(
        self, spec: DecoderSpec, prefix: ContextRows, contexts: Sequence[ContextRows], use: ContextUse
    ) -> None:
        self._spec = spec
        self._rows = (prefix, *contexts)
        self.use = use  # what replies report about them
        self._prefix = len(prefix.tokens)
        lengths = [len(context.tokens) for context in contexts]
        self._starts = [0, *(self._prefix + start for start in PLACEMENTS[use.placement](lengths))]
        self._behind = max(start + size for start, size in zip(self._starts, [self._prefix, *lengths], strict=True))
        self.tokens = tuple(token for rows in self._rows for token in rows.tokens)  # the tokens of prefix and contexts

    @property
    def there(self) -> bool:
        """Whether the rows are still where they were kept."""
        return all(rows.there for rows in self._rows)

    def enter(self, cache: PagedCache) -> None:
        """Puts the rows in place of all in a cache, and has what follows be placed behind the last of them."""
        cache.trim(0)
        for rows, start in zip(self._rows, self._starts, strict=True):
            first = cache.length
            for piece in rows.pieces():
                cache.append(piece)
            if start > self._prefix:
                turn(cache, self._spec, first, self._prefix, start)
        if self.use.temperature != 1:
            # Scores are products with keys, so these are divided in their place.
            factor = np.float32(1 / self.use.temperature)
            for layer in range(self._spec.num_layers):
                cache.write_keys(layer, self._prefix, cache.read_keys(layer, self._prefix, cache.length) * factor)
        cache.shift = len(self.tokens) - self._behind


def turn(cache: PagedCache, spec: DecoderSpec, first: int, old: int, new: int) -> None:
    """Turns the keys of the rows from `first` on as if the first of them had stood at position `new`, not `old`."""
    size = cache.length - first
    rotations = LayerRotations(spec, max(old, new) + size)
    moved = rotations.mover(np.arange(old, old + size), np.arange(new, new + size))
    for layer in range(spec.num_layers):
        cache.write_keys(layer, first, moved(layer, cache.read_keys(layer, first, cache.length)))


_FORMAT, _VERSION = "edgeinfer-context", 1
_REMOVE = "Remove it, and the context is evaluated again."
# What this user's contexts take on disk at most: some 500,000 tokens of a 0.5B in int8.
_MOST_BYTES = 4 * 1000**3


@dataclass(frozen=True)
class Making:
    """Everything that rows depend on besides their own text."""

    origin: Origin  # model, adapter, and how the model runs here
    tokenizer: str  # digest of the vocabulary
    prefix: tuple[int, ...]  # the tokens behind which they were made
    # `kv`, `scales`: type of the cache.
    kv: str
    scales: str

    def digest(self) -> str:
        parts = [self.origin.model, self.origin.run, self.tokenizer, self.prefix, self.kv, self.scales]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Implements `ContextRows` by a file."""

    path: Path
    making: Making
    tokens: tuple[int, ...]
    edits: int  # how often the rows were made from an earlier version's
    stamp: Stamp  # the file's stamp when it was written or last checked whole

    @property
    def there(self) -> bool:
        try:
            return Stamp.of(self.path.stat()) == self.stamp
        except OSError:
            return False

    def pieces(self) -> Iterator[CacheSnapshot]:
        with _saying_what_to_do(), open_session(self.path, self.stamp) as file:
            yield from file.pieces()


def kept_place(making: Making, name: str) -> Path:
    """Where this user's rows of a text are kept, by `Context.name_of_rows`; the file need not exist."""
    folder = rows_folder()
    with storage_errors(folder):
        make_private(folder)
    return folder / f"{name}-{making.digest()[:32]}.session"


def keep_rows(path: Path, making: Making, tokens: tuple[int, ...], rows: CacheSnapshot, edits: int = 0) -> KeptRows:
    """Writes rows to a file, whole or not at all."""
    header = {"format": _FORMAT, "version": _VERSION, "tokenizer": making.tokenizer, "edits": edits}
    write_session(path, making.origin, tokens, rows.part, json.dumps(header | {"prefix": making.prefix}))
    if path.parent == rows_folder():
        _make_room(path)
    with storage_errors(path):
        return KeptRows(path, making, tokens, edits, Stamp.of(path.stat()))


def read_rows(path: Path, making: Making) -> KeptRows | None:
    """The rows that a file keeps, all of which is checked; None where it is not there, or keeps rows that were made
    otherwise by the same model."""
    if not path.exists():
        return None
    with _saying_what_to_do(), open_session(path) as file:
        header = _header(file)
        prefix = tuple(header["prefix"])
        found = Making(file.origin, header["tokenizer"], prefix, file.kv, file.scales)
        if (found.origin.model, found.tokenizer) != (making.origin.model, making.tokenizer):
            raise ModelError(f"{path} is a context of another model.", "Name another file, or remove this one.")
        return KeptRows(path, found, file.tokens, header["edits"], file.stamp) if found == making else None


def _header(file: SessionFile) -> dict[str, Any]:
    try:
        header = json.loads(file.text)
    except (ValueError, RecursionError):
        header = None
    known = isinstance(header, dict) and (header.get("format"), header.get("version")) == (_FORMAT, _VERSION)
    prefix = header.get("prefix") if known else None
    sound = isinstance(prefix, list) and all(type(token) is int for token in prefix)
    sound = sound and isinstance(header.get("tokenizer"), str) and type(header.get("edits")) is int
    if not sound:
        raise UsageError(f"{file.path} keeps no context.", "Name another file, or remove this one.")
    return dict(header)


@contextlib.contextmanager
def _saying_what_to_do() -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except UsageError as error:
        raise UsageError(error.message, _REMOVE) from error


def _make_room(path: Path) -> None:
    """Removes the contexts that were written longest ago beyond what all may take."""
    others = sorted((each for each in path.parent.glob("*.session") if each != path), key=written, reverse=True)
    left = _MOST_BYTES - path.stat().st_size
    for other in others:
        with contextlib.suppress(OSError):
            left -= other.stat().st_size
            if left < 0:
                other.unlink()
