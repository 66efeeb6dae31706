"""Downloads and conversions of models: started, followed, cancelled, resumed.

A separate process does the work (`edgeinfer.pull`) and ends with the app. Fetched parts stay, and the settings remember
unfinished models, so that the next start offers to resume.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.desktop.checks import ConflictError, NotFoundError, error_view
from edgeinfer.core.errors import EdgeInferError, StorageError

_log = logging.getLogger("edgeinfer.desktop")

# More would share one network link, or one processor.
_AT_ONCE = 2
_PROGRESS_S = 0.1


@dataclass(frozen=True)
class Download:
    """The progress of a model's download."""

    key: str
    id: str  # name on the hub or in the catalog, or the folder of a checkpoint
    name: str = ""  # for people
    stage: str = ""
    # `done`, `total`: bytes or steps of the stage; total is 0 while unknown.
    done: int = 0
    total: int = 0
    status: Literal["running", "done", "failed", "cancelled", "dismissed"] = "running"
    error: dict[str, str] | None = None
    model: str | None = None  # what loads it when it is done


class Downloads:
    """The downloads of this run, and those left unfinished by an earlier one; `changed` is called with each state."""

    def __init__(
        self,
        changed: Callable[[Download], None],
        fetch: Callable[..., edgeinfer.LocalModel] | None = None,
        unfinished: Sequence[str] = (),
        remember: Callable[[tuple[str, ...]], None] = lambda _: None,
    ) -> None:
        self._changed = changed
        self._fetch = edgeinfer.pull if fetch is None else fetch
        self._remember = remember
        self._states: dict[str, Download] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._stops: dict[str, threading.Event] = {}
        self._workers = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="download")
        for id in unfinished:
            state = Download(uuid.uuid4().hex, id, hub.shown_name(id), status="cancelled")
            self._states[state.key] = state

    def publish(self) -> None:
        """Report all states again."""
        for state in self._states.values():
            self._changed(state)

    def begin(self, id: str) -> Download:
        """Start or resume the download of a model."""
        for state in list(self._states.values()):
            if state.id == id and state.status == "running":
                raise ConflictError(f"{id} is already being downloaded.", "Wait for it, or cancel it.")
            if state.id == id:
                self._set(dataclasses.replace(state, status="dismissed"))
        state = Download(uuid.uuid4().hex, id, hub.shown_name(id))
        self._stops[state.key] = threading.Event()
        self._set(state)
        task = self._tasks[state.key] = asyncio.create_task(self._run(state.key))
        task.add_done_callback(lambda _: self._tasks.pop(state.key))
        return state

    def state(self, key: str) -> Download:
        if key not in self._states:
            raise NotFoundError("There is no such download.", "Reload the page.")
        return self._states[key]

    async def cancel(self, key: str) -> Download:
        """Cancel a download, keeping its fetched part; remove a finished one from the list."""
        state, task = self.state(key), self._tasks.get(key)
        if task is not None:
            self._stops[key].set()
            await asyncio.wait([task])
        elif state.status != "done":
            self._set(dataclasses.replace(state, status="dismissed"))
        return self._states[key]

    async def close(self) -> None:
        """Cancel all downloads; the next run offers to resume them."""
        for stop in self._stops.values():
            stop.set()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()))
        self._workers.shutdown(wait=False)

    def _set(self, state: Download) -> None:
        before = self._states.get(state.key)
        self._states[state.key] = state
        if before is None or before.status != state.status:
            unfinished = (s.id for s in self._states.values() if s.status not in ("done", "dismissed"))
            try:
                self._remember(tuple(dict.fromkeys(unfinished)))
            except StorageError as error:  # a full disk, which the download reports too
                _log.warning("unfinished downloads could not be kept: %s", error)
        self._changed(state)

    def _update(self, key: str, **changes: Any) -> None:
        self._set(dataclasses.replace(self._states[key], **changes))

    async def _run(self, key: str) -> None:
        loop, stop, reported = asyncio.get_running_loop(), self._stops[key], 0.0

        def progress(stage: str, done: int, total: int) -> None:
            nonlocal reported
            if time.monotonic() - reported >= _PROGRESS_S or done == total:
                reported = time.monotonic()
                loop.call_soon_threadsafe(lambda: self._update(key, stage=stage, done=done, total=total))

        def work() -> edgeinfer.LocalModel:
            return self._fetch(self._states[key].id, progress=progress, cancelled=stop.is_set)

        try:
            made = await loop.run_in_executor(self._workers, work)
        except EdgeInferError as error:
            if stop.is_set():
                self._update(key, status="cancelled")
            else:
                self._update(key, status="failed", error=error_view(error))
        except Exception as error:  # of any kind: it ends this download only
            _log.exception("a download failed")
            said = {"message": f"The download failed: unexpected {type(error).__name__}.", "hint": "Try again."}
            self._update(key, status="failed", error=said)
        else:
            self._update(key, status="done", model=str(made.path))
