"""Errors of the chat app, in the words of its window, and checks of texts and numbers from outside."""

from __future__ import annotations

import re
import unicodedata
from typing import Any, ClassVar

from edgeinfer.core.errors import BudgetError, EdgeInferError, StorageError, UsageError, UserError


class NotFoundError(UserError):
    """There is no such conversation, message, file or download."""

    status: ClassVar[int] = 404
    code: ClassVar[str] = "not_found"


class ConflictError(UserError):
    """The request conflicts with a reply or download in progress."""

    status: ClassVar[int] = 409
    code: ClassVar[str] = "conflict"


class NoModelError(UserError):
    """No model is loaded."""

    status: ClassVar[int] = 409
    code: ClassVar[str] = "no_model"


class DiskFullError(StorageError):
    """The disk is full."""

    status: ClassVar[int] = 507
    code: ClassVar[str] = "storage"


class TooLargeError(UserError):
    """A request or file is larger than the app allows."""

    status: ClassVar[int] = 413
    code: ClassVar[str] = "too_large"


LONGEST_NAME, LONGEST_SEARCH = 4_096, 1_000
# Larger JSON numbers are read differently by different programs.
_LARGEST = 2**53
# They reverse the text around them, so that a name could look like another.
_TURNING = {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def check_text(text: str, name: str) -> str:
    """Check a text of any number of lines."""
    if "\0" in text:
        raise UsageError(f"{name} has a NUL character.", "Leave it out.")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            message = f"{name} contains half of a surrogate pair, which is not a character."
            raise UsageError(message, "Send text in UTF-8.") from error
    return text


def check_name(text: str, name: str, most: int = LONGEST_NAME) -> str:
    """Check one line: a name, a path, an id or a search text."""
    if len(text) > most:
        raise UsageError(f"{name} is longer than {most:,} characters.", "Shorten it.")
    if any(c in _TURNING or unicodedata.category(c) == "Cc" for c in text if not c.isprintable()):
        raise UsageError(f"{name} has control characters.", "Write it in one line of plain text.")
    return check_text(text, name)


def check_values(data: Any, name: str) -> None:
    """Check every text and number in a JSON value."""
    level = [data]
    while level:
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += (*value.keys(), *value.values())
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, str):
                check_text(value, name)
            elif isinstance(value, int | float) and not -_LARGEST <= value <= _LARGEST:
                raise UsageError(f"{name} has a number that is too large.", "Send smaller numbers.")
        level = inner


# Sentences of hints by pattern, and what the window says instead; "" drops the sentence. The first match counts.
_SENTENCES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), said)
    for pattern, said in (
        (r"run a model that is on this machine", "Or use a model that is on this computer."),
        (r"Accept its terms at (\S+?),? .*auth login", r"Accept its terms at \1 and sign in to Hugging Face here."),
        (r"private.*auth login", "If it is private, sign in to Hugging Face on this computer first."),
        (r"auth login", "Sign in to Hugging Face on this computer, then try again."),
        (
            r"edgeinfer\[gguf\]|llama-cpp-python",
            "This installation does not include llama.cpp, which is a separate add-on.",
        ),
        (r"edgeinfer\[desktop\]|pip install", "This installation does not include a part that is needed here."),
        (r"edgeinfer pull", "Download it first."),
        (r"edgeinfer models --catalog|list_models\(\)", "Choose one under Models."),
        (r"edgeinfer export", "Import it under Models."),
        (r"--data\b", "Free some space, or check who may write there."),
        (r"--memory|\bmemory=|--kv\b", "Choose a larger memory budget under Models."),
        (r"larger context", "Shorten it, leave out older messages, or choose a larger context under Models."),
        (r"--context|\bcontext=", "Choose another context under Models."),
        (r"Unset it", "It is set where edgeinfer was started."),
        (r"`|(?<!\S)--?[a-z]|\b[a-z_]+=\S|\bedgeinfer [a-z]+ |\bpip\b", ""),
    )
)
# Boundaries of sentences, not dots in names and numbers.
_BETWEEN = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def error_view(error: EdgeInferError) -> dict[str, Any]:
    """An error in the form of the app's API."""
    data: dict[str, Any] = {"message": error.message, "hint": hint_of(error.hint)}
    return data | ({"minimum_bytes": error.minimum_bytes} if isinstance(error, BudgetError) else {})


def hint_of(hint: str) -> str:
    """A hint without commands and options of the command line, which the window does not have."""
    said = dict.fromkeys(_said(sentence) for sentence in _BETWEEN.split(hint))
    return " ".join(sentence for sentence in said if sentence)


def _said(sentence: str) -> str:
    for pattern, instead in _SENTENCES:
        found = pattern.search(sentence)
        if found is not None:
            return found.expand(instead)
    return sentence
