"""Fixtures every room shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of checkpoints and texts beside the repository; skips where it is absent."""
    if not (SHARED / "models").is_dir():
        pytest.skip("needs ../shared (public checkpoints and texts), which is not here")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of what models learn and what is measured of them: not the user's own, and new in every session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
