"""Errors that only the chat app has, each with the status of HTTP that it means; knows nothing of what raises them."""

from __future__ import annotations

from typing import ClassVar

from edgeinfer.errors import StorageError, UserError

__all__ = ["ConflictError", "DiskFullError", "NoModelError", "NotFoundError", "TooLargeError"]


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
