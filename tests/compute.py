"""What tests of replies that take less compute share; knows nothing of any policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from edgeinfer.runtime.backends.contract import Backend, KVCache
from edgeinfer.runtime.layer_skip import reduced_compute
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts


@contextlib.contextmanager
def even_costs() -> Iterator[None]:
    """Blocks that cost the same, whatever else the machine does."""

    def costs(backend: Backend, cache: KVCache, **options: Any) -> BlockCosts:
        blocks = 2 * backend.geometry.num_layers
        return BlockCosts(1.0, (1.0,) * blocks, (1.0 + blocks, 1.1 + blocks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduced_compute, "measure_costs", costs)
        yield
