"""A reply that two models write by turns.

Each keeps a cache of its own and sees what the other one wrote only when its turn comes, in one pass over all of it.
The rows of the large model's cache are always its own; there are fewer of them while the small one writes.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from statistics import median

from edgeinfer.adaptive import ComputeUse
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.layer_skip.contract import SmallModel, SwitchPolicy, feed, whole_pass
from edgeinfer.runtime.layer_skip.divergence import entropy_bits
from edgeinfer.runtime.layer_skip.strategy import ReducedDecoding, StrategyArguments

# Tokens that the small model may write before the large one looks at them, where divergence is limited: at first few,
# as nothing is known yet.
_FIRST, _LONGEST = 4, 8


class ModelSwitchDecoding(ReducedDecoding):
    """A reply that two models write by turns, one token at a time.

    Args:
        given: what it works with; its backend is the large model's.
        small: the small model, which follows texts lazily.
        policy: decides whose turn it is.
        parameters: of the small model over those of the large one.
    """

    def __init__(self, given: StrategyArguments, small: SmallModel, policy: SwitchPolicy, parameters: float) -> None:
        super().__init__(given)
        self._small = small
        self._policy = policy
        self._parameters = parameters
        self._active_large = True
        self._switches = 0
        self._kept: dict[int, Floats] = {}  # of tokens the large model has not fed: index into the text, said behind it
        self._window = _FIRST
        self._large_ms: list[float] = []  # of its passes over one token

    def _begin(self, logits: Floats) -> None:
        self._kept.clear()
        self._small.begin(self._tokens)
        self._policy.seen(entropy_bits(logits))
        if not self._statistics.tokens:
            options = self._options
            self._try(1 - options.compute_share if options.entropy_threshold is None else 1.0)

    def _reduced(self, tokens: Sequence[int], start: int, wanted: Sequence[int]) -> dict[int, Floats]:
        # The last ones, in one pass: the small model keeps what it has read.
        said = self._small.behind(self._tokens[:-1], len(wanted)) or []
        return {len(tokens) - len(said) + place: logits for place, logits in enumerate(said)}

    def _logits(self, lost: int) -> Floats:  # (V,)
        seen = self._backend.cache.length + lost  # tokens that the large model has evaluated
        unseen = len(self._tokens) - seen
        large = self._policy.large() or self._limit.stopped
        if self._limit.watching:
            # What a run of the small one's tokens may cost must have been earned by the large one's before.
            begins = unseen == 1 and not self._limit.allows(
                self._window, self._statistics.reduced, self._statistics.tokens
            )
            large = large or unseen > self._window or begins
        # All that is unseen must fit its cache.
        large = large or self._backend.cache.length + unseen >= self._backend.cache.capacity
        logits = None if large else self._small.after(self._tokens)
        large = logits is None  # also where the text is too long for the small one
        if logits is None:
            logits = self._of_large(seen, unseen)
        else:
            self._statistics.reduced += 1
            if self._limit.watching and (unseen - 1) % -(-self._window // self._samples) == 0:
                self._kept[len(self._tokens) - 1] = logits.copy()
        self._switches += large != self._active_large
        self._active_large = large
        return logits

    def _of_large(self, seen: int, unseen: int) -> Floats:  # (V,)
        """The large model's turn: it evaluates what it has not seen."""
        started = time.perf_counter()
        wanted = [*(index - seen for index in sorted(self._kept)), unseen - 1]
        last: Floats | None = None
        run = whole_pass(self._backend)
        for index, logits in feed(run, self._tokens[seen:], self._backend.cache.length, wanted, self._chunk):
            if index < unseen - 1:
                self._limit.add(logits, self._kept[seen + index])
            last = logits
        assert last is not None, "the root is always unseen"
        if unseen == 1:
            self._large_ms.append((time.perf_counter() - started) * 1e3)
        self._kept.clear()
        self._statistics.caught_up += unseen - 1
        self._limit.check(self._statistics.reduced, self._statistics.tokens)
        if self._limit.easy:
            self._window = min(2 * self._window, _LONGEST)
        return last

    def _chosen(self, logits: Floats) -> None:
        self._policy.seen(entropy_bits(logits))

    def leave(self) -> None:
        """Drops nothing: the large model's rows are its own."""

    def compute_use(self) -> ComputeUse:
        """What reduced compute did so far; without another measure, the large model's own passes time a plain one."""
        if self._plain_ms is None and self._large_ms:
            self._plain_ms = median(self._large_ms)
        tokens = max(self._statistics.tokens, 1)
        share = 1 - self._statistics.reduced / tokens
        return dataclasses.replace(
            super().compute_use(),
            large_share=share,
            switches=self._switches,
            parameter_share=share + (1 - share) * self._parameters,
        )
