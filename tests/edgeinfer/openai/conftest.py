"""The built-in model, loaded once for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import edgeinfer
from tests.speculation import BUILTIN


@pytest.fixture(scope="session")
def tales() -> Iterator[edgeinfer.Model]:
    """The built-in model, which drafts nothing."""
    if not (BUILTIN / "edgeinfer.json").is_file():
        pytest.skip("the built-in model has not been made")
    with edgeinfer.load(threads=1, context=1024, speculation="off") as model:
        yield model
