"""What onnxruntime says while it makes a session, as the moments at which pages that it has read can be let go.

From 1.32 on, onnxruntime compares each packed copy of a weight in a file with what it has just packed (memcmp), so all
of them would be in memory when the session is made. Messages of its log are all that comes between one part of the
graph and the next: they are heard on the thread that makes the session, so no mapping can end meanwhile. Before 1.32
nothing is compared, and messages cannot be heard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import onnxruntime as ort

from edgeinfer.runtime.system.forks import RenewedLock
from edgeinfer.runtime.system.memory import MappedFile, process_memory, releases_pages
from edgeinfer.runtime.weights.layouts import RunnableGraph
from edgeinfer.runtime.weights.streaming import READ_BETWEEN

# Severities of its log.
_INFO, _WARNING, SILENT = 1, 2, 4
_PYTHON_LEVELS = {_WARNING: logging.WARNING, 3: logging.ERROR, SILENT: logging.CRITICAL}
_OURS = "edgeinfer"
_log = logging.getLogger("onnxruntime")
# There is one callback in a process.
_lock = RenewedLock()


class _Copies:
    """The packed copies of a file that a session is made of, whose pages go when some have been read."""

    def __init__(self, graph: RunnableGraph) -> None:
        self._path = graph.weights
        self._pages = MappedFile(graph.weights).part(graph.copies)
        self._kept = process_memory().file

    def drop(self) -> None:
        file = process_memory().file
        self._kept = min(self._kept, file)
        if file - self._kept < READ_BETWEEN:
            return
        if not self._pages.places:
            MappedFile.forget(self._path)  # they may be mapped by now
        self._pages.release()
        self._kept = process_memory().file


def copies_of(graph: RunnableGraph) -> Callable[[], None] | None:
    """Drops the packed copies that were read since the last call; None where there are none, or pages stay."""
    return _Copies(graph).drop if graph.copies and releases_pages() else None


@contextmanager
def hearing(options: ort.SessionOptions, step: Callable[[], None] | None) -> Iterator[None]:
    """Calls `step` with every message about a session that is made within, where onnxruntime lets messages be heard.

    What it says of others' sessions meanwhile goes to Python's logger "onnxruntime". onnxruntime tells neither which
    callback was there before nor what its default severity was: afterwards the former is gone and the latter is
    warnings. Who wants others calls `onnxruntime.set_default_logger_severity` after a model is loaded.
    """
    if step is None or not hasattr(ort, "set_default_logger_callback"):
        yield
        return
    options.log_severity_level, options.logid = _INFO, _OURS

    def hear(severity: int, category: str, logid: str, place: str, message: str) -> None:
        if logid == _OURS:
            step()
        elif severity >= _WARNING:
            _log.log(_PYTHON_LEVELS[severity], "%s: %s", place, message)

    with _lock:
        ort.set_default_logger_callback(hear, _WARNING)
        try:
            yield
        finally:
            ort.set_default_logger_callback(None)
