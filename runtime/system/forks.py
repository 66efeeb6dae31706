"""What becomes of the parts of a program in the child of a fork, which has their memory but none of their threads."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Renewable(Protocol):
    """What has locks or threads, or rests on those of others."""

    def renew(self) -> None:
        """Reset to the initial state without waiting, in the child of a fork where other threads' locks may be held."""


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renewed_in_children(thing: Renewable) -> None:
    """Call `renew` of an object in the child of a fork."""
    _renewables.add(thing)


class RenewedLock:
    """A lock that nothing holds in the child of a fork."""

    def __init__(self) -> None:
        self.renew()
        renewed_in_children(self)

    def renew(self) -> None:
        self._lock = threading.Lock()

    @property
    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def keep_for_good(thing: object) -> None:
    """Never free an object whose end would wait for threads that do not exist."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def finalize_here(owner: object, call: Callable[..., object], *arguments: Any) -> weakref.finalize[..., Any]:
    """Like `weakref.finalize`, but only in this process: a child must not free its parent's resources."""
    process = os.getpid()
    return weakref.finalize(owner, lambda: call(*arguments) if os.getpid() == process else None)


def _renew() -> None:
    for thing in list(_renewables):
        thing.renew()


if hasattr(os, "register_at_fork"):  # Windows forks nothing
    os.register_at_fork(after_in_child=_renew)
