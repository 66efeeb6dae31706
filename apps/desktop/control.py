"""Which model is loaded and with what budget, as the user chose."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import psutil

from edgeinfer.apps.desktop.checks import error_view
from edgeinfer.apps.desktop.library import BUILT_IN, Library, Planner, model_of
from edgeinfer.apps.desktop.settings import CONVERSATIONAL, SettingsFile
from edgeinfer.apps.server.events import EventFeed
from edgeinfer.apps.server.host import HostState, ModelHost
from edgeinfer.errors import EdgeInferError

__all__ = ["ModelControl"]

_log = logging.getLogger("edgeinfer.desktop")

# Less than this share of the machine's memory left is worth a warning.
_SHORT_SHARE = 0.05


class ModelControl:
    """Loads models and publishes progress to the windows.

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
        feed: EventFeed,
    ) -> None:
        self._host = host
        self._settings = settings
        self._options = dict(options)
        self._planner = planner
        self._library = library
        self._feed = feed
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling: Mapping[str, Any] = {}
        # Loads are numbered, so that one which was cancelled before it began does not begin.
        self._number = 0
        self._wanted: str | None = None
        self._loads = 0
        self._idle = asyncio.Event()

    def start(self) -> None:
        """Loads the model that was used last, and tells of every change from now on."""
        self._keep(self._watch())
        self._begin(self._settings.now.model, measure=True)

    def load(self, model: str | None) -> None:
        """Begins to load a model, with budget and context of the settings, in place of the one that is there."""
        self._begin(model)

    def cancel(self) -> None:
        """Ends loading at its next step."""
        self._number += 1
        self._host.cancel_load()

    async def loaded_or_failed(self) -> None:
        """Waits while a model is loading.

        Raises:
            EdgeInferError: why it could not be loaded.
        """
        await self._idle.wait()
        if self._host.state.error is not None:
            raise self._host.state.error

    async def unload(self) -> None:
        """Frees the model."""
        await self._host.unload()

    async def close(self) -> None:
        """Ends what is under way."""
        self.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def defaults(self) -> dict[str, Any]:
        """Generation options where the user has set none."""
        return {**CONVERSATIONAL, **self._sampling}

    def state(self) -> dict[str, Any]:
        """Returns the ModelState of the app's API."""
        state = self._host.state
        if self._loads and state.status != "loading":
            state = HostState("loading", model_of(self._wanted))
        id = BUILT_IN if state.model is None else state.model
        known = state.status != "empty"
        progress = {"stage": state.stage, "done": state.done, "total": state.total}
        data: dict[str, Any] = {
            "status": state.status,
            "id": id if known else None,
            "name": id.replace("\\", "/").rstrip("/").rpartition("/")[2] if known else None,
            "process_bytes": psutil.Process().memory_info().rss,
            "budget_bytes": self._settings.now.memory,
            "progress": progress if state.status == "loading" else None,
            "error": None if state.error is None else error_view(state.error),
            "warning": None,
        }
        model = self._host.model if state.status == "ready" else None
        info, plan = (None, None) if model is None else (model.info, model.plan)
        facts = ("architecture", "parameters", "bits_per_weight", "backend", "kernel")
        data |= {name: getattr(info, name, None) for name in facts}
        data |= {name: getattr(plan, name, None) for name in ("context", "planned_bytes", "minimum_bytes")}
        if info is not None and plan is not None:
            data |= {"name": info.name, "budget_bytes": plan.budget_bytes, "warning": _warning()}
        return data

    def publish(self) -> None:
        """Publishes the model's state to the windows."""
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

    def _begin(self, model: str | None, *, measure: bool = False) -> None:
        self.cancel()
        self._wanted = model
        self._loads += 1
        self._idle.clear()
        self._keep(self._load(model, self._number, measure=measure))

    async def _load(self, id: str | None, number: int, *, measure: bool) -> None:
        model, chosen = model_of(id), self._settings.now
        options = self._options | {"memory": chosen.memory, "context": chosen.context}
        options = {name: value for name, value in options.items() if value is not None}
        try:
            if measure:
                # Whatever hinders the measurement hinders loading too, which says so.
                with contextlib.suppress(EdgeInferError):
                    await asyncio.to_thread(self._planner.measure)
            sampling = await asyncio.to_thread(self._library.sampling, model)
            if number == self._number:
                loaded = await self._host.load(model, options)
                self._planner.loaded(loaded.plan)
                self._sampling = sampling
                await asyncio.to_thread(self._settings.used, model)
        except EdgeInferError as error:
            # The host's state says so to the windows.
            _log.debug("not loaded: %s", error)
        finally:
            self._loads -= 1
            if not self._loads:
                self._idle.set()
                self.publish()


def _warning() -> str | None:
    memory = psutil.virtual_memory()
    if memory.available >= _SHORT_SHARE * memory.total:
        return None
    return "The machine is short of memory: close other programs, or load the model with a smaller budget or context."
