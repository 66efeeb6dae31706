"""Compiles one chat template and renders it in jinja2's sandbox, in this process or in one of its own.

`main` runs in the process of its own, frames in, frames out. It imports jinja2 and the sandbox alone (`render_process`
sees to that) and gives up, where the system lets it, what a render does not need: memory beyond a share for the
messages, processor time, files, further processes.
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
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


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


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers renders chat templates with. The sandbox keeps them from Python's internals and from changing
    what they are given; the process bounds their time and memory."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as transformers gives templates; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


class _GenerationTag(Extension):
    """``{% generation %}``, which marks what a model wrote for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 - the type jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class RenderError(Exception):
    """A template that failed: what it did, such as "failed", and the reason in one line without a full stop."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(what, reason)
        self.what, self.reason = what, reason


@dataclass(frozen=True)
class Rendered:
    """The result of rendering a conversation; `text` is None if the template failed. `missing` are the probes not in
    the text, `failure` is what the template did and why, and `spent` says it took too much to try again."""

    text: str | None = None
    missing: Sequence[str] = ()
    failure: tuple[str, str] = ("", "")
    spent: bool = False

    @property
    def whole(self) -> bool:
        """Whether there is a text with all probes."""
        return self.text is not None and not self.missing


def check_syntax(source: str) -> None:
    """Parse a template without compiling it."""
    try:
        _environment().parse(source)
    except Exception as error:  # absurd input makes jinja2 fail in many ways
        raise _not_compiled(error) from error


class Rendering:
    """A compiled template, for any number of threads."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # absurd input makes jinja2 and the compiler fail in many ways
            raise _not_compiled(error) from error

    def render(
        self, attempts: Sequence[Mapping[str, Any]], moment: Mapping[str, str], probes: Sequence[str] = ()
    ) -> list[Rendered]:
        """Render attempts, each the names given to the template, up to the first whose text has all probes."""
        outcomes: list[Rendered] = []
        for names in attempts:
            outcomes.append(self._outcome(names, moment, probes))
            if outcomes[-1].whole or outcomes[-1].spent:
                break
        return outcomes

    def _outcome(self, names: Mapping[str, Any], moment: Mapping[str, str], probes: Sequence[str]) -> Rendered:
        try:
            text = self._template.render({"strftime_now": lambda text: _strftime(text, moment), **names})
        except Exception as error:  # whatever a template's code raises is the template's failure
            return Rendered(failure=("failed", _reason(error)), spent=isinstance(error, MemoryError))
        if probes and _NOTHING.search(text) and any(message["content"] is None for message in names["messages"]):
            return Rendered(text, probes)  # the template may have printed a content that is None
        # A list of parts that was printed as it is shows the content, but not as any model was trained on it.
        folded = text.casefold() if probes else ""
        return Rendered(
            text, [probe for probe in probes if probe not in folded or _PRINTED.search(folded.partition(probe)[0])]
        )


def _strftime(text: str, moment: Mapping[str, str]) -> str:
    """Format the moment; a template's own text never reaches the system's formatting."""

    def part(match: re.Match[str]) -> str:
        name = match[1] or ""
        if name not in moment:
            raise jinja2.TemplateError(f"strftime_now() does not know the directive '%{name}'")
        return moment[name]

    return _DIRECTIVE.sub(part, text)


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
    return json.loads(data.decode("utf-8", "surrogatepass"))


def main() -> None:
    """Render until standard input ends or nothing has come for a while."""
    frames_in, frames_out = sys.stdin.buffer, sys.stdout.buffer
    if resource is not None:
        for name, limit in (("CORE", 0), ("FSIZE", 0), ("NPROC", 0), ("NOFILE", _OPEN_FILES)):
            _set(name, limit, hard=True)
    rendering: Rendering | None = None
    while _waited(frames_in) and (head := frames_in.read(LENGTH.size)):
        size = LENGTH.unpack(head)[0]
        _limit(size)
        try:
            request = unpack(frames_in.read(size))
            if rendering is None:
                rendering = Rendering(request["source"])
            outcomes = rendering.render(request["attempts"], request["moment"], request["probes"])
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
    """Wait for a frame or the end of input; False after the idle time."""
    if sys.platform == "win32":
        return True  # pipes cannot be waited for: there it lives until the model is closed
    import select

    return bool(select.select([frames], [], [], IDLE_SECONDS)[0])


def _limit(frame_bytes: int) -> None:
    """Bound the time and memory of the next render."""
    if resource is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set("CPU", math.ceil(used.ru_utime + used.ru_stime) + CPU_SECONDS)
    try:
        pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    except OSError:
        return  # where its size is not known, only time bounds it
    # A text is in memory as a frame, as messages and as output.
    render_bytes = min(_MEMORY_BASE + _MEMORY_PER_BYTE * frame_bytes, _MEMORY_MOST)
    _set("AS", pages * os.sysconf("SC_PAGE_SIZE") + render_bytes)


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
