"""What searches share that ask a caller's function about texts."""

from __future__ import annotations

import math
from collections.abc import Callable

from edgeinfer.core.errors import UsageError
from edgeinfer.core.methods import method_option

# A program's own code: requests cannot give one.
SCORER = method_option(
    "scorer", None, "function score(text, ended); on the command line a Python file that defines it", kind=Callable
)


def asked_score(scorer: Callable[[str, bool], float], text: str, ended: bool) -> float:
    """What a caller's scorer says of a text."""
    try:
        score = float(scorer(text, ended))
    except Exception as error:
        message = f"The scorer failed on a text of {len(text)} characters: {type(error).__name__}: {error}"
        raise UsageError(message, "It is called with the text so far and whether that is all.") from error
    if math.isnan(score) or score == math.inf:
        raise UsageError(f"The scorer gave {score}.", "Return a number, or -inf for what is never to be chosen.")
    return score
