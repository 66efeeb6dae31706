"""Decoding that looks at several continuations or reweighs one: what may be asked for, and what it did.

Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UsageError

__all__ = ["SEARCHES", "SearchOptions", "SearchUse"]

# Ways of searching, as options name them; runtime/search has them, a test holds the two equal.
SEARCHES = ("off",)


@dataclass(frozen=True)
class SearchOptions:
    """How a reply is searched for.

    Attributes:
        search: one of SEARCHES.
    """

    search: str = "off"

    def check_search(self) -> None:
        """Refuses values out of range.

        Raises:
            UsageError: one is.
        """
        if self.search not in SEARCHES:
            raise UsageError(f"Unknown search {self.search!r}.", f"Choose one of {', '.join(SEARCHES)}.")


@dataclass(frozen=True)
class SearchUse:
    """What searching did in a reply.

    Attributes:
        search: as it was asked for.
    """

    search: str
