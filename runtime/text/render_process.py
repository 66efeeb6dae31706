"""Starts, asks and ends the process that renders a template that is not trusted. The process is kept for the
conversation's next turns. It ends by itself when nothing has come for half a minute or this process has ended, and is
killed when it takes too long, when `close` is called or when its owner is no longer referenced."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgeinfer.runtime.system.forks import renewed_in_children
from edgeinfer.runtime.text.rendering import LENGTH, MAX_FRAME_BYTES, Rendered, pack, unpack

KILL_AFTER_SECONDS = 15.0  # to start, compile and render
# What the worker is started with. The packages above the sandbox have names only, so that nothing heavy is imported.
_BOOT = """\
import sys, types
for name in ("edgeinfer", "edgeinfer.runtime", "edgeinfer.runtime.text"):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = sys.argv[1:2]
sys.path += sys.argv[2:]
from edgeinfer.runtime.text.rendering import main
main()
"""
_LIBRARIES = ("jinja2", "markupsafe")
# Of the environment, what a program may need to start at all.
_KEPT = ("SYSTEMROOT", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH", "TMPDIR", "TEMP")


class RenderProcessError(Exception):
    """The process failed; the message is a sentence without its full stop."""


def can_start() -> bool:
    """Whether there is an interpreter to start; frozen applications have none."""
    return bool(sys.executable) and not getattr(sys, "frozen", False) and Path(__file__).is_file()


class RenderProcess:
    """Renders one template in a process of its own, for any number of threads, by turns."""

    def __init__(self, source: str) -> None:
        self._source = source
        renewed_in_children(self)
        self.renew()

    def renew(self) -> None:
        """Forgets the process, without ending it: the next request starts one."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._closes = 0
        self._end: weakref.finalize[..., Any] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process that was started last; None where there is none."""
        return None if self._process is None else self._process.pid

    def ask(self, request: Mapping[str, Any]) -> list[Rendered]:
        """Send a request to the process, starting it if necessary."""
        closes = self._closes
        with self._lock:
            # A kept process may have ended for want of work just now, so that one failure of it says nothing.
            kept = self._process is not None and self._owner == os.getpid() and self._process.poll() is None
            if not kept:
                self._start()
            try:
                return self._exchange(request, first=not kept)
            except _EndedError:
                if not kept or closes != self._closes:
                    raise
            self._start()
            return self._exchange(request, first=True)

    def close(self) -> None:
        """Ends the process, if there is one; the next request starts another."""
        self._closes += 1
        process = self._process
        if process is not None and self._owner == os.getpid():
            # Killed before the lock is taken, which whoever waits for an answer holds until then.
            process.kill()
        with self._lock:
            self._forget()

    def _start(self) -> None:
        self._forget()
        try:
            self._process = subprocess.Popen(
                _command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT if name in os.environ},
                start_new_session=True,  # a terminal's Ctrl-C is for the program, which ends this one with itself
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        except (OSError, ValueError) as error:
            raise RenderProcessError(f"no process can be started for it: {error}") from error
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _end, self._process, self._owner)

    def _forget(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _exchange(self, request: Mapping[str, Any], first: bool) -> list[Rendered]:
        process = self._process
        assert process is not None
        late = threading.Event()

        def expire() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(KILL_AFTER_SECONDS, expire)
        timer.daemon = True
        timer.start()
        outcomes: list[Rendered] = []
        try:
            outcomes = self._converse(process, pack({**request, **({"source": self._source} if first else {})}))
        except (OSError, ValueError):
            self._forget()
            if late.is_set():
                raise RenderProcessError(f"it took more than {KILL_AFTER_SECONDS:g} seconds") from None
            raise _EndedError("it took more than its process may, which has ended") from None
        finally:
            timer.cancel()
            if not outcomes or outcomes[-1].spent:
                self._forget()  # a process that took too much ends
        return outcomes

    def _converse(self, process: subprocess.Popen[bytes], frame: bytes) -> list[Rendered]:
        to, back = process.stdin, process.stdout
        assert to is not None and back is not None
        to.write(frame)
        to.flush()
        head = back.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise OSError("the process has ended")
        size = LENGTH.unpack(head)[0]
        if size > MAX_FRAME_BYTES:
            raise ValueError("an answer is too long")
        data = back.read(size)
        if len(data) < size:
            raise OSError("the process has ended")
        answer = unpack(data)
        try:
            outcomes = [_outcome(**each) for each in answer["outcomes"]]
        except (TypeError, LookupError) as error:
            raise ValueError("an answer is malformed") from error
        if not outcomes:
            raise ValueError("an answer is empty")
        return outcomes


def _outcome(text: object, missing: object, failure: object, spent: object) -> Rendered:
    """Check an answer of the process, which is trusted no more than its template."""
    if not isinstance(text, str | None) or not isinstance(missing, list) or not isinstance(failure, list):
        raise TypeError
    what, reason = map(str, failure)
    return Rendered(text, tuple(map(str, missing)), (what, reason), bool(spent))


class _EndedError(RenderProcessError):
    """The process was not there any more, or ended without an answer."""


def _command() -> list[str]:
    folders = {str(Path(spec.origin).parents[1]) for name in _LIBRARIES if (spec := find_spec(name)) and spec.origin}
    cache = ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []
    cache += ["-B"] if sys.dont_write_bytecode else []
    return [sys.executable, "-I", "-S", *cache, "-c", _BOOT, str(Path(__file__).parent), *sorted(folders)]


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner != os.getpid():
        return  # a fork's copy: the process is another's
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was never written cannot be any more
                pipe.close()
    process.wait()
