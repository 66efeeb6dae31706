"""A person's terminal: a keyboard whose pasted lines are one message, a screen that breaks lines between words."""

from __future__ import annotations

import re
import select
import sys
from collections.abc import Callable
from typing import TextIO

from rich.cells import cell_len

# Words and the blanks between them; line ends stand alone.
_PIECES = re.compile(r"\n|[^\S\n]+|[^\s]+")


def keyboard() -> Callable[[str], str]:
    """Reads what a person types, with line editing and history where the platform has readline.

    A paste of several lines is one message. GNU readline reads it so; elsewhere, lines that wait right behind the first
    belong to it.
    """
    try:
        import readline
    except ModuleNotFoundError:  # Windows has none; its console edits lines itself
        return _with_waiting_lines
    if "libedit" in (readline.__doc__ or ""):
        return _with_waiting_lines
    # Python switches it off, as its own prompt reads line by line.
    readline.parse_and_bind("set enable-bracketed-paste on")
    return input


def _with_waiting_lines(prompt: str) -> str:
    lines = [input(prompt)]
    while _is_waiting():
        lines.append(input())
    return "\n".join(lines)


def _is_waiting() -> bool:
    """Whether there is input that nobody has had the time to type."""
    if sys.platform == "win32":
        import msvcrt

        return bool(msvcrt.kbhit())
    return bool(select.select([sys.stdin], [], [], 0)[0])


class WrappedText:
    """Writes a reply as it comes and breaks its lines between words.

    Args:
        out: the terminal.
        width: of a line, in cells.
    """

    def __init__(self, out: TextIO, width: int) -> None:
        self._out = out
        self._width = width
        self._column = 0
        self._blank = self._word = ""

    def write(self, text: str) -> None:
        """Writes all but the last word, which may go on."""
        for piece in _PIECES.findall(text):
            if piece == "\n":
                self._end_word()
                self._put(f"{self._blank}\n")
                self._column, self._blank = 0, ""
            elif piece.isspace():
                self._end_word()
                self._blank += piece
            else:
                self._word += piece
        self._out.flush()

    def finish(self) -> None:
        """Writes what was held back, and ends the line."""
        self._end_word()
        if self._column or self._blank:
            self._put(f"{self._blank}\n")
        self._out.flush()

    def _end_word(self) -> None:
        if not self._word:
            return
        size = cell_len(self._blank.expandtabs()) + cell_len(self._word)
        if self._column + size > self._width:
            self._put("\n" if self._column else "")
            self._column, self._blank = 0, ""
            size = cell_len(self._word)
        self._put(self._blank + self._word)
        end = self._column + size
        self._column = end if end <= self._width else end % self._width or self._width
        self._blank = self._word = ""

    def _put(self, text: str) -> None:
        self._out.write(text)
