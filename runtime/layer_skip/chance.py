"""Which model makes a token, by chance alone: what a policy that looks at anything has to beat; offered to nobody."""

from __future__ import annotations

import numpy as np

from edgeinfer.runtime.layer_skip.entropy import Stay

__all__ = ["ChancePolicy"]


class ChancePolicy:
    """Implements `contract.SwitchPolicy`: the same share of the tokens, in stretches of the same least length.

    Args:
        share: of tokens that the large model makes, on average.
        stay: tokens that a model makes at least.
        seed: of the draws.
    """

    def __init__(self, share: float, stay: int, seed: int) -> None:
        self._share = share
        self._stay = Stay(stay)
        self._length, self._left, self._drawn = stay, 0, True
        self._random = np.random.default_rng(seed)

    def seen(self, entropy: float) -> None:
        """It does not look."""

    def large(self) -> bool:
        """A draw for each stretch of the least length."""
        if self._left == 0:
            self._drawn, self._left = bool(self._random.random() < self._share), self._length
        self._left -= 1
        return self._stay.choose(self._drawn)
