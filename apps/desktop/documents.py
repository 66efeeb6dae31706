"""Extracts the text of attached files and refuses what is not text."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import psutil

from edgeinfer.apps.desktop.checks import TooLargeError
from edgeinfer.apps.desktop.history import MOST_CHARACTERS
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import format_size

MOST_FILE_BYTES = 16 * 1000**2
_READ_PDF = (sys.executable, "-P", "-m", "edgeinfer.apps.desktop.pdf_text")
_PDF_SECONDS = 30.0
_PDF_MEMORY = 1_000_000_000
_WATCH_S = 0.05
# A PDF's header may come after some other bytes.
_PDF_HEAD = 1024
_KINDS = "Attach text, Markdown, code, a table as CSV, or a PDF."
_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
# Control characters of text files: tab, new line, form feed, carriage return, escape in coloured logs.
_IN_TEXT = frozenset("\t\n\f\r\x1b")
# By refusal of `pdf_text`: what is wrong, and what to do.
_REFUSALS = {
    "locked": ("is protected by a password.", "Save a copy without the password and attach that."),
    "damaged": ("is damaged, or not a PDF that can be read.", "Open it in another program and save it again."),
    "memory": ("needs too much memory to be read.", "Save its text in a text file and attach that."),
    "slow": (f"could not be read within {_PDF_SECONDS:.0f} seconds.", "Attach a part of it."),
    "pages": ("has {pages:,} pages; at most {most:,} are read.", "Attach a part of it."),
    "long": (f"has more than {MOST_CHARACTERS:,} characters of text, which is the most.", "Attach a part of it."),
    "empty": ("contains no text: its pages are images.", "Attach a copy that went through text recognition."),
}


class Documents:
    """Reads files, one PDF at a time, by a command with a time limit in seconds."""

    def __init__(self, command: Sequence[str] = _READ_PDF, seconds: float = _PDF_SECONDS) -> None:
        self._command = tuple(command)
        self._seconds = seconds
        self._turn = asyncio.Lock()

    async def read(self, name: str, data: bytes) -> tuple[str, str, int | None]:
        """Return the kind, the text and the number of pages of a file."""
        if len(data) > MOST_FILE_BYTES:
            raise TooLargeError(
                f"{name} has {format_size(len(data))}; at most {format_size(MOST_FILE_BYTES)} can be attached.",
                "Attach a part of it.",
            )
        if b"%PDF-" in data[:_PDF_HEAD]:
            pages, text = await self._pdf(name, data)
            return "pdf", text, pages
        text = await asyncio.to_thread(decode, name, data)
        return "text", text, None

    async def _pdf(self, name: str, data: bytes) -> tuple[int, str]:
        async with self._turn:
            said = await self._ask(data)
        text = _clean(said.get("text", ""))
        refusal = said.get("refusal") or (None if text else "empty")
        if refusal is not None:
            wrong, hint = _REFUSALS[refusal]
            kind = TooLargeError if refusal in ("pages", "long") else UsageError
            raise kind(f"{name} {wrong.format(**said)}", hint)
        return said["pages"], text

    async def _ask(self, data: bytes) -> dict[str, Any]:
        """Run the process that reads a PDF."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, str(MOST_CHARACTERS), stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.DEVNULL
        )
        watch = asyncio.create_task(_end_when_large(process.pid))
        try:
            async with asyncio.timeout(self._seconds):
                out, _ = await process.communicate(data)
            said: dict[str, Any] = json.loads(out) if out else {"refusal": "memory"}
        except TimeoutError:
            said = {"refusal": "slow"}
        finally:
            watch.cancel()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return said


def decode(name: str, data: bytes) -> str:
    """Decode a file that is not a PDF: UTF-8, UTF-16 with a byte order mark, or else Western European."""
    encodings = [encoding for mark, encoding in _BYTE_ORDER_MARKS if data.startswith(mark)] or ["utf-8", "cp1252"]
    for encoding in encodings:
        try:
            text = data.decode(encoding)
            break
        except UnicodeDecodeError:
            continue
    else:
        raise UsageError(f"{name} is neither text nor a PDF.", _KINDS)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if any(unicodedata.category(c) == "Cc" and c not in _IN_TEXT for c in set(text)):
        raise UsageError(f"{name} is neither text nor a PDF.", _KINDS)
    if len(text) > MOST_CHARACTERS:
        message = f"{name} has {len(text):,} characters; at most {MOST_CHARACTERS:,} can be attached."
        raise TooLargeError(message, "Attach a part of it.")
    text = _clean(text)
    if not text:
        raise UsageError(f"{name} is empty.", "Attach a file with text in it.")
    return text


def _clean(text: str) -> str:
    """Remove control characters, lone surrogates and surrounding empty lines."""
    whole = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c for c in whole if c in "\t\n" or unicodedata.category(c) != "Cc").strip("\n").rstrip()


async def _end_when_large(pid: int) -> None:
    """End a process that takes too much memory, on systems without limits of their own."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        while process.memory_info().rss < _PDF_MEMORY:
            await asyncio.sleep(_WATCH_S)
        process.kill()
