"""Ordered patterns of tensor names, and what each says of the tensors it matches; knows nothing of what that means."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from typing import TypeVar

from edgeinfer.errors import UsageError

__all__ = ["match_patterns"]

Said = TypeVar("Said")


def match_patterns(patterns: Sequence[tuple[str, Said]], names: Iterable[str]) -> dict[str, Said]:
    """What the last pattern that matches a name says of it; names that none matches are left out.

    Args:
        patterns: glob patterns (`*`, `?`, `[...]`) of whole names, case-sensitive, each with its value.

    Raises:
        UsageError: a pattern matches no name.
    """
    names = list(names)
    found: dict[str, Said] = {}
    for pattern, value in patterns:
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            shown = f"{names[0]} and {names[-1]}" if names else "none"
            hint = f"Names are like {shown}; edgeinfer inspect --tensors of any export lists them."
            raise UsageError(f"{pattern!r} matches no matrix that can be quantized.", hint)
        found.update(dict.fromkeys(matched, value))
    return found
