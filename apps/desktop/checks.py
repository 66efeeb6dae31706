"""Errors that only the chat app has, and checks of texts and numbers from outside before anything is done with them."""

from __future__ import annotations

import unicodedata
from typing import Any, ClassVar

from edgeinfer.errors import StorageError, UsageError, UserError


class NotFoundError(UserError):
    """There is no conversation, message or download of that name."""

    status: ClassVar[int] = 404
    code: ClassVar[str] = "not_found"


class ConflictError(UserError):
    """What was asked for cannot be done while a reply is being made."""

    status: ClassVar[int] = 409
    code: ClassVar[str] = "conflict"


class NoModelError(UserError):
    """A reply was asked for, and no model is loaded."""

    status: ClassVar[int] = 409
    code: ClassVar[str] = "no_model"


class DiskFullError(StorageError):
    """There is no room on the disk for what should be kept."""

    status: ClassVar[int] = 507
    code: ClassVar[str] = "storage"


class TooLargeError(UserError):
    """A request or file beyond what the app takes."""

    status: ClassVar[int] = 413
    code: ClassVar[str] = "too_large"


LONGEST_NAME, LONGEST_SEARCH = 4_096, 1_000
# Beyond, numbers of JSON are not the same for everybody who reads them.
_LARGEST = 2**53
# They turn round what stands beside them: a name would look like another.
_TURNING = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def check_text(text: str, name: str) -> str:
    """Checks a text of any number of lines."""
    if "\0" in text:
        raise UsageError(f"{name} has a NUL character.", "Leave it out.")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"{name} contains half of a surrogate pair, which is not a character."
            raise UsageError(message, "Send text in UTF-8.") from error
    return text


def check_name(text: str, name: str, most: int = LONGEST_NAME) -> str:
    """Checks a name, a path, an id or a search text: one line."""
    if len(text) > most:
        raise UsageError(f"{name} is longer than {most:,} characters.", "Shorten it.")
    if any(c in _TURNING or unicodedata.category(c) == "Cc" for c in text if not c.isprintable()):
        raise UsageError(f"{name} has control characters.", "Write it in one line of plain text.")
    return check_text(text, name)


def check_values(data: Any, name: str) -> None:
    """Checks everything in an object of JSON."""
    level = [data]
    while level:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += (*value.keys(), *value.values())
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str):
                check_text(value, name)
            elif isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
                raise UsageError(f"{name} has a number that is too large.", "Send smaller numbers.")
        level = inner
