"""Errors in the words of the window: what is wrong stays as it is, and a hint that names a command or an option of the
command line says instead what can be done here."""

from __future__ import annotations

import re
from typing import Any

from edgeinfer.errors import BudgetError, EdgeInferError

# Sentences of hints by what is in them, and what the window says instead; "" leaves the sentence out. The first that
# matches holds.
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
# A sentence ends where the next one begins, not at the dots of names and numbers.
_BETWEEN = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def error_view(error: EdgeInferError) -> dict[str, Any]:
    """Returns an error as the app's API shows it."""
    data: dict[str, Any] = {"message": error.message, "hint": hint_of(error.hint)}
    return data | ({"minimum_bytes": error.minimum_bytes} if isinstance(error, BudgetError) else {})


def hint_of(hint: str) -> str:
    """A hint without commands."""
    said = dict.fromkeys(_said(sentence) for sentence in _BETWEEN.split(hint))
    return " ".join(sentence for sentence in said if sentence)


def _said(sentence: str) -> str:
    for pattern, instead in _SENTENCES:
        found = pattern.search(sentence)
        if found is not None:
            return found.expand(instead)
    return sentence
