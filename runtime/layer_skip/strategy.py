"""The base of strategies that compute less: what they promise, the limit of their divergence, and what they count."""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ComputeUse
from edgeinfer.nn.arithmetic import log_softmax
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass
from edgeinfer.runtime.decoding import sequence as decoding
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, Strategy
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.sampling.sampler import Sampler

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

    def states(self) -> Passes[Floats]:
        """Hidden states of its last tokens: those entering each layer, then those leaving the last. (L + 1, S, D)"""


class SkipPolicy(Protocol):
    """Decides once per reply what runs for its tokens."""

    reads_states: ClassVar[bool]  # of the prompt, which its passes then keep

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Passes[Mask]:
        """Choose the blocks that run."""


class SmallModel(Protocol):
    """A small model with a cache of its own, which evaluates of a growing text what it has not seen yet."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Start with a text; what its cache shares with it stays."""

    def after(self, tokens: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        """Logits after a text that has only grown since `begin`, a view; None where it does not fit the cache."""

    def behind(self, tokens: Sequence[int], count: int) -> Passes[list[Floats] | None]:
        """Copies of the logits (V,) after each of the last tokens of such a text; None where it does not fit."""


class SwitchPolicy(Protocol):
    """Decides token by token which of two models makes it."""

    def seen(self, entropy: float) -> None:
        """A token was predicted with so many bits of entropy, by whichever model made it."""

    def large(self) -> bool:
        """Whether the large model makes the next token."""


def feed(
    backend: Backend,
    cache: KVCache,
    tokens: Sequence[int],
    start: int,
    wanted: Sequence[int],
    chunk: int,
    see: Callable[[int, Floats], object],
    layer_mask: Mask | None = None,
) -> Passes[None]:
    """Feed tokens from row `start` on, chunk by chunk, and show `see` these ascending indices, each with the logits
    (V,) behind it, a view."""
    for at in range(0, len(tokens), chunk):
        size = min(chunk, len(tokens) - at)
        rows = [index - at for index in wanted if at <= index < at + size]
        ids, places = np.array(tokens[at : at + size], np.int64), start + at + np.arange(size)
        batch = Pass(ids, places, np.array(rows, np.int64), layer_mask=layer_mask)
        (result,) = yield Evaluate(backend, ((cache, batch),))
        for row, logits in zip(rows, result.logits, strict=True):
            see(at + row, logits)


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

    sequence: decoding.Sequence  # the reply's, of the whole model
    sampler: Sampler  # of its tokens
    options: ReplyOptions  # what was asked for
    rows: int  # most logit rows of a pass, as memory was planned for
    plain_ms: float | None  # a pass of the whole model over one token, as far as that is known already

    def timed(self, costs: BlockCosts) -> StrategyArguments:
        """Costs with a plain pass as block costs have it where nothing else tells."""
        return self if self.plain_ms is not None else dataclasses.replace(self, plain_ms=costs.whole[0])


class ReducedDecoding(Strategy, ABC):
    """Decodes one token at a time with less than the whole model."""

    def __init__(self, given: StrategyArguments) -> None:
        super().__init__(given.sequence, given.sampler)
        self._options, self._chunk = given.options, given.sequence.chunk
        self.compute: ComputeUse = ComputeUse(given.options.compute, plain_ms=given.plain_ms)
        self._blocks_skipped = 0  # attention and MLP blocks, over all tokens
        self._ms = 0.0  # of all tokens
        # The last row of a pass is the one that counts; samples take the others.
        self._samples = max(1, min(given.rows - 1, 8))
        self._limit = DivergenceLimit(given.options.quality_floor)

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        accepted = self._first(prompt, logits)
        started = time.perf_counter()
        yield from self._begin([*prompt, *accepted], logits)
        self.compute.decide_ms += (time.perf_counter() - started) * 1e3
        return accepted

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        started, tokens = time.perf_counter(), self._sequence.tokens
        logits = yield from self._logits(tokens, lost)
        accepted = self._accept(self._sampler.sample(logits, len(tokens)), logits)
        self.compute.tokens += 1
        yield from self._chosen(logits)
        self._ms += (time.perf_counter() - started) * 1e3
        return accepted

    @abstractmethod
    def _begin(self, text: Sequence[int], logits: Floats) -> Passes[None]:  # (V,)
        """Decide what is decided once, after the prompt; from these logits, a view, the text's last token was
        chosen."""

    def _try(self, text: Sequence[int], share: float) -> Passes[None]:
        """Read the prompt's last tokens in both ways, where divergence is limited: if what is left out diverges too far
        there already, nothing is left out of the reply."""
        end = self._cache.length
        size = min(_TRIED, end - 1, len(text) - 2)
        if not self._limit.watching or size < 1:
            return
        tokens, start = text[-1 - size : -1], end - size
        wanted = sorted({size - 1 - index * size // self._samples for index in range(min(size, self._samples))})
        self._cache.trim(start)
        reduced = yield from self._reduced(text, tokens, start, wanted)
        self._cache.trim(start)
        trial = DivergenceLimit(self._limit.nats)
        yield from self._feed(tokens, start, wanted, lambda index, whole: trial.add(whole, reduced.get(index, whole)))
        if trial.check(share, 1):
            self._limit.expect(trial)
        else:
            self._limit.refuse()

    @abstractmethod
    def _reduced(
        self, text: Sequence[int], tokens: Sequence[int], start: int, wanted: Sequence[int]
    ) -> Passes[dict[int, Floats]]:
        """Copies of the reduced predictions behind these of the prompt's last tokens; those that would be made in full
        anyway are left out. The cache holds what is before them, and may be written to."""

    @abstractmethod
    def _logits(self, tokens: Sequence[int], lost: int) -> Passes[Floats]:  # (V,)
        """The logits after the text's last token, a view that the next pass overwrites."""

    @abstractmethod
    def _chosen(self, logits: Floats) -> Passes[None]:  # (V,)
        """Called when a token was sampled from these logits, so that passes may run again."""

    def _feed(
        self,
        tokens: Sequence[int],
        start: int,
        wanted: Sequence[int],
        see: Callable[[int, Floats], object],
        layer_mask: Mask | None = None,
    ) -> Passes[None]:
        """`feed` the reply's text."""
        return feed(self._backend, self._cache, tokens, start, wanted, self._chunk, see, layer_mask)

    def _predict(self, layer_mask: Mask, costs: BlockCosts) -> None:
        """Tell what passes of these blocks, which run for reduced tokens, are expected to take."""
        ms, whole, use = costs.ms(layer_mask), costs.ms(np.ones_like(layer_mask)), self.compute
        use.layer_mask, use.predicted_ms, use.predicted_speedup = tuple(layer_mask.tolist()), ms, whole / ms

    def finish(self) -> None:
        use, limit, blocks = self.compute, self._limit, 2 * self._backend.geometry.num_layers
        use.lossless = use.reduced == 0
        use.sampled, use.quality_floor, use.stopped_at = limit.sampled, limit.nats, limit.stopped_at
        use.divergence = None if limit.mean is None else limit.mean * use.reduced / max(use.tokens, 1)
        if use.tokens:
            use.skipped_share = self._blocks_skipped / (blocks * use.tokens)
            use.per_token_ms = self._ms / use.tokens
        use.saved_ms = None if use.plain_ms is None else use.plain_ms * use.tokens - self._ms - use.decide_ms
