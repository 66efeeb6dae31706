"""What all strategies of reduced compute share: the first token, a reply's statistics, its limit of divergence."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from edgeinfer.adaptive import ComputeOptions, ComputeUse
from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.decoding.strategy import DecodingStrategy, ReducedStatistics
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.layer_skip.contract import Mask, feed, whole_pass
from edgeinfer.runtime.layer_skip.divergence import DivergenceLimit
from edgeinfer.runtime.sampling.sampler import Sampler

# Tokens of the prompt that are tried before anything is left out.
_TRIED = 32


@dataclass(frozen=True)
class StrategyArguments:
    """What the strategy of a reply works with.

    Attributes:
        backend: of the whole model.
        sampler: of the reply's tokens.
        options: what was asked for.
        chunk: most tokens of a pass.
        rows: most logit rows of a pass, as memory was planned for.
        plain_ms: a pass of the whole model over one token, as far as that is known already.
    """

    backend: Backend
    sampler: Sampler
    options: ComputeOptions
    chunk: int
    rows: int
    plain_ms: float | None


class ReducedDecoding(DecodingStrategy, ABC):
    """Decodes one token at a time with less than the whole model.

    Args:
        given: what it works with.
    """

    def __init__(self, given: StrategyArguments) -> None:
        super().__init__(given.backend, given.sampler)
        self._options = given.options
        self._chunk = given.chunk
        self._plain_ms = given.plain_ms
        # The last row of a pass is the one that counts; samples take the others.
        self._samples = max(1, min(given.rows - 1, 8))
        self._limit = DivergenceLimit(given.options.quality_floor)
        self._statistics = ReducedStatistics()
        self._tokens: list[int] = []  # prompt and reply; the last is the root

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> tuple[int]:  # (V,)
        """Makes the token after a prompt that the whole model evaluated."""
        accepted = self._accept(self._sampler.sample(logits, len(prompt)), logits)
        self._tokens[:] = [*prompt, *accepted]
        started = time.perf_counter()
        self._begin(logits)
        self._statistics.decide_ms += (time.perf_counter() - started) * 1e3
        return accepted

    def next(self, room: int, lost: int) -> tuple[int]:
        """Makes one further token."""
        started = time.perf_counter()
        logits = self._logits(lost)
        accepted = self._accept(self._sampler.sample(logits, len(self._tokens)), logits)
        self._tokens += accepted
        self._statistics.tokens += 1
        self._chosen(logits)
        self._statistics.ms += (time.perf_counter() - started) * 1e3
        return accepted

    @abstractmethod
    def leave(self) -> None:
        """Drops rows that the whole model did not make."""

    @abstractmethod
    def _begin(self, logits: Floats) -> None:  # (V,)
        """Decides what is decided once, after the prompt; from these logits, a view, the first token was chosen."""

    def _try(self, share: float) -> None:
        """Reads the prompt's last tokens in both ways, where divergence is limited: if what is left out diverges too
        far there already, nothing is left out of the reply.
        """
        end = self._backend.cache.length
        size = min(_TRIED, end - 1, len(self._tokens) - 2)
        if not self._limit.watching or size < 1:
            return
        tokens, start = self._tokens[-1 - size : -1], end - size
        wanted = sorted({size - 1 - index * size // self._samples for index in range(min(size, self._samples))})
        self._backend.cache.trim(start)
        reduced = self._reduced(tokens, start, wanted)
        self._backend.cache.trim(start)
        trial = DivergenceLimit(self._limit.nats)
        for index, whole in feed(whole_pass(self._backend), tokens, start, wanted, self._chunk):
            trial.add(whole, reduced.get(index, whole))
        if trial.check(share, 1):
            self._limit.expect(trial)
        else:
            self._limit.refuse()

    @abstractmethod
    def _reduced(self, tokens: Sequence[int], start: int, wanted: Sequence[int]) -> dict[int, Floats]:
        """Copies of the reduced predictions behind these of the prompt's last tokens; those that would be made in full
        anyway are left out. The cache holds what is before them, and may be written to."""

    @abstractmethod
    def _logits(self, lost: int) -> Floats:  # (V,)
        """The logits after the text's last token, a view that the next pass overwrites."""

    @abstractmethod
    def _chosen(self, logits: Floats) -> None:  # (V,)
        """Called when a token sampled from these logits has joined the text, so that passes may run again."""

    def _predicted(self, layer_mask: Mask, costs: BlockCosts) -> ComputeUse:
        """What reduced compute did so far, where reduced tokens run these blocks."""
        ms, whole = costs.ms(layer_mask), costs.ms(np.ones_like(layer_mask))
        use, mask = ReducedDecoding.compute_use(self), tuple(layer_mask.tolist())
        return dataclasses.replace(use, layer_mask=mask, predicted_ms=ms, predicted_speedup=whole / ms)

    def compute_use(self) -> ComputeUse:
        """What reduced compute did so far."""
        statistics, blocks = self._statistics, 2 * self._backend.geometry.num_layers
        plain, sampled = self._plain_ms, self._limit.mean
        return ComputeUse(
            compute=self._options.compute,
            lossless=statistics.reduced == 0,
            tokens=statistics.tokens,
            reduced=statistics.reduced,
            skipped_share=statistics.blocks_skipped / (blocks * statistics.tokens) if statistics.tokens else 0.0,
            caught_up=statistics.caught_up,
            decide_ms=statistics.decide_ms,
            per_token_ms=statistics.ms / statistics.tokens if statistics.tokens else None,
            plain_ms=plain,
            saved_ms=None if plain is None else plain * statistics.tokens - statistics.ms - statistics.decide_ms,
            divergence=None if sampled is None else sampled * statistics.reduced / max(statistics.tokens, 1),
            sampled=self._limit.sampled,
            quality_floor=self._limit.nats,
            stopped_at=self._limit.stopped_at,
        )
