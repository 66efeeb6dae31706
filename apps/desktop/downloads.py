"""Models on their way from the hub: started, followed, cancelled.

Each is fetched by a process of its own, which can be ended at any moment and takes the memory it needs with it:

    python -m edgeinfer.apps.desktop.downloads ORG/NAME

It tells of its progress in lines of JSON, and ends when its standard input does, so that it does not outlive the app.
What it fetched so far stays, and is not fetched again."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from edgeinfer import hub
from edgeinfer.apps.desktop.checks import ConflictError, NotFoundError, error_view
from edgeinfer.errors import EdgeInferError, InternalError

__all__ = ["Download", "Downloads", "main"]

_FETCH = (sys.executable, "-m", "edgeinfer.apps.desktop.downloads")


@dataclass(frozen=True)
class Download:
    """How far the download of a model is.

    Attributes:
        key: of this download.
        id: of the model.
        done, total: bytes; total is 0 before it is known.
        error: what went wrong and what to do, where it failed.
    """

    key: str
    id: str
    done: int = 0
    total: int = 0
    status: Literal["running", "done", "failed", "cancelled"] = "running"
    error: dict[str, str] | None = None


class Downloads:
    """All downloads of this run.

    Args:
        changed: called with each state.
        command: that fetches the model which is added to it.
    """

    def __init__(self, changed: Callable[[Download], None], command: Sequence[str] = _FETCH) -> None:
        self._changed = changed
        self._command = tuple(command)
        self._states: dict[str, Download] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, id: str) -> Download:
        """Begins to fetch a model.

        Raises:
            ConflictError: it is being fetched already.
        """
        if any(state.id == id and state.status == "running" for state in self._states.values()):
            raise ConflictError(f"{id} is being fetched already.", "Wait for it, or cancel it.")
        state = Download(uuid.uuid4().hex, id)
        self._set(state)
        task = self._tasks[state.key] = asyncio.create_task(self._run(state.key))
        task.add_done_callback(lambda _: self._tasks.pop(state.key))
        return state

    def state(self, key: str) -> Download:
        """Returns one download.

        Raises:
            NotFoundError: there is none of that key.
        """
        if key not in self._states:
            raise NotFoundError("There is no such download.", "Reload the page.")
        return self._states[key]

    async def cancel(self, key: str) -> Download:
        """Ends a download; what was fetched stays for the next time. Errors as `state`."""
        self.state(key)
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if self._states[key].status == "running":
                self._update(key, status="cancelled")
        return self._states[key]

    async def close(self) -> None:
        """Cancels all downloads."""
        for key in list(self._tasks):
            await self.cancel(key)

    def _set(self, state: Download) -> None:
        self._states[state.key] = state
        self._changed(state)

    def _update(self, key: str, **changes: Any) -> None:
        self._set(dataclasses.replace(self._states[key], **changes))

    async def _run(self, key: str) -> None:
        try:
            await self._follow(key)
        except Exception as error:  # a process that cannot be started, or says something unexpected
            self._fail(key, f"The download failed: {error}.")

    async def _follow(self, key: str) -> None:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, self._states[key].id, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._take(key, json.loads(line))
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if self._states[key].status == "running":
            self._fail(key, "The download ended before it was done.")

    def _take(self, key: str, said: dict[str, Any]) -> None:
        if "error" in said:
            self._update(key, status="failed", error=said["error"])
        elif "path" in said:
            total = self._states[key].total
            self._update(key, status="done", done=total)
        else:
            self._update(key, done=said["done"], total=said["total"])

    def _fail(self, key: str, message: str) -> None:
        self._update(key, status="failed", error={"message": message, "hint": "Try again; downloads resume."})


_PROGRESS_S = 0.1


class _Progress:
    """Writes how much is there. The library counts bytes that arrived and bytes in their place; the first lead."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._told = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        self._counts[label] = done, total
        if time.monotonic() - self._told >= _PROGRESS_S:
            self._told = time.monotonic()
            _tell({"done": max(d for d, _ in self._counts.values()), "total": max(t for _, t in self._counts.values())})


def main(repo: str) -> int:
    """Fetches a model; the last line tells the path or the error."""
    finished = threading.Event()
    threading.Thread(target=_end_with_input, args=(finished,), daemon=True).start()
    try:
        path = hub.pull(repo, progress=_Progress())
    except EdgeInferError as error:
        finished.set()
        _tell({"error": error_view(error)})
        return error.exit_code
    except Exception as error:  # the last resort of a program: the window shows a line
        finished.set()
        _tell({"error": {"message": f"Unexpected {type(error).__name__}: {error}.", "hint": "Try again."}})
        return InternalError.exit_code
    finished.set()
    _tell({"path": str(path)})
    return 0


def _tell(data: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(data) + "\n")
    sys.stdout.flush()


def _end_with_input(finished: threading.Event) -> None:
    # Past Python's buffer, whose lock a thread that still reads would hold when the program ends.
    while os.read(sys.stdin.fileno(), 1024):
        pass
    # Who was told the outcome may close the input before this process has ended with its own code.
    if not finished.is_set():
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
