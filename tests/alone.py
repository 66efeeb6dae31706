"""A backend with one sequence of its own, for tests that run its passes one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.cache import CacheSnapshot
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassResult

B = TypeVar("B", bound=Backend)


class Alone(Generic[B]):
    """A backend, `model`, and the `cache` of a sequence; whatever else is asked of this is asked of the backend."""

    def __init__(self, model: B, capacity: int) -> None:
        self.model = model
        self.cache: Any = model.new_sequence(capacity)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Pass) -> PassResult:
        return self.model.forward([(self.cache, batch)])[0]

    def forward_together(self, passes: Sequence[tuple[KVCache, Pass]]) -> list[PassResult]:
        return self.model.forward(passes)

    def head(self, hidden: Floats) -> Floats:  # (R, D) -> (R, V)
        return self.model.head(self.cache, hidden)

    def use_adapter(self, name: str | None) -> None:
        self.cache.adapter = name

    def close(self) -> None:
        self.model.close()


def restore(cache: KVCache, snapshot: CacheSnapshot) -> None:
    """Put rows in the place of all."""
    cache.trim(0)
    cache.append(snapshot)
