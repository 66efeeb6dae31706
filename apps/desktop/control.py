"""The model of the app: which one is loaded, with what budget, and its state for the windows."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

import psutil

from edgeinfer.apps.desktop.checks import error_view
from edgeinfer.apps.desktop.library import Kind, Library, Planner, canonical, file_of, id_of, kind_of
from edgeinfer.apps.desktop.records import ModelChoice
from edgeinfer.apps.desktop.replies import why_not_apart
from edgeinfer.apps.desktop.settings import CONVERSATIONAL, SettingsFile
from edgeinfer.apps.server.events import EventFeed
from edgeinfer.apps.server.host import HostState, ModelHost
from edgeinfer.core.errors import EdgeInferError
from edgeinfer.hub import shown_name

_log = logging.getLogger("edgeinfer.desktop")

# Share of free memory below which the window warns.
_SHORT_SHARE = 0.05


class ModelControl:
    """Loads models and publishes their state."""

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
        self._given = 0  # states given so far: a window keeps the latest, in whatever order they arrive
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling: Mapping[str, Any] = {}
        self._most_context: int | None = None
        self._kind: Kind | None = None
        self._not_apart: str | None = None
        # Numbers loads, so that one cancelled before its start does not start.
        self._number = 0
        self._wanted = ModelChoice()
        self._loads = 0
        self._idle = asyncio.Event()

    def start(self) -> None:
        """Load the model of the settings and publish every change from now on."""
        self._keep(self._watch())
        now = self._settings.now
        self.load(ModelChoice(now.model, now.memory, now.context), measure=True)

    @property
    def choice(self) -> ModelChoice | None:
        """The loaded or loading model."""
        return self._wanted if self._loads or self._host.state.status == "ready" else None

    def cancel(self) -> None:
        """Cancel loading at its next step."""
        self._number += 1
        self._host.cancel_load()

    async def loaded_or_failed(self) -> None:
        """Wait until loading ends, and raise its error."""
        await self._idle.wait()
        if self._host.state.error is not None:
            raise self._host.state.error

    async def close(self) -> None:
        """Cancel everything in progress."""
        self.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def defaults(self) -> dict[str, Any]:
        """Default generation options."""
        return {**CONVERSATIONAL, **self._sampling}

    def state(self) -> dict[str, Any]:
        """The ModelState of the app's API."""
        state = self._host.state
        if self._loads and state.status != "loading":
            state = HostState("loading", self._wanted.model)
        known = state.status != "empty"
        progress = {"stage": state.stage, "done": state.done, "total": state.total}
        self._given += 1
        data: dict[str, Any] = {
            "number": self._given,
            "status": state.status,
            "id": id_of(state.model) if known else None,
            "name": shown_name(state.model) if known else None,
            "choice": choice_view(self.choice),
            "most_context": self._most_context if state.status == "ready" else None,
            "kind": self._kind if state.status == "ready" else None,
            "not_apart": self._not_apart if state.status == "ready" else None,
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
            data |= {"budget_bytes": plan.budget_bytes, "warning": _warning()}
        return data

    def publish(self) -> None:
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

    def load(self, choice: ModelChoice, *, default: bool = True, measure: bool = False) -> None:
        """Start to load a model in place of the present one; `default` has new conversations use it too, and `measure`
        measures the process first, for plans."""
        self.cancel()
        choice = dataclasses.replace(choice, model=canonical(choice.model))
        self._wanted = choice
        self._loads += 1
        self._idle.clear()
        self._keep(self._load(choice, self._number, default=default, measure=measure))

    async def _load(self, choice: ModelChoice, number: int, *, default: bool, measure: bool) -> None:
        model = choice.model
        options = self._options | {"memory": choice.memory, "context": choice.context}
        options = {name: value for name, value in options.items() if value is not None}
        try:
            if measure:
                # An error here would also occur while loading, which reports it.
                with contextlib.suppress(EdgeInferError):
                    await asyncio.to_thread(self._planner.measure)
            facts = await asyncio.to_thread(self._library.facts, model)
            if number == self._number:
                loaded = await self._host.load(model, options)
                self._planner.loaded(loaded.plan)
                self._sampling = {} if facts is None else facts.sampling
                self._not_apart = why_not_apart(loaded)
                self._kind = None if facts is None else kind_of(facts)
                self._most_context = None if facts is None else facts.context
                await asyncio.to_thread(self._settings.used, model, default=default)
        except EdgeInferError as error:
            # The windows learn it from the host's state.
            _log.debug("not loaded: %s", error)
        finally:
            self._loads -= 1
            if not self._loads:
                self._idle.set()
                self.publish()


def choice_view(choice: ModelChoice | None) -> dict[str, Any] | None:
    """A choice in the form of the app's API."""
    if choice is None:
        return None
    names = {"name": shown_name(choice.model), "file": file_of(choice.model)}
    return dataclasses.asdict(choice) | {"model": id_of(choice.model), **names}


def _warning() -> str | None:
    memory = psutil.virtual_memory()
    if memory.available >= _SHORT_SHARE * memory.total:
        return None
    return "The machine is short of memory: close other programs, or load the model with a smaller budget or context."
