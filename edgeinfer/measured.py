"""What can be measured of a loaded model, and what tuning finds for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.config import GenerationConfig
from edgeinfer.model_parts import ModelParts
from edgeinfer.results import PassWork, Result
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.tuning import measure
from edgeinfer.runtime.tuning.drafting_search import TuneResult, tune
from edgeinfer.runtime.tuning.fewer_experts import FewerExperts, compare_fewer_experts
from edgeinfer.runtime.tuning.reply_reading import ReplyReading, read_reply
from edgeinfer.runtime.tuning.skip_search import Sample, calibrate_entropy, calibrate_skips
from edgeinfer.tokenizing import Tokenizing

__all__ = [
    "SKIP_TOKENS",
    "TUNING_PROMPTS",
    "EntropyFacts",
    "Measured",
    "SkipLevel",
    "TuneResult",
    "own_texts",
    "tune_by",
]

# What a model is tuned by where its user has nothing better: openings that any model goes on with.
TUNING_PROMPTS = (
    "Once upon a time, there was a little girl who lived near the woods.",
    "The most important thing to know about water is that",
    "def main(arguments):",
    "Dear Sir or Madam, I am writing to you because",
)
# As many as a score looks at, of layers that draft and of blocks that answers skip.
_TOKENS, SKIP_TOKENS = 33, 48


def tune_by(
    prompts: Iterable[list[int]], generate: Callable[..., Result], backend: Backend, **options: Any
) -> TuneResult:
    """Lets the model answer and searches by the answers; options and errors as `tuning.drafting_search.tune`."""
    return tune(backend, own_texts(prompts, generate, _TOKENS), **options)


def own_texts(
    prompts: Iterable[list[int]], generate: Callable[..., Result], tokens: int, temperature: float = 0.0
) -> list[Sample]:
    """What the model answers, so many tokens each."""
    samples = []
    for seed, ids in enumerate(prompts):
        options = {"temperature": temperature, "seed": seed}
        reply = generate(ids, max_tokens=tokens, speculation="off", ignore_eos=True, **options)
        samples.append(Sample(tuple(ids), reply.token_ids))
    return samples


@dataclass(frozen=True)
class SkipLevel:
    """One set of blocks that answers can skip.

    Attributes:
        layer_mask: blocks that run, [2i] attention and [2i+1] MLP of layer i.
        divergence: nats from the whole model's predictions on the texts of the search, mean over tokens.
        ms: of a pass, predicted by measured costs.
        speedup: over the whole model's.
    """

    layer_mask: tuple[bool, ...]
    divergence: float
    ms: float
    speedup: float


@dataclass(frozen=True)
class EntropyFacts:
    """How unsure a draft model is of replies of its target.

    Attributes:
        tokens: that tell it.
        thresholds: bits above which the large model takes over, by the share of tokens that this leaves it.
    """

    tokens: int
    thresholds: dict[float, float]


class Measured(Tokenizing):
    """A model while no reply is running. Measuring empties the cache."""

    def _reply(self, prompt: Sequence[int], **options: Any) -> Result:
        """Continues a prompt."""
        raise NotImplementedError

    def _require_idle(self) -> None:
        """Ends a reply that was left unfinished.

        Raises:
            UsageError: another thread may be reading it.
        """
        raise NotImplementedError

    def _alone(self) -> AbstractContextManager[None]:
        """Keeps replies of other threads from beginning before the block ends; errors as `_require_idle`."""
        raise NotImplementedError

    @property
    def _parts(self) -> ModelParts:
        return self._lifecycle.parts()

    @contextmanager
    def _idle(self) -> Iterator[ModelParts]:
        """The parts while no reply is running, which stay inside the block."""
        with self._alone(), self._lifecycle.acquire() as parts:
            yield parts

    def measure_passes(self, sizes: Sequence[int], *, past: int, repeats: int) -> dict[int, list[float]]:
        """c(m): milliseconds of passes over m new tokens with m logit rows after `past` tokens; empties the cache."""
        with self._idle() as parts:
            return measure.pass_times(parts.engine, sizes, past=past, repeats=repeats)

    def measure_prefill(self, tokens: int, *, repeats: int) -> list[float]:
        """Milliseconds of evaluating a prompt of `tokens` tokens, chunk by chunk; empties the cache."""
        with self._idle() as parts:
            return measure.prefill_times(parts.engine, tokens, repeats=repeats)

    def measure_decode(self, tokens: int, *, past: int) -> measure.DecodeTimes:
        """Per greedily decoded token, milliseconds inside the session and in all; empties the cache."""
        with self._idle() as parts:
            return measure.decode_times(parts.engine, tokens, past=past)

    def measure_work(self, prompt: int, reply: int, *, past: int = 0) -> measure.WorkTimes:
        """Milliseconds of evaluating a prompt behind `past` tokens, and of decoding a reply greedily and plainly, in
        as many passes as tokens; `llama-bench` calls these pp, tg and depth. What the cache holds of the past stays.

        Raises:
            UsageError: there is nothing to do, or the context is too small.
        """
        with self._idle() as parts:
            return measure.work_times(parts.engine, prompt, reply, past=past)

    def pass_work(self, tokens: int, rows: int) -> PassWork:
        """What a pass over `tokens` new tokens with `rows` logit rows has to do, by the bundle's table of weights."""
        return measure.pass_work(self._lifecycle.facts.tensors, tokens, rows)

    def logits(self, tokens: Sequence[int]) -> Iterator[Floats]:
        """The logits after each token of a text, as arrays of a few rows each, which the next overwrites: (R, V).

        Empties the cache. Nothing else may be asked of the model before the last of them.
        """
        self._require_idle()

        def rows(logits: Iterator[Floats]) -> Iterator[Floats]:
            with self._idle():
                yield from logits

        with self._lifecycle.acquire() as parts:
            return rows(measure.token_logits(parts.engine, tokens))

    def score(self, tokens: Sequence[int]) -> measure.TokenScores:
        """Log-probabilities of a given text and the best next token after each of its tokens; empties the cache."""
        with self._idle() as parts:
            return measure.score_tokens(parts.engine, tokens)

    @property
    def experts_per_token(self) -> tuple[int, ...]:
        """How many experts of a layer a token may use, ascending; the last is the model itself, () has none."""
        with self._idle() as parts:
            return parts.engine.backend.capabilities.expert_counts

    def compare_fewer_experts(self, tokens: Sequence[int], count: int) -> FewerExperts:
        """What passes with fewer experts would have guessed along a text, and what they cost; empties the cache."""
        with self._idle() as parts:
            return compare_fewer_experts(parts.engine, tokens, count)

    def read_reply(self, prompt: Sequence[int], reply: Sequence[int], **options: Any) -> ReplyReading:
        """How a reply of given tokens is predicted in a way of computing less, against the whole model; empties the
        cache.

        Args:
            options: fields of ComputeOptions.

        Raises:
            UsageError: no prompt, a reply of fewer than two tokens, or an option that is unknown or out of range.
            CapabilityError: the backend cannot compute so.
        """
        asked = GenerationConfig.of(**options)
        with self._idle() as parts:
            return read_reply(parts.engine, prompt, reply, lambda sampler: parts.reduced.strategy(asked, sampler))

    def tune_skips(
        self,
        prompts: Sequence[str | Sequence[int]] | None = None,
        *,
        granularity: int = 1,
        evaluations: int = 400,
        progress: Callable[[int, int], None] | None = None,
    ) -> tuple[SkipLevel, ...]:
        """Finds the blocks that answers can skip with the least harm (compute="calibrated"), for every speed-up that is
        to be had; they are kept, and used from now on.

        Args:
            prompts: texts or token ids whose replies tell the harm; None takes a few of edgeinfer's own.
            granularity: consecutive layers that are skipped together.
            evaluations: sets to try at most.
            progress: called with sets tried and to try.

        Raises:
            CapabilityError: the backend cannot skip layers.
            UsageError: a prompt has no reply to score by, or the context is too small.
        """
        # Drawn as the model itself thinks likely: the likeliest texts repeat themselves, and forgive more.
        samples = self._own_texts(prompts, temperature=1.0)
        with self._idle() as parts:
            levels, costs = calibrate_skips(
                parts.reduced, samples, granularity=granularity, evaluations=evaluations, progress=progress
            )
        whole = costs.ms(np.ones(levels.masks.shape[1], np.bool_))
        each = [(mask, float(loss), costs.ms(mask)) for mask, loss in zip(levels.masks, levels.losses, strict=True)]
        return tuple(SkipLevel(tuple(mask.tolist()), loss, ms, whole / ms) for mask, loss, ms in each)

    def tune_entropy(self, prompts: Sequence[str | Sequence[int]] | None = None) -> EntropyFacts:
        """Finds how unsure the draft model is of this model's replies, by which compute="entropy" begins to share them
        out; it is kept, and used from now on.

        Args:
            prompts: as `tune_skips`.

        Raises:
            UsageError: there is no draft model.
        """
        samples = self._own_texts(prompts)
        with self._idle() as parts:
            entropies = calibrate_entropy(parts.reduced, samples)
        shares = (0.1, 0.25, 0.5, 0.75, 0.9)
        return EntropyFacts(len(entropies), {share: entropies.threshold(share) for share in shares})

    def _own_texts(self, prompts: Sequence[str | Sequence[int]] | None, temperature: float = 0.0) -> list[Sample]:
        given = TUNING_PROMPTS if prompts is None else prompts
        ids = [self.tokenize(each) if isinstance(each, str) else list(each) for each in given]
        return own_texts(ids, self._reply, SKIP_TOKENS, temperature)

    def drafting_state(self) -> dict[str, Any]:
        """What drafters have learnt, to be put back by `restore_drafting` before another text is timed."""
        with self._idle() as parts:
            return parts.speculator.state()

    def restore_drafting(self, state: Mapping[str, Any]) -> None:
        """Puts back what `drafting_state` gave; an empty one makes drafters forget all."""
        with self._idle() as parts:
            parts.speculator.restore(state)
