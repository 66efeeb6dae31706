"""Decoding with less than the whole model: what may be asked for, and what it did; knows nothing of models.

All of it is lossy, and results say so.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UsageError

__all__ = ["COMPUTES", "ComputeOptions", "ComputeUse"]

# Ways of computing less, as options name them; runtime/adaptive has them, a test holds the two equal.
COMPUTES = ("full",)


@dataclass(frozen=True)
class ComputeOptions:
    """How much of the model each token takes.

    Attributes:
        compute: one of COMPUTES; all but "full" are lossy.
    """

    compute: str = "full"

    def check_compute(self) -> None:
        """Refuses values out of range.

        Raises:
            UsageError: one is.
        """
        if self.compute not in COMPUTES:
            raise UsageError(f"Unknown way to compute {self.compute!r}.", f"Choose one of {', '.join(COMPUTES)}.")


@dataclass(frozen=True)
class ComputeUse:
    """What computing less did in a reply.

    Attributes:
        compute: as it was asked for.
        lossless: never, as long as anything was left out.
    """

    compute: str
    lossless: bool = False
