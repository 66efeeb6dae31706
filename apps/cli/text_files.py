"""Reads what users give as text: files, stdin, arguments; refuses what is not UTF-8 or far too large."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import threading
from pathlib import Path
from typing import BinaryIO

from edgeinfer.apps.cli.output import print_note
from edgeinfer.config import format_size
from edgeinfer.encodings import decode_text
from edgeinfer.errors import PromptError

# The longest contexts, ten million tokens, hold less text.
_MOST_PROMPT_BYTES = 64 * 1000**2
# How long a pipe may be silent before the user is told what is waited for.
_PATIENCE_SECONDS = 3.0


def utf8(text: str, source: str) -> str:
    """Returns `text` if the bytes it came from were UTF-8; Python hides others in surrogates, and in the C locale all
    that are not ASCII.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        with contextlib.suppress(UnicodeError):
            return os.fsencode(text).decode("utf-8")
        raise PromptError(f"{source} is not UTF-8 text.", "Convert it, for example with iconv -t UTF-8.") from error
    return text


def read_text(path: Path) -> str:
    """Reads a file of UTF-8, or what its byte order mark tells, without the newline that editors put at its end."""
    try:
        # A pipe without a writer is empty; opening it as usual would wait for one.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(handle, True)
            return read_stream(file, str(path))
    except OSError as error:
        raise PromptError(f"Cannot read {path}: {error.strerror}.", "Name an existing text file.") from error


def is_piped() -> bool:
    """Whether stdin is a pipe or a file, which hold text that is meant for the command.

    Not whether it is no terminal: programs that start others often leave them a socket that never ends.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or another program's stand-in
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_stdin(waiting: str = "") -> str:
    """Reads stdin, as `read_text`.

    Args:
        waiting: said on stderr where nothing has come for some seconds; empty says nothing.
    """
    if sys.stdin is None:
        raise PromptError("stdin is closed.", "Pipe the prompt into it, or name a file.")
    note = threading.Timer(_PATIENCE_SECONDS, print_note, [waiting])
    if waiting:
        note.daemon = True
        note.start()
    try:
        return read_stream(sys.stdin.buffer, "stdin")
    except OSError as error:
        raise PromptError(f"Cannot read stdin: {error.strerror or error}.", "Pass the prompt with -p.") from error
    finally:
        note.cancel()


def read_paragraphs(path: Path) -> list[str]:
    """Reads the paragraphs of a text file, which empty lines separate."""
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", read_text(path)) if p.strip()]
    if not paragraphs:
        raise PromptError(f"{path} contains no text.", "Use a file with a few paragraphs.")
    return paragraphs


def read_stream(file: BinaryIO, source: str) -> str:
    """Reads the text of an open file, as `read_text`; `source` names it."""
    data = file.read(_MOST_PROMPT_BYTES + 1)
    if len(data) > _MOST_PROMPT_BYTES:
        raise PromptError(f"{source} is larger than {format_size(_MOST_PROMPT_BYTES)}.", "Shorten the prompt.")
    return decode_text(data, source).removesuffix("\n").removesuffix("\r")
