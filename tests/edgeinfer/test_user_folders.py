"""Where the user's cache is, and that a user without a home folder is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from edgeinfer.errors import StorageError
from edgeinfer.user_files import user_cache


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the cache lies elsewhere")
def test_the_variable_of_the_desktop_counts_before_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == Path("/somewhere/.cache")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert user_cache() == Path("/elsewhere")


def test_a_user_without_a_home_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match="no home folder"):
        user_cache()
