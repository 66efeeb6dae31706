"""What is done to a text before llama.cpp turns it into tokens, where its own tokenizer lacks a step of the model's.

Steps are named in the metadata of a file and hold for what lies between special tokens, each run of it by itself.
Knows no vocabulary.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from edgeinfer.errors import BundleError

__all__ = ["NORMALIZER_KEY", "STEPS", "GgufNormalizer"]

# An array of strings: names of steps in their order.
NORMALIZER_KEY = "edgeinfer.tokenizer.normalizer"


# A space, and what stands for one in SentencePiece's tokens.
_SPACES = (" ", "\u2581")


def _without_prefix(run: str) -> str:
    return run[1:] if run[0] in _SPACES and len(run) > 1 else run


def _with_prefix(run: str) -> str:
    return run if run[0] == " " else " " + run


def _with_first_prefix(run: str) -> str:
    return run if run[0] in _SPACES else " " + run


# Each takes a run of text that is not empty. "prefix" adds a space where there is none, "first_prefix" before the first
# run alone; "unprefix" takes one away where llama.cpp adds one whether or not there is one.
STEPS: dict[str, Callable[[str], str]] = {
    "nfc": partial(unicodedata.normalize, "NFC"),
    "nfd": partial(unicodedata.normalize, "NFD"),
    "nfkc": partial(unicodedata.normalize, "NFKC"),
    "nfkd": partial(unicodedata.normalize, "NFKD"),
    "trim_spaces": lambda run: run.strip(" "),
    "join_spaces": partial(re.compile(" {2,}").sub, " "),
    "prefix": _with_prefix,
    "first_prefix": _with_first_prefix,
    "unprefix": _without_prefix,
}


class GgufNormalizer:
    """The steps of a file.

    Args:
        steps: names of STEPS.
        special: spellings of the tokens between which a text is normalized.
        plain: of those, the tokens that llama.cpp finds in any text, parsed for special tokens or not.

    Raises:
        BundleError: a step is unknown.
    """

    def __init__(self, steps: Sequence[str], special: Iterable[str], plain: Iterable[str] = ()) -> None:
        unknown = [step for step in steps if step not in STEPS]
        if unknown:
            message = f"The file's tokenizer needs a step {unknown[0]!r} that this edgeinfer does not know."
            raise BundleError(message, "Update edgeinfer, or export the model again.")
        self._steps = tuple(steps)
        self._between, self._plain = _any_of(special), _any_of(plain)

    def __call__(self, text: str, parse_special: bool = True, first: bool = True) -> str:
        """The text as llama.cpp's tokenizer is to get it.

        Args:
            parse_special: special tokens in the text are such, and not text that only looks like them.
            first: no other text comes before it.
        """
        if not self._steps:
            return text
        between = self._between if parse_special else self._plain
        parts = between.split(text) if between is not None else [text]
        # Special tokens are every second part.
        return "".join(part if i % 2 else self._run(part, first=first and i == 0) for i, part in enumerate(parts))

    def _run(self, run: str, *, first: bool) -> str:
        for step in self._steps:
            if run and (first or step != "first_prefix"):
                run = STEPS[step](run)
        return run


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    # The longest first, as tokens may begin with others.
    longest = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None
