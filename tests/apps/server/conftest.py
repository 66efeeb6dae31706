"""The server that tests of requests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apps.server.served import Served, served
from tests.speculation import BUILTIN


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """A server of the built-in model, without a key."""
    _require()
    with served("--alias", "small") as running:
        yield running


@pytest.fixture(scope="session")
def endless() -> Iterator[Served]:
    """A server whose replies go on as long as they are asked to, one at a time."""
    _require()
    with served("--overflow", "window", "-c", "128", "--parallel", "1", "--queue", "2") as running:
        yield running


def _require() -> None:
    for module in ("starlette", "uvicorn"):
        pytest.importorskip(module, reason="the server extra is not installed")
    if not (BUILTIN / "edgeinfer.json").is_file():
        pytest.skip("the built-in model has not been made")
