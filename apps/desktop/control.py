"""Which model is loaded and with what budget, as the user chose; knows nothing of replies and requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import psutil

from edgeinfer.apps.desktop.feed import Feed
from edgeinfer.apps.desktop.library import BUILT_IN, Library, model_of
from edgeinfer.apps.desktop.plans import Planner
from edgeinfer.apps.desktop.settings import CONVERSATIONAL, SettingsFile
from edgeinfer.apps.server.host import HostState, ModelHost
from edgeinfer.errors import BudgetError, EdgeInferError

__all__ = ["ModelControl"]

_log = logging.getLogger("edgeinfer.desktop")

# Less than this share of the machine's memory left is worth a warning.
_SHORT_SHARE = 0.05


class ModelControl:
    """Loads models and tells the windows how that goes.

    Args:
        host: runs the model.
        settings: keep what was chosen.
        options: fields of LoadConfig that hold for every model.
        planner: is told when there is no model yet.
        library: knows what models' makers recommend.
        feed: takes the news.
    """

    def __init__(
        self,
        host: ModelHost,
        settings: SettingsFile,
        options: Mapping[str, Any],
        planner: Planner,
        library: Library,
        feed: Feed,
    ) -> None:
        self._host = host
        self._settings = settings
        self._options = dict(options)
        self._planner = planner
        self._library = library
        self._feed = feed
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling: Mapping[str, Any] = {}

    def start(self) -> None:
        """Loads the model that was used last, and tells of every change from now on."""
        self._keep(self._watch())
        self._keep(self._begin())

    def load(self, model: str | None, memory: int | None, context: int | None) -> None:
        """Begins to load a model in place of the one that is loaded or loading.

        Raises:
            StorageError: the choice of budget and context cannot be kept.
        """
        self._settings.change({"memory": memory, "context": context})
        self._host.cancel_load()
        self._keep(self._load(model))

    def cancel(self) -> None:
        """Ends loading at its next step."""
        self._host.cancel_load()

    async def unload(self) -> None:
        """Frees the model."""
        await self._host.unload()

    async def close(self) -> None:
        """Ends what is under way."""
        self._host.cancel_load()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def defaults(self) -> dict[str, Any]:
        """Generation options where the user has set none."""
        return {**CONVERSATIONAL, **self._sampling}

    def state(self) -> dict[str, Any]:
        """The ModelState of the app's API."""
        state, model = self._host.state, self._host.model
        id = BUILT_IN if state.model is None else state.model
        data: dict[str, Any] = {
            "status": state.status,
            "id": None if state.status == "empty" else id,
            "name": None if state.status == "empty" else id.rstrip("/").rpartition("/")[2],
            "process_bytes": psutil.Process().memory_info().rss,
            "budget_bytes": self._settings.now.memory,
            "progress": {"stage": state.stage, "done": state.done, "total": state.total}
            if state.status == "loading"
            else None,
            "error": _error(state.error),
            "warning": None,
        }
        facts = ("architecture", "parameters", "bits_per_weight", "backend", "kernel")
        info = model.info if model is not None and state.status == "ready" else None
        data |= {name: getattr(info, name, None) for name in facts}
        plan = model.plan if model is not None and info is not None else None
        data |= {name: getattr(plan, name, None) for name in ("context", "planned_bytes", "minimum_bytes")}
        if info is not None and plan is not None:
            data |= {"name": info.name, "budget_bytes": plan.budget_bytes, "warning": _warning()}
        return data

    def publish(self) -> None:
        """Tells the windows."""
        self._feed.publish("model", self.state())

    def _keep(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        number = -1
        while True:
            state: HostState = await self._host.changed(number)
            number = state.number
            self.publish()

    async def _begin(self) -> None:
        # Whatever hinders the measurement hinders loading too, which says so.
        with contextlib.suppress(EdgeInferError):
            await asyncio.to_thread(self._planner.measure)
        await self._load(self._settings.now.model)

    async def _load(self, id: str | None) -> None:
        model, chosen = model_of(id), self._settings.now
        options = self._options | {"memory": chosen.memory, "context": chosen.context}
        options = {name: value for name, value in options.items() if value is not None}
        try:
            self._sampling = await asyncio.to_thread(self._library.sampling, model)
            await self._host.load(model, options)
            await asyncio.to_thread(self._settings.used, model)
        except EdgeInferError as error:
            # The host's state says so to the windows.
            _log.debug("not loaded: %s", error)


def _error(error: EdgeInferError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    data: dict[str, Any] = {"message": error.message, "hint": error.hint}
    return data | ({"minimum_bytes": error.minimum_bytes} if isinstance(error, BudgetError) else {})


def _warning() -> str | None:
    memory = psutil.virtual_memory()
    if memory.available >= _SHORT_SHARE * memory.total:
        return None
    return "The machine is short of memory: close other programs, or load the model with a smaller budget or context."
