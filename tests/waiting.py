"""Waits for what gives no event of its own; the one place where tests look again and again, and they always end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from edgeinfer.core.errors import EdgeInferError

# Seconds after which what is waited for has failed to come: far more than it takes on however busy a machine.
TIME_LIMIT = 60.0
_BETWEEN_LOOKS = 0.01


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Returns when `condition()` is true; fails, naming `what`, if that does not come within the time limit. Wait on an
    event, a queue or a process instead wherever there is one."""
    pause, deadline = threading.Event(), time.monotonic() + TIME_LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come within {TIME_LIMIT:.0f} seconds")
        pause.wait(_BETWEEN_LOOKS)


def in_thread(work: Callable[[], Any]) -> list[Any]:
    """Runs work in another thread; returns what it returned or raised."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except EdgeInferError as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=TIME_LIMIT)
    return outcome
