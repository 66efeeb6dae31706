"""What all tests share: one thread per library, byte code that is kept, the tiers, a cache of the session's own."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything is imported that reads them. Two workers with two threads each take longer than with one each, and
# models this small run no faster on more.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
# The hundreds of processes that tests start would each compile the project's sources again. Libraries were compiled
# where they are installed, which a folder of our own for byte code would leave aside.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from edgeinfer.core import methods  # noqa: E402
from tests.methods import declared_entries  # noqa: E402
from tests.tiers import divide, longest_first  # noqa: E402

# An example that takes long on a busy machine is no fault. What CI's profile says besides stays.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

# The installed metadata may be of another checkout.
methods.research_entries = declared_entries

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    divide(items)
    yield  # those of other tiers are left out
    items[:] = longest_first(items)


@pytest.hookimpl
def pytest_collection_finish() -> None:
    # What torch and transformers fill the heap with stays; looking through it at every close of a model takes seconds.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of checkpoints and texts next to the repository; skips if it is missing."""
    if not (SHARED / "models").is_dir():
        pytest.skip("needs ../shared (public checkpoints and texts), which is not here")
    return SHARED


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of what models learn and what is measured of them: not the user's own, and new in every session."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("OLLAMA_MODELS", str(folder / "ollama"))
        yield folder
