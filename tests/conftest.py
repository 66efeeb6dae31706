"""Fixtures every room shares."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of checkpoints and texts beside the repository; skips where it is absent."""
    if not (SHARED / "models").is_dir():
        pytest.skip("needs ../shared (public checkpoints and texts), which is not here")
    return SHARED
