"""The process of a command: Ctrl-C waits for imports, garbage collection waits for loading, refused memory becomes
advice.

Modules written in C lose an interruption during their import, or turn it into an ImportError: numpy, onnxruntime.

Under `ulimit -v` native libraries abort when memory is refused. A forked process does the work; this one imports
nothing heavy and waits, so that it can report what happened.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import gc
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from edgeinfer.core.errors import BudgetError

if TYPE_CHECKING:
    from collections.abc import Iterable


_IMPORTS = "<frozen importlib._bootstrap>"
_AGAIN_SECONDS = 0.02


@contextlib.contextmanager
def interruptions_wait_for_imports(caller: FrameType) -> Iterator[None]:
    """While open, Ctrl-C raises `KeyboardInterrupt` at once or, during an import, after it. Imports that were running
    before the caller, as of a script that runs a command, do not count."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the caller handles it
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
    # Walking frames is the one public way to tell whether this thread is importing: locks of modules and of specs being
    # initialized are private, and say nothing of an import that was going on when the command was called.

    def __init__(self, caller: FrameType) -> None:
        self._caller = caller
        self._thread = threading.get_ident()
        self.waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        while frame is not None and frame is not self._caller:
            if frame.f_code.co_filename == _IMPORTS:
                if not self.waiting:
                    self.waiting = True
                    # Not `threading`: the interrupted thread may hold its locks.
                    _thread.start_new_thread(self._ask_again, ())
                return
            frame = frame.f_back
        self.waiting = False
        raise KeyboardInterrupt

    def _ask_again(self) -> None:
        # Repeatedly: a signal just before the thread waits for input is handled only after that input.
        while True:
            time.sleep(_AGAIN_SECONDS)
            if not self.waiting:
                return
            if sys.platform == "win32":
                _thread.interrupt_main()
            else:
                signal.pthread_kill(self._thread, signal.SIGINT)


def begin_start() -> None:
    """Pause garbage collection: what a command imports and loads stays, and collecting takes a sixth of the time to the
    first token."""
    gc.disable()


def end_start() -> None:
    """Resume garbage collection for new objects, if `begin_start` paused it."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


# Address space for the libraries and the built-in model, with one thread.
_LEAST_BYTES = 320 * 1000**2
_M_ARENA_MAX, _PR_SET_PDEATHSIG = -8, 1  # glibc's malloc.h, Linux's prctl.h
# Messages of libraries that were refused memory.
_REFUSED = re.compile(r"failed to map segment|can't start new thread|cannot allocate|bad[ _]alloc|out of memory", re.I)
# Python's messages when a C module failed without an exception (Objects/call.c, Python/ceval.c).
_LOST = re.compile(r"without (exception set|setting an exception)")
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if sys.platform == "linux" else ()
_FROM_KERNEL = 0x80  # a terminal's Ctrl-C, which the child has received itself
# Exit codes of a process that was refused memory; edgeinfer's own codes are others.
_ABORTS = (-signal.SIGABRT, -signal.SIGSEGV, *((-signal.SIGBUS,) if sys.platform != "win32" else ()), 1)


def address_limit() -> int | None:
    """The limit of this process's address space in bytes; None without one."""
    if sys.platform != "linux":
        return None
    import resource  # absent on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def is_refused(error: BaseException) -> bool:
    """Whether an error of any library means that memory was refused. Under a limit, modules written in C also lose the
    MemoryError itself: Python then raises SystemError."""
    if isinstance(error, SystemError) and _LOST.search(str(error)):
        return address_limit() is not None
    return isinstance(error, MemoryError) or (
        isinstance(error, ImportError | OSError | RuntimeError) and _REFUSED.search(str(error)) is not None
    )


def refusal(limit: int | None) -> BudgetError:
    if limit is None:
        return BudgetError("The system refuses the memory that this needs.", "Free memory, or take a smaller model.")
    from edgeinfer.core.options import format_size  # imported late, as it imports others

    message = f"The system limits this process to {format_size(limit)} of address space, which is too little."
    enough = format_size(max(_LEAST_BYTES, 2 * limit))
    return BudgetError(message, f"Raise the limit (ulimit -v) to {enough} or more, or use fewer threads (-t 1).")


def supervised(limit: int) -> int | None:
    """Fork. Return None in the child, which does the work, and the child's exit code in the parent."""
    sys.stdout.flush()
    sys.stderr.flush()
    noise = os.memfd_create("stderr")
    signals = {*_PASSED_ON, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        process = os.fork()
    except OSError as error:
        raise refusal(limit) from error
    if process == 0:
        _begin(noise)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return None
    code = _wait(process, signals)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if code in _ABORTS:
        raise refusal(limit)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    with contextlib.suppress(OSError), os.fdopen(noise, "rb") as said:
        said.seek(0)
        shutil.copyfileobj(said, sys.stderr.buffer)
        sys.stderr.flush()
    return code


def _begin(noise: int) -> None:
    """Make the child use little address space, end with its parent, and keep native code's output separate."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if hasattr(libc, "mallopt"):
        # Otherwise each thread reserves 64 MB of addresses.
        libc.mallopt(_M_ARENA_MAX, 1)
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(noise, 2)
    # All errors are caught, except those of an interpreter short of memory.
    sys.excepthook = _leave_to_parent


def _leave_to_parent(*_: object) -> None:
    """Print no traceback: the exit code is one of `_ABORTS`, and the parent reports."""


def _wait(process: int, signals: Iterable[int]) -> int:
    """Return the child's exit code, or the negative number of its signal; pass signals on to it."""
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        came = signal.sigwaitinfo(signals)
        if came.si_signo != signal.SIGCHLD and came.si_code != _FROM_KERNEL:
            os.kill(process, came.si_signo)
