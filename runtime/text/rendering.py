"""Compiles one chat template and renders it inside limits, in this process or in one of its own.

`main` runs in the process of its own, frames in, frames out. It imports jinja2 and the sandbox alone (`render_process`
sees to that) and gives up, where the system lets it, what a render has no use for: memory beyond the messages' share,
processor time, files, further processes.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import jinja2

from edgeinfer.runtime.text.allowance import ELEMENT_COST, LimitError, RefusedError, size_of, units_for
from edgeinfer.runtime.text.sandbox import GuardedEnvironment, TemplateFunction

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


MAX_OUTPUT_CHARACTERS = 8_000_000  # several times the text of the longest contexts
_OUTPUT_BASE, _OUTPUT_PER_BYTE = 1_000_000, 16
_MAX_REASON = 500  # characters
_NOTHING = re.compile(r"\b(None|null)\b")
_PRINTED = re.compile(r"""["']text["']: ?["']\Z""")
_DIRECTIVE = re.compile(r"%([-_0^#]?[A-Za-z%])?")
LENGTH = struct.Struct(">I")
MAX_FRAME_BYTES = 40_000_000  # the longest text a render may give, as UTF-8, and some
IDLE_SECONDS = 30.0
CPU_SECONDS = 8  # of a render, compiling the template included
_MEMORY_BASE, _MEMORY_PER_BYTE, _MEMORY_MOST = 24 << 20, 32, 64 << 20
_OPEN_FILES = 16


class RenderError(Exception):
    """A template that failed.

    Args:
        what: that it did, such as "failed".
        reason: in one line, without a full stop.
    """

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason


@dataclass(frozen=True)
class Rendered:
    """What came of rendering a conversation.

    Attributes:
        text: that it became; None where the template failed.
        missing: marks that are not in the text as a template writes content.
        failure: what it did, and the reason in one line without a full stop.
        spent: it failed for what it took, so that trying on is of no use.
    """

    text: str | None = None
    missing: Sequence[str] = ()
    failure: tuple[str, str] = ("", "")
    spent: bool = False

    @property
    def whole(self) -> bool:
        """Whether there is a text with all marks."""
        return self.text is not None and not self.missing


@dataclass(frozen=True)
class _Moment:
    """What `strftime_now` is answered from: what each directive gives, by its letters."""

    parts: Mapping[str, str]

    def format(self, text: str) -> str:
        """Formats the moment as `strftime` does."""
        return _DIRECTIVE.sub(self._part, text)

    def _part(self, match: re.Match[str]) -> str:
        name = match[1] or ""
        if name not in self.parts:
            raise RefusedError(f"strftime_now() does not know the directive '%{name}'")
        return self.parts[name]


def output_limit(given_bytes: int) -> int:
    """Characters that a render may give of so many bytes of messages."""
    return min(_OUTPUT_BASE + _OUTPUT_PER_BYTE * given_bytes, MAX_OUTPUT_CHARACTERS)


def check_syntax(source: str) -> None:
    """Looks whether a template can be read at all, without compiling it."""
    environment = GuardedEnvironment()
    try:
        environment.parse(source)
    except Exception as error:  # absurd input makes jinja2 fail in many ways
        raise _not_compiled(error) from error


class Rendering:
    """A compiled template, for any number of threads.

    Raises:
        RenderError: the source is malformed.
    """

    def __init__(self, source: str) -> None:
        self._environment = environment = GuardedEnvironment()
        environment.globals["raise_exception"] = TemplateFunction(self._reject)
        try:
            environment.allowance.begin(units_for(0))
            self._template = environment.from_string(source)
        except Exception as error:  # absurd input makes jinja2 and the compiler fail in many ways
            raise _not_compiled(error) from error

    def render(
        self,
        attempts: Sequence[Mapping[str, Any]],
        given_bytes: int,
        moment: Mapping[str, str],
        marks: Sequence[str] = (),
    ) -> list[Rendered]:
        """What comes of each attempt up to the first whose text has all marks.

        Args:
            marks: that the text must have.
        """
        allowance = self._environment.allowance
        allowance.begin(units_for(given_bytes))
        outcomes: list[Rendered] = []
        for names in attempts:
            outcomes.append(self._outcome(names, output_limit(given_bytes), _Moment(moment), marks))
            if outcomes[-1].whole or outcomes[-1].spent:
                break
        return outcomes

    def _outcome(self, names: Mapping[str, Any], most: int, clock: _Moment, marks: Sequence[str]) -> Rendered:
        strftime = TemplateFunction(self._strftime, clock)
        pieces: list[str] = []
        left = most
        try:
            context = self._template.new_context({"strftime_now": strftime, **names})
            for piece in self._template.root_render_func(context):
                left -= len(piece)
                if left < 0:
                    raise LimitError(f"more than {most} characters of output")
                pieces.append(piece)
        except Exception as error:  # whatever a template's code raises is the template's failure
            spent = isinstance(error, LimitError | MemoryError)
            return Rendered(failure=("failed", _reason(error)), spent=spent)
        text = "".join(pieces)
        if marks and _NOTHING.search(text) and any(message["content"] is None for message in names["messages"]):
            return Rendered(text, marks)  # it may say so for the content that there is not
        # A list of parts that was printed as it is shows the content, but not as any model was trained on it.
        folded = text.casefold() if marks else ""
        return Rendered(
            text, [mark for mark in marks if mark not in folded or _PRINTED.search(folded.partition(mark)[0])]
        )

    def _strftime(self, clock: _Moment, format: str) -> str:
        # A directive gives some dozen characters at most, such as a full date.
        self._environment.allowance.spend(size_of(format) + ELEMENT_COST * (1 + format.count("%")))
        return clock.format(format)

    def _reject(self, message: object) -> NoReturn:
        """`raise_exception` in templates."""
        raise jinja2.TemplateRuntimeError(self._environment.allowance.text(message))


def _not_compiled(error: Exception) -> RenderError:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return RenderError(f"is malformed at line {error.lineno}", _line(error.message or "no reason is known"))
    return RenderError("cannot be compiled", _reason(error))


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than a render may take"
    if isinstance(error, RecursionError):
        return "it calls itself too deeply"
    return _line(str(error)) or type(error).__name__


def _line(text: str) -> str:
    return text[: 4 * _MAX_REASON].strip().partition("\n")[0][:_MAX_REASON].rstrip(".")


def pack(value: dict[str, Any]) -> bytes:
    """A frame: JSON with its length before it. Lone surrogates pass, as in Python's own texts."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return LENGTH.pack(len(data)) + data


def unpack(data: bytes) -> Any:
    """What a frame holds, without its length."""
    return json.loads(data.decode("utf-8", "surrogatepass"))


def memory_for(frame_bytes: int) -> int:
    """Bytes that a render may take, given so many; a text is in memory as a frame, as messages and as what is built."""
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
            outcomes = rendering.render(request["attempts"], request["given"], request["moment"], request["marks"])
        except RenderError as error:
            outcomes = [Rendered(failure=(error.what, error.reason), spent=True)]
        except MemoryError:
            outcomes = [Rendered(failure=("failed", "it needs more memory than a render may take"), spent=True)]
        request = None
        # The frame is made before any of it is written: where there is no memory for it, nothing has been said yet.
        frames_out.write(pack({"outcomes": [asdict(outcome) for outcome in outcomes]}))
        frames_out.flush()
        if outcomes[-1].spent:
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
