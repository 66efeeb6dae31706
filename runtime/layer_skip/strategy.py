"""The base of strategies that compute less: what they promise, the limit of their divergence, and what they count."""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.arithmetic import log_softmax
from edgeinfer.core.options.reply import GenerationConfig
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ComputeUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, Pass
from edgeinfer.runtime.decoding.strategy import DecodingStrategy, ReducedStatistics
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.text.contract import TokenizerLike

_LN2 = float(np.log(2))
# Samples from which on a reply's own say how far its tokens diverge at worst, and spreads above the mean that are that.
_ENOUGH, _SPREADS = 8, 2.0
# Tokens of the prompt that are tried before anything is left out.
_TRIED = 32
Mask = NDArray[np.bool_]  # (2 L,), [2i] attention and [2i+1] MLP of layer i


@dataclass(frozen=True)
class SpeedTarget:
    """What a set of layers is chosen for."""

    speedup: float  # of a pass, over the whole model's
    costs: BlockCosts  # of the blocks here

    def reached(self, mask: Mask) -> bool:
        """Whether passes of these blocks are that fast."""
        whole = self.costs.ms(np.ones_like(mask))
        # Sums of floats: what is equal on paper counts as reached.
        return self.costs.ms(mask) * self.speedup <= whole * (1 + 1e-9)


class EvaluatedPrompt(Protocol):
    """A prompt that the whole model evaluated, as policies may look at it."""

    @property
    def layers(self) -> int:
        """The number of layers, L."""

    def states(self) -> Floats:
        """Hidden states of its last tokens: those entering each layer, then those leaving the last. (L + 1, S, D)"""


class SkipPolicy(Protocol):
    """Decides once per reply what runs for its tokens."""

    reads_states: ClassVar[bool]  # of the prompt, which its passes then keep

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Mask:
        """Choose the blocks that run."""


class SmallModel(Protocol):
    """A small model with a cache of its own, which evaluates of a growing text what it has not seen yet."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Start with a text; what its cache shares with it stays."""

    def after(self, tokens: Sequence[int]) -> Floats | None:  # (V,)
        """Logits after a text that has only grown since `begin`, a view; None where it does not fit the cache."""

    def behind(self, tokens: Sequence[int], count: int) -> list[Floats] | None:
        """Copies of the logits (V,) after each of the last tokens of such a text; None where it does not fit."""


class SwitchPolicy(Protocol):
    """Decides token by token which of two models makes it."""

    def seen(self, entropy: float) -> None:
        """A token was predicted with so many bits of entropy, by whichever model made it."""

    def large(self) -> bool:
        """Whether the large model makes the next token."""


def feed(
    run: Callable[[Ints, Ints, Ints], Floats], tokens: Sequence[int], start: int, wanted: Sequence[int], chunk: int
) -> Iterator[tuple[int, Floats]]:
    """Feed tokens from row `start` on, chunk by chunk, and yield the logits (V,) after those of these ascending
    indices."""
    for at in range(0, len(tokens), chunk):
        size = min(chunk, len(tokens) - at)
        rows = [index - at for index in wanted if at <= index < at + size]
        logits = run(np.array(tokens[at : at + size], np.int64), start + at + np.arange(size), np.array(rows, np.int64))
        yield from ((at + row, each) for row, each in zip(rows, logits, strict=True))


def whole_pass(backend: Backend) -> Callable[[Ints, Ints, Ints], Floats]:
    """Passes of the whole model, as `feed` takes them."""
    return lambda tokens, positions, rows: backend.forward(Pass(tokens, positions, rows)).logits


def entropy_bits(logits: Floats) -> float:  # (V,)
    """Entropy of the next token before any temperature."""
    shifted = logits - logits.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    # Tokens that are impossible are minus infinity, and add nothing.
    shifted = np.where(weights > 0, shifted, 0)
    return max(0.0, (float(np.log(total)) - float(weights @ shifted) / total) / _LN2)


def likeliest(logits: Floats) -> tuple[int, float]:  # (V,)
    """The likeliest token and its probability."""
    best = int(logits.argmax())
    return best, 1.0 / float(np.exp(logits - logits[best]).sum())


def divergence(whole: Floats, reduced: Floats) -> float:  # (V,), (V,)
    """Kullback-Leibler divergence of the reduced model's prediction from the whole model's, in nats."""
    ours, theirs = log_softmax(reduced, np.float64), log_softmax(whole, np.float64)
    probabilities = np.exp(theirs)
    possible = probabilities > 0
    return max(0.0, float((probabilities[possible] * (theirs[possible] - ours[possible])).sum()))


class DivergenceLimit:
    """A limit in nats on the mean divergence of a reply's tokens; None only counts."""

    def __init__(self, nats: float | None) -> None:
        self.nats = nats
        self.sampled = 0
        self.stopped_at: int | None = None  # tokens of the reply when it was exceeded; None as long as it is not
        self._sum = self._squares = 0.0
        self._worst = math.inf  # of a token, as the prompt tells

    @property
    def watching(self) -> bool:
        """Whether samples may still stop the reduction."""
        return self.nats is not None and self.stopped_at is None

    @property
    def stopped(self) -> bool:
        """Whether nothing more is to be left out."""
        return self.stopped_at is not None

    def add(self, whole: Floats, reduced: Floats) -> None:  # (V,), (V,)
        """Add a sampled token, as the whole model predicts it and as the reduced one did."""
        nats = divergence(whole, reduced)
        self.sampled += 1
        self._sum += nats
        self._squares += nats * nats

    @property
    def mean(self) -> float | None:
        return self._sum / self.sampled if self.sampled else None

    @property
    def bound(self) -> float:
        """What the mean may be: it and one standard error."""
        return self._sum / self.sampled + self._spread / math.sqrt(self.sampled) if self.sampled else 0.0

    @property
    def _spread(self) -> float:
        """The samples' standard deviation or their mean: divergences are spread at least as widely as that, and a few
        samples that happen to agree would say otherwise."""
        mean = self._sum / self.sampled
        return max(math.sqrt(max(self._squares / self.sampled - mean * mean, 0.0)), mean)

    @property
    def worst(self) -> float:
        """What a token is likely to diverge by at worst."""
        return self._sum / self.sampled + _SPREADS * self._spread if self.sampled >= _ENOUGH else self._worst

    def expect(self, prompt: DivergenceLimit) -> None:
        """Take over from samples of the prompt what a token may diverge by at worst."""
        if prompt.sampled:
            self._worst = prompt._sum / prompt.sampled + _SPREADS * prompt._spread

    def allows(self, further: int, reduced: int, tokens: int) -> bool:
        """Whether so many further tokens, at their worst, leave the reply's mean within the limit as it is now."""
        if self.nats is None:
            return True
        return self.bound * reduced + self.worst * further <= self.nats * tokens

    def check(self, reduced: float, tokens: int) -> bool:
        """Whether the reply may go on as it does, `reduced` of whose tokens were made with less."""
        if self.nats is not None and self.stopped_at is None and self.bound * reduced > self.nats * tokens:
            self.stopped_at = tokens
        return self.stopped_at is None

    @property
    def easy(self) -> bool:
        """Whether the samples are so far below the limit that fewer of them will do."""
        return self.nats is not None and self.bound <= self.nats / 2

    def refuse(self) -> None:
        """Stops from the beginning, as samples of the prompt diverge too far."""
        self.stopped_at = 0


@dataclass(frozen=True)
class StrategyArguments:
    """What the strategy of a reply works with."""

    backend: Backend  # of the whole model
    sampler: Sampler  # of the reply's tokens
    options: GenerationConfig  # what was asked for
    chunk: int  # most tokens of a pass
    rows: int  # most logit rows of a pass, as memory was planned for
    plain_ms: float | None  # a pass of the whole model over one token, as far as that is known already
    # `tokenizer`, `stop_ids`: of the reply.
    tokenizer: TokenizerLike | None = None
    stop_ids: frozenset[int] = frozenset()

    def timed(self, costs: BlockCosts) -> StrategyArguments:
        """Costs with a plain pass as block costs have it where nothing else tells."""
        return self if self.plain_ms is not None else dataclasses.replace(self, plain_ms=costs.whole[0])


class ReducedDecoding(DecodingStrategy, ABC):
    """Decodes one token at a time with less than the whole model."""

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
        """Make the token after a prompt that the whole model evaluated."""
        accepted = self._accept(self._sampler.sample(logits, len(prompt)), logits)
        self._tokens[:] = [*prompt, *accepted]
        started = time.perf_counter()
        self._begin(logits)
        self._statistics.decide_ms += (time.perf_counter() - started) * 1e3
        return accepted

    def next(self, room: int, lost: int) -> tuple[int]:
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
        """Drop rows that the whole model did not make."""

    @abstractmethod
    def _begin(self, logits: Floats) -> None:  # (V,)
        """Decide what is decided once, after the prompt; from these logits, a view, the first token was chosen."""

    def _try(self, share: float) -> None:
        """Read the prompt's last tokens in both ways, where divergence is limited: if what is left out diverges too far
        there already, nothing is left out of the reply."""
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
