"""Backends whose rows may have adapters (LoRA): what they promise, and how a sequence gets one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from edgeinfer.errors import Setting, UsageError
from edgeinfer.runtime.backends.contract import Backend

# The adapter of rows that have none.
NO_ADAPTER = -1


@runtime_checkable
class AdaptingBackend(Protocol):
    """What a backend can do besides whose rows may have adapters, each sequence one of them or none."""

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
