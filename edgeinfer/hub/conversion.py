"""Fetches and converts a model in a process of its own, which can be ended at any moment and takes its memory with it.
Files that it fetched stay in the hub's cache and are not fetched again; an unfinished conversion is removed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

import edgeinfer.core.errors
from edgeinfer.core.errors import BudgetError, EdgeInferError, HubError, InternalError
from edgeinfer.core.records import dataclass
from edgeinfer.hub.client import Progress
from edgeinfer.hub.download import Offer
from edgeinfer.hub.folder import remove_leftovers
from edgeinfer.hub.ids import Bits

Choose = Callable[[list[Offer]], str]

_log = logging.getLogger("edgeinfer.hub")

# -P: what lies in the folder that a user happens to be in is not imported.
_PROGRAM = (sys.executable, "-P", "-m", "edgeinfer.tools.conversion")
# How often a caller is asked whether to continue while the process prints nothing.
_ASK_SECONDS = 0.2
# Characters of the process's last line that explain an end without an error.
_LAST_WORDS = 300
_GRACE_SECONDS = 10


@dataclass(frozen=True)
class FetchJob:
    name: str = ""  # of the hub, ORG/NAME[:TYPE]
    path: str = ""  # of a checkpoint or GGUF file on this machine
    package: str = ""  # the catalog's name of a model that a package holds
    revision: str | None = None  # branch, tag or commit; None is the main branch
    refresh: bool = False  # bring the hub's cache up to date instead of using it as it is
    bits: Bits | None = None  # of the conversion; None is as many as the model needs, or as memory has room for
    calibrated: bool = True  # round for the text that ships, instead of in seconds
    memory: int | None = None  # budget that the model is to run in; None is what this machine has
    bars: bool = False  # draw bars on stderr
    llamacpp: bool = False  # leave a GGUF file as it is, instead of preparing it for the native kernel
    asks: bool = False  # send the offers of a repository of GGUF files, and take the one that is chosen
    looks: bool = False  # only read the header of a GGUF file, and say whether the native kernel runs it
    sketch: str = ""  # a folder to write the bundle of that file to, without its weights


def fetch(
    job: FetchJob,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    choose: Choose | None = None,
) -> Path:
    """Does a job, logging what happens; returns the bundle's directory or the GGUF file."""
    return Path(_outcome(job, progress, cancelled, choose)["path"])


def unread_because(path: Path, sketch: Path | None = None) -> str | None:
    """Why the native kernel does not run a GGUF file; None where it does, and its bundle without weights in a folder
    for a `sketch`."""
    reason = _outcome(FetchJob(path=str(path), looks=True, sketch=str(sketch or "")))["refusal"]
    return None if reason is None else str(reason)


def _outcome(
    job: FetchJob,
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    choose: Choose | None = None,
) -> dict[str, Any]:
    subject = job.name or job.path or job.package
    with _running(dataclasses.replace(job, asks=choose is not None)) as (process, words):
        for said in _heard(process, subject, cancelled):
            if "path" in said or "refusal" in said:
                return said
            if "error" in said:
                raise _error(said["error"])
            if "note" in said:
                _log.info("%s", said["note"])
            elif "offers" in said:
                assert choose is not None and process.stdin is not None, "was asked for"
                process.stdin.write(choose([Offer(**offer) for offer in said["offers"]]) + "\n")
                process.stdin.flush()
            elif progress is not None:
                progress(said["stage"], said["done"], said["total"])
        process.wait()
        raise InternalError(f"Fetching {subject} ended unexpectedly.", _reason(process, words))


@contextlib.contextmanager
def _running(job: FetchJob) -> Iterator[tuple[subprocess.Popen[str], IO[bytes]]]:
    """The process, which has ended when the block ends, and a file with its stderr."""
    # A group of its own: a terminal's Ctrl-C is for the caller, who ends the process.
    apart: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}
    # Not a pipe, which someone would have to read so that the process does not block.
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            [*_PROGRAM, json.dumps(asdict(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if job.bars else words,
            encoding="utf-8",
            errors="replace",
            **apart,
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process, words
        finally:
            # The process cleans up and ends when its input is closed.
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
            # A file that it was just writing may have appeared after the removal.
            remove_leftovers()


def _heard(
    process: subprocess.Popen[str], subject: str, cancelled: Callable[[], bool] | None
) -> Iterator[dict[str, Any]]:
    """The lines that the process prints, until it ends."""
    said: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError, ValueError):  # closed because the work was cancelled
            for line in process.stdout:
                said.put(json.loads(line))
        said.put(None)

    threading.Thread(target=read, daemon=True, name="conversion").start()
    while True:
        if cancelled is not None and cancelled():
            raise HubError(f"Fetching {subject} was cancelled.", "Try again to resume; what was downloaded is kept.")
        try:
            # With a limit: on Windows a wait without one ignores Ctrl-C.
            line = said.get(timeout=_ASK_SECONDS)
        except Empty:
            continue
        if line is None:
            return
        yield line


def _error(data: dict[str, Any]) -> EdgeInferError:
    kind = getattr(edgeinfer.core.errors, str(data["kind"]), InternalError)
    if kind is BudgetError:
        return BudgetError(data["message"], data["hint"], minimum_bytes=int(data["minimum_bytes"]))
    error: EdgeInferError = kind(data["message"], data["hint"])
    return error


def _reason(process: subprocess.Popen[str], words: IO[bytes]) -> str:
    words.seek(0)
    lines = words.read().decode("utf-8", "replace").strip().splitlines()
    last = lines[-1][:_LAST_WORDS] if lines else f"Its exit code is {process.returncode}"
    return f"{last}. Free some memory and try again; downloads resume."
