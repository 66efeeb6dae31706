"""A process that fetches one model from the hub and tells of its progress in lines of JSON; knows nothing of windows.

    python -m edgeinfer.apps.desktop.fetch ORG/NAME

It ends when its standard input does, so that it does not outlive the app. What it fetched so far stays, and is not
fetched again.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from edgeinfer import hub
from edgeinfer.errors import EdgeInferError, InternalError

__all__ = ["main"]

_EVERY_S = 0.1


class _Progress:
    """Writes how much is there. The library counts bytes that arrived and bytes in their place; the first lead."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._told = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        self._counts[label] = done, total
        if time.monotonic() - self._told >= _EVERY_S:
            self._told = time.monotonic()
            _tell({"done": max(d for d, _ in self._counts.values()), "total": max(t for _, t in self._counts.values())})


def main(repo: str) -> int:
    """Fetches; the last line tells the path or the error."""
    finished = threading.Event()
    threading.Thread(target=_end_with_input, args=(finished,), daemon=True).start()
    try:
        path = hub.pull(repo, progress=_Progress())
    except EdgeInferError as error:
        finished.set()
        _tell({"error": {"message": error.message, "hint": error.hint}})
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
