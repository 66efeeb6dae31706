"""Files of contexts: session files that tell besides what the rows were made behind, and how.

Their text is JSON: "format", "version", "tokenizer" (digest of the vocabulary), "prefix" (token ids) and "edits", how
often the rows were made of an earlier version of the text by its edits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgeinfer.bundle.writing import storage_errors
from edgeinfer.contexts import rows_folder
from edgeinfer.errors import ModelError, UsageError
from edgeinfer.records import dataclass
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.kv_cache.session_file import Origin, SessionFile, Stamp, open_session, write_session
from edgeinfer.user_files import make_private, written

_FORMAT, _VERSION = "edgeinfer-context", 1
_REMOVE = "Remove it, and the context is evaluated again."
# What this user's contexts take on disk at most: some 500,000 tokens of a 0.5B in int8.
_MOST_BYTES = 4 * 1000**3


@dataclass(frozen=True)
class Making:
    """What rows depend on besides their own text.

    Attributes:
        origin: model, adapter, and how the model runs here.
        tokenizer: digest of the vocabulary.
        prefix: that they were made behind.
        kv, scales: of the cache.
    """

    origin: Origin
    tokenizer: str
    prefix: tuple[int, ...]
    kv: str
    scales: str

    def digest(self) -> str:
        """Of all that."""
        parts = [self.origin.model, self.origin.run, self.tokenizer, self.prefix, self.kv, self.scales]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Implements `ContextRows` by a file.

    Attributes:
        edits: how often rows were made of an earlier version by its edits.
        stamp: of the file when it was written or all of it was checked.
    """

    path: Path
    making: Making
    tokens: tuple[int, ...]
    edits: int
    stamp: Stamp

    @property
    def there(self) -> bool:
        """Whether the file is still there, as it was."""
        try:
            return Stamp.of(self.path.stat()) == self.stamp
        except OSError:
            return False

    def pieces(self) -> Iterator[CacheSnapshot]:
        """The rows, a few megabytes at a time."""
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
    told = {"format": _FORMAT, "version": _VERSION, "tokenizer": making.tokenizer, "edits": edits}
    write_session(path, making.origin, tokens, rows.part, json.dumps(told | {"prefix": making.prefix}))
    if path.parent == rows_folder():
        _make_room(path)
    with storage_errors(path):
        return KeptRows(path, making, tokens, edits, Stamp.of(path.stat()))


def read_rows(path: Path, making: Making) -> KeptRows | None:
    """The rows that a file keeps, all of which is checked; None where it is not there, or keeps rows that were made
    otherwise by the same model.
    """
    if not path.exists():
        return None
    with _saying_what_to_do(), open_session(path) as file:
        told = _told(file)
        prefix = tuple(told["prefix"])
        found = Making(file.origin, told["tokenizer"], prefix, file.kv, file.scales)
        if (found.origin.model, found.tokenizer) != (making.origin.model, making.tokenizer):
            raise ModelError(f"{path} is a context of another model.", "Name another file, or remove this one.")
        return KeptRows(path, found, file.tokens, told["edits"], file.stamp) if found == making else None


def _told(file: SessionFile) -> dict[str, Any]:
    try:
        told = json.loads(file.text)
    except (ValueError, RecursionError):
        told = None
    known = isinstance(told, dict) and (told.get("format"), told.get("version")) == (_FORMAT, _VERSION)
    prefix = told.get("prefix") if known else None
    sound = isinstance(prefix, list) and all(type(token) is int for token in prefix)
    sound = sound and isinstance(told.get("tokenizer"), str) and type(told.get("edits")) is int
    if not sound:
        raise UsageError(f"{file.path} keeps no context.", "Name another file, or remove this one.")
    return dict(told)


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
