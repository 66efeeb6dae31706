"""Waits for what gives no event of its own; the one place where tests look again and again, and they always end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
