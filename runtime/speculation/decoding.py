"""The rounds of one generation: draft, verify in one pass, commit, tell everybody; knows nothing of costs or text."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import NoReturn

import numpy as np

from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput, ForwardOutput
from edgeinfer.runtime.decoding.strategy import DecodingStrategy
from edgeinfer.runtime.sampling import Sampler
from edgeinfer.runtime.speculation.contracts import (
    Context,
    Draft,
    Drafter,
    Probabilities,
    Prober,
    Resumption,
    Round,
    Verdict,
)
from edgeinfer.runtime.speculation.governor import Governor
from edgeinfer.runtime.speculation.spine import settle, spine_first, spine_tip
from edgeinfer.runtime.speculation.statistics import RoundTimes, SpeculationStatistics
from edgeinfer.runtime.speculation.verification import Verification
from edgeinfer.runtime.speculation.view import RoundView

__all__ = ["SpeculativeDecoding"]

_ONE_ROW = np.zeros(1, np.int64)
# Plain steps between two entries in the books where there is nobody to ask.
_UNASKED = 64


def _over(logits: Floats, drafted: Sequence[int]) -> NoReturn:
    raise AssertionError("the reply is over")


class SpeculativeDecoding(DecodingStrategy):
    """Speculative decoding of one reply.

    Args:
        backend: the target.
        sampler: of the generation.
        drafters: whose guesses the governor weighs.
        governor: decides what is drafted.
        verification: decides what is accepted.
        settled: side branches of trees are not trusted, so that text is plain decoding's bit for bit.
        noise: by how much a row's logits may differ between passes of different sizes; 0 where rows are bit-identical.
        timed: told the milliseconds of every plain step.
    """

    def __init__(
        self,
        backend: Backend,
        sampler: Sampler,
        drafters: Sequence[Drafter],
        governor: Governor,
        verification: Verification,
        *,
        settled: bool = False,
        noise: float = 0.0,
        timed: Callable[[float], None],
    ) -> None:
        super().__init__(backend, sampler)
        self.statistics = SpeculationStatistics()
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._prober = next((drafter for drafter in drafters if isinstance(drafter, Prober)), None)
        self._governor = governor
        self._verification = verification
        self._settled = settled
        self._noise = noise
        self._timed = timed
        self._untold = 0  # plain steps that drafters have not heard of
        self._left = 0  # plain steps still to take before anybody is asked
        self._most = backend.capacity  # tokens in a draft
        self._pass_ns: list[int] = []
        self._other_ns = 0
        self._root_row, self._place = np.zeros(1, np.int64), np.zeros(1, np.int64)
        # Of the last plain step; a view that stays valid until the next pass, before which drafters are told.
        self._hidden: Floats | None = None
        self._lost = 0
        self._context = Context([], self._draw, sampler.forced, self._further, lambda: self._lost)

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> tuple[int]:  # (V,)
        """The token after a prompt that was fed, of which no more is drafted; again where the reply was paused."""
        token = self._sampler.sample(logits, len(prompt))
        self._sampler.accept(token, logits)
        self._end_rest()
        self._untold, self._hidden = 0, None
        self._context.tokens[:] = [*prompt, token]
        # What they index is planned for a context; a text that outgrew it has been forgotten by the target too.
        latest = self._context.tokens[-self._backend.capacity :]
        for drafter in self._drafters.values():
            drafter.begin(latest)
        return (token,)

    def next(self, room: int, lost: int = 0) -> tuple[int, ...]:
        """One round: the tokens it committed, of which all but the last were fed then.

        Args:
            room: how many tokens may be committed at most.
            lost: by how many tokens the text is longer than the cache with the root would be.

        Raises:
            BackendError: a pass failed or was cancelled; the cache is as it was before the round.
        """
        base, self._lost = self._backend.length, lost
        assert base == self._context.root_row, "the cache holds all committed tokens but the root and what it lost"
        if self._left == 0:
            self._end_rest()
            self._left = self._governor.rest if self._drafters else _UNASKED
        if not self._drafters or (self._left and not self._sampler.forced(())):
            return self._plain(base)
        begun = time.perf_counter_ns()
        self._end_rest()
        self._tell()
        try:
            return self._round(base, room, begun)
        except BaseException:
            if self._backend.length > base:
                self._backend.truncate(base)
            raise

    def _plain(self, base: int) -> tuple[int]:
        """One token as plain decoding makes it, with nothing around it that could wait."""
        tokens, begun = self._context.tokens, time.perf_counter_ns()
        self._root_row[0], self._place[0] = tokens[-1], base
        output = self._backend.forward(ForwardInput(self._root_row, self._place, _ONE_ROW))
        verified = time.perf_counter_ns()
        self._hidden = output.hidden
        token = self._sampler.sample(output.logits[0], len(tokens))
        self._sampler.accept(token, output.logits[0])
        tokens.append(token)
        self._left -= 1
        self._pass_ns.append(verified - begun)
        self._other_ns += time.perf_counter_ns() - verified
        return (token,)

    def _end_rest(self) -> None:
        """Enters the plain steps since the last round in the books."""
        steps = len(self._pass_ns)
        self._left = 0
        if steps:
            other = self._other_ns / steps
            self._governor.rested(steps)
            self.statistics.add_plain([ns / 1e6 for ns in self._pass_ns], other / 1e6)
            self._timed((median(self._pass_ns) + other) / 1e6)
            self._pass_ns.clear()
            self._other_ns = 0
            self._untold += steps

    def limit(self, most: int) -> None:
        """Drafts at most so many tokens from the next round on; with 0 no drafter is asked or told anything again."""
        self._most = most
        if not most:
            self._drafters.clear()
            self._prober = None

    def finish(self) -> None:
        """The reply is over: the books are closed."""
        self._end_rest()
        # It leads back here: what the reply was asked with would wait for a collection of cycles.
        self._context = Context([], _over, lambda _: ())

    def _tell(self) -> None:
        """Lets drafters catch up with plain steps."""
        if not self._untold:
            return
        tokens = tuple(self._context.tokens[-self._untold :])
        self._untold = 0
        nothing = np.zeros((0, self._backend.geometry.vocab_size), np.float32)
        round = Round(Draft(), Verdict((), tokens[-1], True), tokens, np.zeros(0, np.int64), nothing, self._hidden)
        for drafter in self._drafters.values():
            drafter.observe(round)

    def _round(self, base: int, room: int, begun: int) -> tuple[int, ...]:
        # The root and the token after the last node need a place too.
        most = min(room - 1, self._backend.capacity - base - 1, self._most)
        draft = spine_first(self._governor.draft(self._context, most))
        drafted = time.perf_counter_ns()
        fed = np.array([self._context.tokens[-1], *draft.tokens], np.int64)  # (S,)
        resumption = self._resumption(draft, base)
        states = None if resumption is not None else self._riders(draft, fed, base)
        ready = time.perf_counter_ns()
        output = self._verify(draft, fed, base, resumption, states)
        verified = time.perf_counter_ns()
        seen, probed = output.logits[: len(fed)], output.logits[len(fed) :]
        view = RoundView(self._sampler, draft, seen, len(self._context.tokens))
        verdict = self._verification.verify(draft, view)
        if self._settled:
            verdict = settle(draft, verdict)
        rows = [0, *(node + 1 for node in verdict.accepted)]
        if draft.is_chain:
            self._backend.truncate(base + len(rows))
        else:
            self._backend.keep(base, rows)
        # A pass over the root alone is the one that plain decoding runs.
        logits = seen
        if self._noise and (draft or len(probed)):
            verdict, logits = self._recheck(verdict, view, fed, base, seen)
        tokens = tuple(draft.guesses[node].token for node in verdict.accepted)
        round = Round(draft, verdict, (*tokens, verdict.token), fed, logits, probes=len(probed))
        if logits is seen:  # else another pass has overwritten what the output shows
            followed = len(probed) > 0 and (verdict.accepted or (-1,))[-1] == spine_tip(draft)
            round = replace(round, hidden=output.hidden, probed=probed if followed else None)
        self._commit(round)
        ended = time.perf_counter_ns()
        times = RoundTimes((drafted - begun) / 1e6, (verified - drafted) / 1e6, (ended - verified) / 1e6)
        self.statistics.add(round, times, self._governor.guessed_ms)
        if resumption is None:
            self.statistics.pass_ms[len(output.logits)].append((verified - ready) / 1e6)
        if len(output.logits) == 1:
            self._timed((ended - ready) / 1e6)
        return round.committed

    def _resumption(self, draft: Draft, base: int) -> Resumption | None:
        """What drafting computed of a chain's pass, if anything; the cache ends at the root's place afterwards."""
        resumption = None
        if draft.is_chain:
            for name in dict.fromkeys(draft.sources):
                resumption = self._drafters[name].resume(self._context, draft.tokens) or resumption
        if self._backend.length != base:
            self._backend.truncate(base)
        return resumption

    def _riders(self, draft: Draft, fed: Ints, base: int) -> Floats | None:  # (S,) -> (S + P, D)
        """What enters the first layer of a pass in which a drafter's own rows ride along; None where none do."""
        prober = self._prober
        if prober is None or base + len(fed) + prober.probes > self._backend.capacity:
            return None
        if not self._governor.lets_ride(prober.name, draft, prober.probes):
            return None
        states = prober.embed(fed)
        if self._backend.length != base:
            self._backend.truncate(base)
        return states

    def _verify(
        self, draft: Draft, fed: Ints, base: int, resumption: Resumption | None, states: Floats | None
    ) -> ForwardOutput:
        rows = np.arange(len(fed) if states is None else len(states))
        if resumption is not None:
            mask, hidden = resumption.layer_mask, resumption.hidden
            return self._backend.forward(ForwardInput(fed, rows + base, rows, layer_mask=mask, hidden=hidden))
        if states is not None:
            # Their states count, not their tokens.
            fed = np.pad(fed, (0, len(rows) - len(fed)))
        if draft.is_chain:
            return self._backend.forward(ForwardInput(fed, rows + base, rows, hidden=states))
        depths = [0, *(draft.depth(node) + 1 for node in range(len(draft)))]
        tree = [-1, *(parent + 1 for parent in draft.parents)]
        for row in rows[len(tree) :].tolist():
            above = row - 1 if row > len(draft) + 1 else spine_tip(draft) + 1
            tree.append(above)
            depths.append(depths[above] + 1)
        return self._backend.forward(
            ForwardInput(fed, np.array(depths) + base, rows, tree=np.array(tree), hidden=states)
        )

    def _recheck(
        self, verdict: Verdict, view: RoundView, fed: Ints, base: int, logits: Floats
    ) -> tuple[Verdict, Floats]:  # (S,), (S, V)
        """Takes the first choice again that rounding may have decided, by the pass that plain decoding would run.

        Returns:
            The verdict, and the logits, which are copied before such a pass overwrites them, with what that gave.
        """
        for place, node in enumerate((-1, *verdict.accepted)):
            if not view.near_tie(node, self._noise):
                continue
            logits = logits.copy()
            self._backend.truncate(base + place)
            position = np.array([base + place])
            output = self._backend.forward(ForwardInput(fed[node + 1 : node + 2], position, np.zeros(1, np.int64)))
            logits[node + 1] = output.logits[0]
            token = self._sampler.sample(logits[node + 1], view.position(node), view.path(node))
            self.statistics.rechecked += 1
            return Verdict(verdict.accepted[:place], token, False), logits
        return verdict, logits

    def _commit(self, round: Round) -> None:
        rows = [0, *(node + 1 for node in round.verdict.accepted)]
        for row, token in zip(rows, round.committed, strict=True):
            self._sampler.accept(token, round.logits[row])
        self._context.tokens.extend(round.committed)
        for drafter in self._drafters.values():
            drafter.observe(round)
        self._governor.observe(round)

    def _draw(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, Probabilities | None]:
        position = len(self._context.tokens) + len(drafted)
        path = drafted if self._sampler.follows_paths else ()
        if not self._verification.stochastic:
            return self._sampler.sample(logits, position, path), None
        probabilities = self._sampler.probabilities(logits, path)
        return self._sampler.sample_from(probabilities, position, 0), probabilities

    def _further(self, probabilities: Probabilities, drafted: Sequence[int], taken: Sequence[int]) -> int | None:
        if not self._verification.iid_chains:
            probabilities = probabilities.copy()
            probabilities[list(taken)] = 0
            if not probabilities.any():
                return None
        return self._sampler.sample_from(probabilities, len(self._context.tokens) + len(drafted), len(taken))
