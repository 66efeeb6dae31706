"""Ctrl-C while a command runs: it waits while a module is imported; knows no command.

Modules written in C lose an interruption that comes while they start, or make an ImportError of it: numpy, onnxruntime.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["interruptions_wait_for_imports"]

_IMPORTS = "<frozen importlib._bootstrap>"
_AGAIN_SECONDS = 0.02


@contextlib.contextmanager
def interruptions_wait_for_imports(caller: FrameType) -> Iterator[None]:
    """While it is open, Ctrl-C raises `KeyboardInterrupt` at once or, during an import, as soon as that has ended.

    Args:
        caller: the frame of who opens it. What was being imported when it was opened, as by a script whose import runs
            a command, does not count.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # somebody else's to decide
        yield
        return
    handler = _Handler(caller)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        handler.waiting = False
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Handler:
    def __init__(self, caller: FrameType) -> None:
        self._caller = caller
        self._thread = threading.get_ident()
        self.waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame is not self._caller:
            if frame.f_code.co_filename == _IMPORTS:
                if not self.waiting:
                    self.waiting = True
                    # Not `threading`, whose locks the interrupted thread may hold.
                    _thread.start_new_thread(self._ask_again, ())
                return
            frame = frame.f_back
        self.waiting = False
        raise KeyboardInterrupt

    def _ask_again(self) -> None:
        # More than once: a signal that comes just before the thread waits for input is seen after that input only.
        while True:
            time.sleep(_AGAIN_SECONDS)
            if not self.waiting:
                return
            if sys.platform == "win32":
                _thread.interrupt_main()
            else:
                signal.pthread_kill(self._thread, signal.SIGINT)
