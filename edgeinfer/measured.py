"""What can be measured of a loaded model, and had from its drafters; knows nothing of requests and replies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from edgeinfer.generation import ModelParts
from edgeinfer.residence import Residence
from edgeinfer.results import PassWork
from edgeinfer.runtime import measure
from edgeinfer.runtime.contracts import Floats
from edgeinfer.runtime.experts.drafting import FewerExperts, compare_fewer_experts

__all__ = ["Measured"]


class Measured:
    """A model while it answers nobody. What is measured empties the cache."""

    _residence: Residence

    def _require_idle(self) -> None:
        """Ends a reply that was left unfinished.

        Raises:
            UsageError: another thread may be reading it.
        """
        raise NotImplementedError

    @property
    def _parts(self) -> ModelParts:
        return self._residence.parts()

    @contextmanager
    def _idle(self) -> Iterator[ModelParts]:
        """The parts while no reply is running, which stay inside the block."""
        self._require_idle()
        with self._residence.held() as parts:
            yield parts

    def measure_passes(self, sizes: Sequence[int], *, past: int, repeats: int) -> dict[int, list[float]]:
        """c(m): milliseconds of passes over m new tokens with m logit rows after `past` tokens; empties the cache."""
        with self._idle() as parts:
            return measure.pass_times(parts.engine, sizes, past=past, repeats=repeats)

    def measure_prefill(self, tokens: int, *, repeats: int) -> list[float]:
        """Milliseconds of taking in a prompt of `tokens` tokens, chunk by chunk; empties the cache."""
        with self._idle() as parts:
            return measure.prefill_times(parts.engine, tokens, repeats=repeats)

    def measure_decode(self, tokens: int, *, past: int) -> measure.DecodeTimes:
        """Per greedily decoded token, milliseconds inside the session and in all; empties the cache."""
        with self._idle() as parts:
            return measure.decode_times(parts.engine, tokens, past=past)

    def measure_work(self, prompt: int, reply: int, *, past: int = 0) -> measure.WorkTimes:
        """Milliseconds of taking in a prompt behind `past` tokens and of decoding a reply greedily and plainly, as many
        passes as tokens; `llama-bench` calls these pp, tg and depth. What the cache holds of the past stays.

        Raises:
            UsageError: there is nothing to do, or the context is too small.
        """
        with self._idle() as parts:
            return measure.work_times(parts.engine, prompt, reply, past=past)

    def pass_work(self, tokens: int, rows: int) -> PassWork:
        """What a pass over `tokens` new tokens with `rows` logit rows has to do, by the bundle's table of weights."""
        return measure.pass_work(self._residence.facts.tensors, tokens, rows)

    def logits(self, tokens: Sequence[int]) -> Iterator[Floats]:
        """The logits after each token of a text, as arrays of a few rows each, which the next overwrites: (R, V).

        Empties the cache. Nothing else may be asked of the model before the last of them.
        """
        self._require_idle()

        def rows(logits: Iterator[Floats]) -> Iterator[Floats]:
            with self._residence.held():
                yield from logits

        return rows(measure.token_logits(self._parts.engine, tokens))

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

    def drafting_state(self) -> dict[str, Any]:
        """What drafters have learnt, to be put back by `restore_drafting` before another text is timed."""
        return self._parts.speculator.state()

    def restore_drafting(self, state: Mapping[str, Any]) -> None:
        """Puts back what `drafting_state` gave; an empty one makes drafters forget all."""
        self._require_idle()
        self._parts.speculator.restore(state)
