"""Texts that a model reads once and then has at hand, and what a reply says of those it was made with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from edgeinfer.errors import PromptError
from edgeinfer.options import require
from edgeinfer.records import dataclass

__all__ = ["Context", "ContextUse", "Edits", "Placement"]

Placement = Literal["parallel", "sequence"]
Edits = Literal["evaluate", "turn"]
# The longest contexts of models hold less text.
_MOST_BYTES = 64 * 1000**2


@dataclass(frozen=True)
class Context:
    """A text file that is evaluated once, and can then stand before any prompt, beside others in any order.

    Attributes:
        path: of the text, in UTF-8.
        edits: where the file was changed since it was evaluated, "evaluate" evaluates all of it again; "turn" what is
            new alone, and turns the keys behind it to where they are now (PIE), which is lossy.
        rows: the file that keys and values are kept in; None is one in the user's cache.

    Raises:
        UsageError: `edits` is something else.
    """

    path: str | Path
    edits: Edits = "evaluate"
    rows: str | Path | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.path, str | Path), "path", self.path, "the path of a text file")
        require(self.edits in ("evaluate", "turn"), "edits", self.edits, '"evaluate" or "turn"')
        require(self.rows is None or isinstance(self.rows, str | Path), "rows", self.rows, "the path of a file")

    def text(self) -> str:
        """What the file says now.

        Raises:
            PromptError: it cannot be read, is empty, far too large or not UTF-8.
        """
        path = Path(self.path)
        try:
            if not path.is_file():
                raise PromptError(f"{path} is not a file.", "Name an existing text file.")
            with path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except (OSError, ValueError) as error:
            message = f"Cannot read {path}: {getattr(error, 'strerror', error)}."
            raise PromptError(message, "Name an existing text file.") from error
        if len(data) > _MOST_BYTES:
            raise PromptError(f"{path} is far too large for a context.", "Cut it into several.")
        try:
            text = data.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            hint = "Convert it, for example with iconv -t UTF-8."
            raise PromptError(f"{path} is not UTF-8 text (byte {error.start}).", hint) from error
        if not text:
            raise PromptError(f"{path} is empty.", "Leave it out.")
        return text


@dataclass(frozen=True)
class ContextUse:
    """The contexts that a reply was made with.

    Attributes:
        contexts: how many.
        tokens: of all of them.
        evaluated: of these, those that were evaluated, as no file kept them.
        edited: contexts with rows that were turned to where an edit left them.
        placement: "parallel" or "sequence".
        temperature: that scores of their keys were divided by.
        lossless: whether the text is what evaluating all in one would give: of one context alone that was not edited.
    """

    contexts: int
    tokens: int
    evaluated: int
    edited: int
    placement: Placement
    temperature: float
    lossless: bool
