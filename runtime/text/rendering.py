"""Compiles one chat template and renders it inside limits, in whichever process; knows nothing of messages' shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2

from edgeinfer.runtime.text.allowance import ELEMENT_COST, LimitError, RefusedError, size_of, units_for
from edgeinfer.runtime.text.sandbox import Function, GuardedEnvironment

__all__ = ["MAX_OUTPUT_CHARACTERS", "RenderError", "Rendering", "check_syntax", "output_limit"]

MAX_OUTPUT_CHARACTERS = 8_000_000  # several times the text of the longest contexts
_OUTPUT_BASE, _OUTPUT_PER_BYTE = 1_000_000, 16
_MAX_REASON = 500  # characters
_DIRECTIVE = re.compile(r"%([-_0^#]?[A-Za-z%])?")


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
class _Moment:
    """What `strftime_now` is answered from: what each directive gives, by its letters."""

    parts: Mapping[str, str]

    def format(self, text: str) -> str:
        """As `strftime`."""
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
    """Looks whether a template can be read at all, without compiling it.

    Raises:
        RenderError: it cannot.
    """
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
        environment.globals["raise_exception"] = Function(self._reject)
        try:
            environment.allowance.begin(units_for(0))
            self._template = environment.from_string(source)
        except Exception as error:  # absurd input makes jinja2 and the compiler fail in many ways
            raise _not_compiled(error) from error

    def render(self, names: Mapping[str, Any], given_bytes: int, moment: Mapping[str, str]) -> str:
        """The text.

        Args:
            names: what the template sees: JSON types alone.
            given_bytes: their size, by which the render's allowance goes.
            moment: what `strftime_now` gives for each directive.

        Raises:
            RenderError: the template failed, or does too much work.
        """
        allowance, clock = self._environment.allowance, _Moment(moment)
        allowance.begin(units_for(given_bytes))
        strftime = Function(self._strftime, clock)
        pieces: list[str] = []
        left = output_limit(given_bytes)
        try:
            context = self._template.new_context({"strftime_now": strftime, **names})
            for piece in self._template.root_render_func(context):
                left -= len(piece)
                if left < 0:
                    raise LimitError(f"more than {output_limit(given_bytes)} characters of output")
                pieces.append(piece)
        except Exception as error:  # whatever a template's code raises is the template's failure
            raise RenderError("failed", _reason(error)) from error
        return "".join(pieces)

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
