"""Two models that take turns at random: what any policy of switching has to beat."""

from __future__ import annotations

import numpy as np

from edgeinfer.runtime.layer_skip.entropy import ModelSwitchDecoding, Stay
from edgeinfer.runtime.layer_skip.reduced_compute import ComputeMethod, ReducedComputeStrategies
from edgeinfer.runtime.layer_skip.strategy import StrategyArguments


class RandomPolicy:
    """Draws at random which model makes a stretch of tokens, the large one a `share`: the baseline that any policy has
    to beat."""

    def __init__(self, share: float, stay: int, seed: int) -> None:
        self._share = share
        self._stay = Stay(stay)
        self._length, self._left, self._drawn = stay, 0, True
        self._random = np.random.default_rng(seed)

    def seen(self, entropy: float) -> None:
        """Ignores the entropy."""

    def large(self) -> bool:
        """Draw once for each stretch of the least length."""
        if self._left == 0:
            self._drawn, self._left = bool(self._random.random() < self._share), self._length
        self._left -= 1
        return self._stay.choose(self._drawn)


def _make(strategies: ReducedComputeStrategies, given: StrategyArguments) -> ModelSwitchDecoding:
    policy = RandomPolicy(given.options.compute_share, given.options.entropy_stay, seed=0)
    return ModelSwitchDecoding(given, strategies.require_small(), policy, strategies.parameters)


METHOD = ComputeMethod(name="random", help="two models take turns at random, for comparison", make=_make)
