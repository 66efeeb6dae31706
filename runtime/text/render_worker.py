"""The process that renders one template it does not trust: frames in, frames out; knows nothing of who started it.

It imports jinja2 and the sandbox alone (`render_process` sees to that) and takes from itself, where the system lets it,
what a render has no use for: memory beyond the messages' share, processor time, files, further processes.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

from edgeinfer.runtime.text.rendering import RenderError, Rendering

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

__all__ = ["LENGTH", "MAX_FRAME_BYTES", "main", "memory_for", "pack", "unpack"]

LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 40_000_000  # the longest text a render may give, as UTF-8, and some
IDLE_SECONDS = 30.0
CPU_SECONDS = 8  # of a render, compiling the template included
_MEMORY_BASE, _MEMORY_PER_BYTE, _MEMORY_MOST = 24 << 20, 32, 64 << 20
_OPEN_FILES = 16


def pack(value: dict[str, Any]) -> bytes:
    """A frame: JSON with its length before it. Lone surrogates pass, as in Python's own texts."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> Any:
    """What a frame holds, without its length.

    Raises:
        ValueError: it is no frame.
    """
    return json.loads(data.decode("utf-8", "surrogatepass"))


def memory_for(frame_bytes: int) -> int:
    """Bytes that a render may take, given so many; a text is held as a frame, as messages and as what is built."""
    return min(_MEMORY_BASE + _MEMORY_PER_BYTE * frame_bytes, _MEMORY_MOST)


def main() -> None:
    """Renders until its standard input ends, or nothing has come for a while."""
    frames_in, frames_out = sys.stdin.buffer, sys.stdout.buffer
    _forgo()
    rendering: Rendering | None = None
    while _waited(frames_in) and (head := frames_in.read(LENGTH.size)):
        size = LENGTH.unpack(head)[0]
        _limit(size)
        try:
            request = unpack(frames_in.read(size))
            if rendering is None:
                rendering = Rendering(request["source"])
            answer = {"text": rendering.render(request["names"], request["given"], request["moment"])}
        except RenderError as error:
            answer = {"what": error.what, "reason": error.reason}
        except MemoryError:
            answer = {"what": "failed", "reason": "it needs more memory than a render may take"}
        request = None
        # The frame is made before any of it is written: where there is no memory for it, nothing has been said yet.
        frames_out.write(pack(answer))
        frames_out.flush()
        if "text" not in answer:
            return  # whatever the failure left behind goes with the process


def _waited(frames: BinaryIO) -> bool:
    """Whether something has come within the idle time: a frame, or the end."""
    if sys.platform == "win32":
        return True  # pipes cannot be waited for: there it lives until the model is closed
    import select

    return bool(select.select([frames], [], [], IDLE_SECONDS)[0])


def _forgo() -> None:
    if resource is None:
        return
    for name, limit in (("CORE", 0), ("FSIZE", 0), ("NPROC", 0), ("NOFILE", _OPEN_FILES)):
        _set(name, limit, hard=True)


def _limit(frame_bytes: int) -> None:
    """Bounds what the next render may take, on top of what the process has."""
    if resource is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set("CPU", math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS)
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    except OSError:
        return  # where its size is not known, the sandbox alone bounds it
    _set("AS", pages * os.sysconf("SC_PAGE_SIZE") + memory_for(frame_bytes))


def _set(name: str, limit: int, hard: bool = False) -> None:
    kind = getattr(resource, f"RLIMIT_{name}", None)
    if kind is None:
        return
    most = resource.getrlimit(kind)[1]
    if most != resource.RLIM_INFINITY:
        limit = min(limit, most)
    try:
        resource.setrlimit(kind, (limit, limit if hard else most))
    except (OSError, ValueError):
        return  # a system that knows the limit but not how to keep it
