"""Bytes by term and kind of page; knows nothing of where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Footprint"]


@dataclass(frozen=True)
class Footprint:
    """What a process takes, by term.

    Attributes:
        anonymous: bytes without a file behind them.
        file: resident bytes of mapped files, which the system can take back and read again.
        device: bytes in memory of a device's own, which no budget of the process counts.
    """

    anonymous: Mapping[str, int]
    file: Mapping[str, int]
    device: Mapping[str, int] = field(default_factory=dict)

    @property
    def terms(self) -> dict[str, int]:
        """All of them in the process; a term of both kinds is one sum."""
        names = dict.fromkeys([*self.anonymous, *self.file])
        return {name: self.anonymous.get(name, 0) + self.file.get(name, 0) for name in names}

    def total(self, counted: str) -> int:
        """Bytes of the pages that count: "resident" are both kinds."""
        anonymous = sum(self.anonymous.values())
        return anonymous + sum(self.file.values()) if counted == "resident" else anonymous

    def __add__(self, other: Footprint) -> Footprint:
        device = _sum(self.device, other.device)
        return Footprint(_sum(self.anonymous, other.anonymous), _sum(self.file, other.file), device)


def _sum(mine: Mapping[str, int], theirs: Mapping[str, int]) -> dict[str, int]:
    return {name: mine.get(name, 0) + theirs.get(name, 0) for name in dict.fromkeys([*mine, *theirs])}
