"""Loading a model while an event loop goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from edgeinfer.api import Model, load
from edgeinfer.option_types import LoadOptions
from edgeinfer.results import Progress

if TYPE_CHECKING:
    import asyncio

__all__ = ["aload"]


async def aload(
    model: str | Path | None = None, *, progress: Progress | None = None, **options: Unpack[LoadOptions]
) -> Model:
    """`load` for asynchronous programs: the event loop goes on meanwhile.

    Args:
        model, progress, options: as `load` takes them; `progress` is called on another thread.
    """
    import asyncio  # it takes 4 MB, which programs without an event loop are spared

    loading = asyncio.get_running_loop().run_in_executor(None, lambda: load(model, progress=progress, **options))
    try:
        return await asyncio.shield(loading)
    except asyncio.CancelledError:
        loading.add_done_callback(_close_unwanted)  # loading cannot be stopped half way
        raise


def _close_unwanted(loading: asyncio.Future[Model]) -> None:
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
