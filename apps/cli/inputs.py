"""What users name on the command line: text in files, stdin and arguments, and models, which are fetched if need be."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from edgeinfer.apps.cli.output import print_note, print_table, progress_bar
from edgeinfer.core.errors import PromptError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import ENGINE_OPTIONS, LoadOptions
from edgeinfer.core.user_files import decode_text

if TYPE_CHECKING:
    from edgeinfer.hub import Offer


# The longest contexts, ten million tokens, hold less text.
_MOST_PROMPT_BYTES = 64 * 1000**2
# Silence of a pipe after which a note says what the command waits for.
_PATIENCE_SECONDS = 3.0


def utf8(text: str, source: str) -> str:
    """Return `text` if its bytes were UTF-8: Python hides other bytes in surrogates, and every non-ASCII one in the C
    locale."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        with contextlib.suppress(UnicodeError):
            return os.fsencode(text).decode("utf-8")
        raise PromptError(f"{source} is not UTF-8 text.", "Convert it, for example with iconv -t UTF-8.") from error
    return text


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, or in the encoding of its byte order mark, without its last line end."""
    try:
        # A pipe without a writer is empty; a blocking open would wait for one.
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with os.fdopen(handle, "rb") as file:
            if hasattr(os, "O_NONBLOCK"):
                os.set_blocking(handle, True)
            return read_stream(file, str(path))
    except OSError as error:
        raise PromptError(f"Cannot read {path}: {error.strerror}.", "Name an existing text file.") from error


def is_piped() -> bool:
    """Whether stdin is a pipe or a file, whose text is meant for the command. A missing terminal does not tell:
    programs that start others often leave them a socket that never ends."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by an object without a file
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_stdin(waiting: str = "") -> str:
    """Read stdin, as `read_text`; `waiting` is a note on stderr after some seconds without input, empty for none."""
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
    """Read the paragraphs of a text file, separated by empty lines."""
    paragraphs = [p.strip() for p in re.split(r"\n\s*\n", read_text(path)) if p.strip()]
    if not paragraphs:
        raise PromptError(f"{path} contains no text.", "Use a file with a few paragraphs.")
    return paragraphs


def read_stream(file: BinaryIO, source: str) -> str:
    """Read an open file, as `read_text`; `source` names it in errors."""
    data = file.read(_MOST_PROMPT_BYTES + 1)
    if len(data) > _MOST_PROMPT_BYTES:
        raise PromptError(f"{source} is larger than {format_size(_MOST_PROMPT_BYTES)}.", "Shorten the prompt.")
    return decode_text(data, source).removesuffix("\n").removesuffix("\r")


class _Notes(logging.Handler):
    """Show downloads and conversions as lines on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        # Straight to stderr, which a progress bar redirects: the line appears above the bar.
        sys.stderr.write(f"{record.getMessage()}\n")


_NOTES = _Notes()


def show_notes() -> None:
    """Show downloads and conversions on stderr from now on."""
    log = logging.getLogger("edgeinfer.hub")
    log.setLevel(logging.INFO)
    if _NOTES not in log.handlers:
        log.addHandler(_NOTES)


def prepared(model: str | None, options: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """Fetch and convert a model that is not here yet; return its name or path, and the options for loading it."""
    rest = {name: value for name, value in options.items() if name not in ("bits", "calibration")}
    if model is None and "bits" not in options:
        return None, rest
    from edgeinfer import hub  # keeps --help fast

    show_notes()
    chosen: list[str] = []
    with progress_bar() as progress:
        path = hub.resolve(
            model,
            bits=options.get("bits"),
            memory=options.get("memory"),
            calibrated=options.get("calibration", True),
            progress=progress or (lambda *_: None),
            choose=type_question(chosen.append),
            llamacpp=LoadOptions.of(**{n: options[n] for n in ENGINE_OPTIONS if n in options}).wants_llamacpp,
        )
    if chosen:
        return chosen[0], rest
    # The path with these bits; others may be here too.
    return (str(path) if "bits" in options else model), rest


def planned(model: str | None, options: Mapping[str, Any]) -> tuple[str | None, dict[str, Any]]:
    """As `prepared`, but leave a GGUF file that is here as it is: its header is enough for a plan."""
    from edgeinfer import hub

    return prepared(model, options) if hub.find_model(model).file is None else (model, dict(options))


def engine_of(model: str | None, options: Mapping[str, Any]) -> dict[str, str | None] | None:
    """Which engine runs a GGUF file, and why it is llama.cpp; None for other models. Its header alone is read."""
    from edgeinfer import hub

    file = hub.find_model(model).file
    if file is None:
        return None
    asked = LoadOptions.of(**{name: options[name] for name in ENGINE_OPTIONS if name in options}).wants_llamacpp
    reason = "its options ask for it" if asked else hub.refusal(file)
    return {"engine": "native" if reason is None else "llamacpp", "reason": reason}


def engine_words(engine: Mapping[str, str | None]) -> str:
    """What runs a GGUF file, for people."""
    return "native kernel, with the file's types" if engine["reason"] is None else f"llama.cpp: {engine['reason']}"


def type_question(tell: Callable[[str], None] = lambda _: None) -> Callable[[list[Offer]], str] | None:
    """Return a function that asks on a terminal which file of a GGUF repository to take, and tells the chosen name;
    None without a terminal."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() and sys.stdout.isatty()):
        return None

    def choose(offers: list[Offer]) -> str:
        name = _ask(offers)
        tell(name)
        return name

    return choose


def _ask(offers: list[Offer]) -> str:
    best = next((offer for offer in offers if offer.recommended), offers[0])
    rows = [_row(number, offer) for number, offer in enumerate(offers, 1)]
    print_table(rows, header=("", "type", "size", "memory", ""))
    while True:
        said = input(f"Which one? [{best.type or best.name}] ").strip()
        if not said:
            return best.name
        for number, offer in enumerate(offers, 1):
            if said.lower() in (str(number), offer.type.lower(), offer.name.lower()):
                return offer.name
        print_note(f"There is no {said}: give a number or a type, or nothing for {best.type or best.name}.")


def _row(number: int, offer: Offer) -> tuple[str, ...]:
    note = "recommended" if offer.recommended else "" if offer.fits else "more memory than there is"
    size = format_size(offer.bytes) if offer.bytes else "unknown"
    return str(number), offer.type or offer.name.partition(":")[2], size, format_size(offer.memory), note
