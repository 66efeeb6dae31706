"""Servers that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.speculation import BUILTIN

if TYPE_CHECKING:
    from tests.apps.server.served import Local


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    """A server of the built-in model, without a key."""
    _require()
    from tests.apps.server.served import served

    with served("small") as running:
        yield running


@pytest.fixture(scope="module")
def hostile_server() -> Iterator[Local]:
    """A server that answers refusals at once."""
    _require()
    from edgeinfer.apps.server.security import Security
    from tests.apps.server.served import served

    with served(security=Security()) as running:
        yield running


@pytest.fixture(scope="module")
def endless() -> Iterator[Local]:
    """A server whose replies go on as long as they are asked to, one at a time."""
    _require()
    from tests.apps.server.served import served

    with served(overflow="window", context=128, parallel=1, queued=2, speculation="off") as running:
        yield running


def _require() -> None:
    if not (BUILTIN / "edgeinfer.json").is_file():
        pytest.skip("the built-in model has not been made")
