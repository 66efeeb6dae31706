"""First finish search: of several replies drawn side by side, the first to end."""

from __future__ import annotations

from collections.abc import Sequence

from edgeinfer.runtime.search.drawn import Drawn, DrawnWay

__all__ = ["FirstFinish"]


class FirstFinish(DrawnWay):
    """The first to end; of several that end together, and where none does, that of the likeliest tokens."""

    def _enough(self, replies: Sequence[Drawn]) -> bool:
        return any(reply.reader.ended for reply in replies)

    def _choose(self, replies: Sequence[Drawn]) -> int:
        return max(range(len(replies)), key=lambda index: (replies[index].reader.ended, replies[index].mean))
