"""Contexts: texts that a model evaluates once and keeps, to put before any prompt."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Literal

from edgeinfer.core.errors import PromptError, StorageError
from edgeinfer.core.options import require
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import decode_text, user_cache

Edits = Literal["evaluate", "turn"]
# The longest contexts of models hold less text.
_MOST_BYTES = 64 * 1000**2
# Seconds within which two writes of a file may have the same time, by the coarsest clock of a file system.
_ONE_TIME_S = 2.0


def rows_folder() -> Path:
    """The folder of this user's evaluated contexts; it need not exist."""
    return user_cache() / "edgeinfer" / "contexts"


class UnreadContextError(PromptError):
    """The text of a context cannot be read; `name` is its file name without folders."""

    def __init__(self, path: str | Path, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.name = Path(path).name


@dataclass(frozen=True)
class Context:
    """A text that is evaluated once and can then precede any prompt, with other contexts in any order.

    Attributes:
        path: path of the text, in UTF-8; with `content`, its name in messages.
        edits: if the file has changed since it was evaluated, "evaluate" evaluates all of it again; "turn" evaluates
            only the new part and rotates the keys after it to their new positions (PIE), which is lossy.
        rows: the file for its keys and values; None is one in the user's cache.
        content: the text itself, where it is not in a file.
    """

    path: str | Path
    edits: Edits = "evaluate"
    rows: str | Path | None = None
    content: str | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.path, str | Path), "path", self.path, "the path of a text file")
        require(self.edits in ("evaluate", "turn"), "edits", self.edits, '"evaluate" or "turn"')
        require(self.rows is None or isinstance(self.rows, str | Path), "rows", self.rows, "the path of a file")
        require(self.content is None or isinstance(self.content, str), "content", self.content, "a text")

    @property
    def name_of_rows(self) -> str:
        """The start of the names of its files in the user's cache, for any model."""
        source = f"file {Path(self.path).resolve()}" if self.content is None else f"text {self.content}"
        return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def kept_bytes(self) -> int:
        """Size of its rows in the user's cache, for all models; errors as `rows_folder`."""
        sizes = []
        for file in rows_folder().glob(f"{self.name_of_rows}-*"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile to make room
                sizes.append(file.stat().st_size)
        return sum(sizes)

    def forget(self) -> None:
        """Remove its rows of all models from the user's cache; StorageError where one cannot be removed."""
        for file in rows_folder().glob(f"{self.name_of_rows}-*"):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                message = f"{file} cannot be removed: {error.strerror}."
                raise StorageError(message, "Close what uses it, and try again.") from error

    def version(self) -> tuple[int, ...] | None:
        """A value that changes whenever the text does; None where the file is too new to be sure."""
        if self.content is not None:
            return ()
        try:
            found = Path(self.path).stat()
        except (OSError, ValueError):  # `text` says what is wrong
            return None
        if time.time() - found.st_mtime < _ONE_TIME_S:
            return None
        return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino

    def text(self) -> str:
        """The current text; UnreadContextError if it cannot be read, is empty, far too large or not UTF-8."""
        if self.content is None:
            text = self._read()
        elif len(self.content) > _MOST_BYTES:
            raise UnreadContextError(self.path, f"{self.path} is far too large for a context.", "Cut it into several.")
        else:
            text = self.content.strip()
        if not text:
            raise UnreadContextError(self.path, f"{self.path} is empty.", "Leave it out.")
        return text

    def _read(self) -> str:
        path = Path(self.path)
        try:
            if not path.is_file():
                raise UnreadContextError(path, f"{path} is not a file.", "Name an existing text file.")
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            message = f"Cannot read {path}: {getattr(error, 'strerror', error)}."
            raise UnreadContextError(path, message, "Name an existing text file.") from error
        if len(data) > _MOST_BYTES:
            raise UnreadContextError(path, f"{path} is far too large for a context.", "Cut it into several.")
        try:
            return decode_text(data, path).strip()
        except PromptError as error:
            raise UnreadContextError(path, error.message, error.hint) from error
