"""Speculative decoding of one reply: propose a draft, verify it in one pass of the target, commit what was accepted."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from typing import NoReturn

import numpy as np

from edgeinfer.core.results import SpeculationUse
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import HEAD_ROWS, Pass
from edgeinfer.runtime.decoding import sequence as decoding
from edgeinfer.runtime.decoding.sequence import Evaluate, Passes, Strategy
from edgeinfer.runtime.sampling.distributions import TokenLogprobs
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.speculation.controller import DraftController
from edgeinfer.runtime.speculation.costs import RoundTimings
from edgeinfer.runtime.speculation.drafters.contract import (
    Deciding,
    Draft,
    DraftContext,
    Drafter,
    Probabilities,
    Resumption,
    Round,
    Verdict,
    main_branch_first,
)
from edgeinfer.runtime.speculation.selfcheck import near_edge
from edgeinfer.runtime.speculation.verification.rule import VerificationRule

# Plain steps between two entries in the statistics where there is no drafter to ask.
_UNASKED = 64


class LogitRows:
    """What a pass over root and draft gave: the logits after its rows, by number, of which `rows` are the first (R, V).
    Where those are not all, as a row is as large as the vocabulary and what lies behind the first guess that is refused
    is never read, others are brought in their place by `head`, from the states of all rows (S, D)."""

    def __init__(
        self,
        rows: Floats,
        hidden: Floats | None = None,
        head: Callable[[Floats], Floats] | None = None,
        leaving: Callable[[int, Floats], None] | None = None,
        *,
        started: int = 0,
        resumed: bool = False,
    ) -> None:
        # Rows in memory, a view until the next pass; the number of the first of them; milliseconds that the head took.
        self.rows, self.first, self.head_ms = rows, 0, 0.0
        self._left = 0 if hidden is None or head is None else len(hidden) - len(rows)  # rows that were never computed
        self.hidden, self._head, self._leaving = hidden, head, leaving
        # When the pass began, in nanoseconds; whether it went on where drafting had left the target.
        self.started, self.resumed = started, resumed

    def has(self, row: int) -> bool:
        """Whether a row is in memory."""
        return 0 <= row - self.first < len(self.rows)

    def row(self, row: int) -> Floats:  # (V,)
        """The logits after a row that is in memory."""
        found: Floats = self.rows[row - self.first]
        return found

    @property
    def complete(self) -> bool:
        """Whether as many rows were computed as there are, so that the pass took what one of its size takes."""
        return self._left <= 0

    def bring(self, row: int) -> None:
        """Run the head for a row and those behind it, which overwrites the rows in memory."""
        assert self._head is not None and self.hidden is not None, "all rows of other passes are in memory"
        if self._leaving is not None:
            for place, logits in enumerate(self.rows, self.first):
                self._leaving(place, logits)
        started = time.perf_counter_ns()
        self.rows, self.first = self._head(self.hidden[row : row + HEAD_ROWS]), row
        self.head_ms += (time.perf_counter_ns() - started) / 1e6
        self._left -= len(self.rows)


def decided(deciding: Deciding, logits: LogitRows) -> Verdict:
    """What a rule decides, with the rows that it asks for brought one after the other."""
    try:
        while True:
            row = next(deciding) + 1
            if not logits.has(row):
                logits.bring(row)
    except StopIteration as done:
        verdict: Verdict = done.value
        return verdict


class RoundView:
    """A `TargetView` of one pass: the sampler's choices after each node, whose path it knows.

    Args:
        logits: after the root and after each node of the draft, by row.
    """

    def __init__(self, sampler: Sampler, draft: Draft, logits: LogitRows, position: int) -> None:
        self._sampler, self._draft, self._logits, self._position = sampler, draft, logits, position
        self._chain = draft.is_chain

    def token(self, node: int) -> int:
        return self._sampler.sample(self._logits.row(node + 1), self.position(node), self.path(node))

    def probabilities(self, node: int) -> Probabilities:
        return self._sampler.probabilities(self._logits.row(node + 1), self.path(node))

    def uniform(self, depth: int, draw: int) -> float:
        """A uniform draw of the position `depth` tokens after the root's successor."""
        return self._sampler.uniform(self._position + depth, draw)

    def near_tie(self, node: int, noise: float) -> bool:
        """Whether the choice after a node would be another if each logit were off by at most `noise`."""
        if self._sampler.takes_likeliest:
            row = self._logits.row(node + 1)
            # What `near_edge` finds then, in a twentieth of its time over a large vocabulary.
            return bool(np.count_nonzero(row >= row.max() - np.float32(2 * noise)) > 1)
        position, path = self.position(node), self.path(node)
        return near_edge(lambda logits: self._sampler.sample(logits, position, path), self._logits.row(node + 1), noise)

    def position(self, node: int) -> int:
        """Absolute position of the token after a node."""
        if node < 0:
            return self._position
        return self._position + 1 + (node if self._chain else self._draft.depth(node))

    def path(self, node: int) -> Sequence[int]:
        """Drafted tokens up to a node, where choices depend on them."""
        return self._draft.path(node) if self._sampler.follows_paths else ()


class SpeculativeDecoding(Strategy):
    """Decodes one reply in rounds, with plain steps between them while the controller expects nothing of drafts. A
    row's logits may differ by `noise` between passes of different sizes; 0 where rows are bit-identical."""

    def __init__(
        self,
        sequence: decoding.Sequence,
        sampler: Sampler,
        drafters: Sequence[Drafter],
        controller: DraftController,
        verification: VerificationRule,
        *,
        noise: float = 0.0,
        on_plain_ms: Callable[[float], None],
        speculation: SpeculationUse | None = None,
        timings: RoundTimings | None = None,
    ) -> None:
        super().__init__(sequence, sampler)
        self.speculation: SpeculationUse = speculation or SpeculationUse("")
        self.timings = timings or RoundTimings()
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._controller, self._verification, self._noise = controller, verification, noise
        # Where rounding may have decided, choices are taken again with the other rows at hand.
        apart, backend, cache = self._backend.head_apart and self.timings.alone, self._backend, self._cache
        self._head = partial(backend.head, cache) if apart and not noise else None
        # Tokens of a draft: with all rows of logits at once no more than plans count where the head runs apart.
        self._most = HEAD_ROWS - 1 if noise and apart else cache.capacity
        self._on_plain_ms = on_plain_ms
        self._plain_left = 0  # plain steps still to take before drafters are asked
        self._started = False  # drafters know the text
        self._unobserved = 0  # plain steps since then that drafters have not seen
        self._pass_ns: list[int] = []  # of plain steps that statistics do not have yet
        self._other_ns = self._lost = 0
        # Of tokens drafted behind rows of this round whose logits are no longer in memory, by row and token.
        self._drafted_logprobs: dict[tuple[int, int], TokenLogprobs] = {}
        self._context = _over

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        """The token after a prompt, of which no more is drafted."""
        tokens = yield from super().first(prompt, logits, room)
        self._count_plain_steps()
        self._plain_hidden = None
        further, lost, forced = self._draw_further, lambda: self._lost, self._sampler.forced
        self._context = DraftContext(self._sequence.tokens, self._draw, forced, further, lost, self._chance)
        self._started = False
        if self._controller.asks:
            self._start([*prompt, *tokens])
        return tokens

    def _start(self, text: Sequence[int]) -> None:
        """Show drafters the text so far."""
        self._started, self._unobserved = True, 0
        # What they index is planned for a context; a text that outgrew it has been forgotten by the target too.
        latest = text[-self._cache.capacity :]
        for drafter in self._drafters.values():
            drafter.begin(latest)

    def next(self, room: int, lost: int = 0) -> Passes[Sequence[int]]:
        """One round or one plain step: the tokens it committed, of which all but the last were fed then."""
        base, self._lost = self._cache.length, lost
        assert base == len(self._context.tokens) - 1 - lost, (
            "the cache holds all committed tokens but the root and what it lost"
        )
        if self._plain_left == 0:
            self._count_plain_steps()
            self._plain_left = self._controller.rest if self._drafters else _UNASKED
        if not self._drafters or (self._plain_left and not self._sampler.forced(())):
            return (yield from self._plain(lost))
        try:
            return (yield from self._round(base, room))
        except BaseException:
            if self._cache.length > base:
                self._cache.trim(base)
            raise

    def _plain(self, lost: int) -> Passes[Sequence[int]]:
        """One plain step, of which drafters learn with the next round."""
        started = time.perf_counter_ns()
        self._cache.hold(None)
        tokens = yield from self._plain_step(lost)
        self._pass_ns.append(self.pass_ns)
        self._plain_left -= 1
        self._other_ns += time.perf_counter_ns() - started - self.pass_ns
        return tokens

    def _round(self, base: int, room: int) -> Passes[Sequence[int]]:
        """Proposes, verifies and commits: one to `room` tokens."""
        started, self.pass_ns = time.perf_counter_ns(), 0
        self._cache.hold(base)
        self._catch_up()

        # Propose: a tree of tokens that may follow the root. The root has a row of the cache as well, and the
        # token after the draft a place in the reply.
        free = min(self._cache.capacity - base - 1, self._most)
        draft = main_branch_first((yield from self._controller.draft(self._context, free, depth=room - 1)))
        drafted = time.perf_counter_ns()

        # Verify: one pass of the target gives the logits after the root and after every token of the draft. The rule
        # accepts a path of the draft while it agrees with them, and takes one further token from the last of them.
        # Of a pass that other texts share, it has as much of the draft as is worth most there.
        fed, passed = yield from self._evaluate(draft, base)
        verified = time.perf_counter_ns()
        chain, draft = draft.is_chain, draft.first(len(fed) - 1)
        target = RoundView(self._sampler, draft, passed, len(self._context.tokens))
        verdict = decided(self._verification.verify(draft, target), passed)

        # The cache keeps the rows of the root and of the accepted path.
        rows = [0, *(node + 1 for node in verdict.accepted)]
        if chain:
            self._cache.trim(base + len(rows))
        else:
            self._cache.keep(base, rows)
        verdict, logits = yield from self._recheck(verdict, target, fed, passed, base)

        # Commit: accepted tokens and the verdict's join the reply, and everything that learns sees them.
        accepted = tuple(draft.guesses[node].token for node in verdict.accepted)
        committed = (*accepted, verdict.token)
        logprobs = self._logprobs(rows, committed, logits)  # may fail, so it comes before the first is accepted
        branches = self._controller.width > 1
        # Where a recheck ran another pass, `logits` have no states any more.
        round = Round(
            draft, verdict, committed, fed, logits.rows, logits.hidden, branches=branches, first_row=logits.first
        )
        for token, entry in zip(committed, logprobs, strict=True):
            self._sampler.accept_with(token, entry)
        self._root = verdict.token
        for drafter in self._drafters.values():
            drafter.observe(round)
        self._controller.observe(round)
        self._count_round(round, passed, (started, drafted, verified))
        return round.committed

    def _logprobs(self, rows: Sequence[int], tokens: Sequence[int], logits: LogitRows) -> list[TokenLogprobs | None]:
        """Log-probabilities of a round's tokens, which followed these rows; the head may have to run for the last."""
        if not self._sampler.records_logprobs:
            return [None] * len(tokens)
        found: list[TokenLogprobs | None] = []
        for row, token in zip(rows, tokens, strict=False):  # behind a choice that was taken again nothing is committed
            entry = self._drafted_logprobs.get((row, token))
            if entry is None:
                if not logits.has(row):
                    logits.bring(row)
                entry = self._sampler.logprobs_of(token, logits.row(row))
            found.append(entry)
        return found

    def _note(self, draft: Draft, row: int, logits: Floats) -> None:  # (V,)
        """Note what would be reported of the tokens drafted behind a row that leaves memory."""
        for guess, parent in zip(draft.guesses, draft.parents, strict=True):
            if parent + 1 == row:
                self._drafted_logprobs[row, guess.token] = self._sampler.logprobs_of(guess.token, logits)

    def _evaluate(self, draft: Draft, base: int) -> Passes[tuple[Ints, LogitRows]]:
        """Run the target's pass over the root and a draft, whole or resumed from drafting."""
        self._drafted_logprobs.clear()
        fed = np.array([self._context.tokens[-1], *draft.tokens], np.int64)  # (S,)
        resumption = yield from self._resume(draft, base)
        started, size = time.perf_counter_ns(), len(fed)
        rows = np.arange(size)
        # Of a draft that the head is run for apart, the first rows have their logits now; no other text shares it.
        head = self._head if size > HEAD_ROWS else None
        wanted = rows if head is None else rows[:HEAD_ROWS]
        gains = (1.0, *draft.likely) if draft.likely else None
        if resumption is not None:
            batch = Pass(fed, rows + base, wanted, layer_mask=resumption.layer_mask, hidden=resumption.hidden)
        elif draft.is_chain:
            batch = Pass(fed, rows + base, wanted, gains=gains)
        else:
            depths = np.array([0, *(draft.depth(node) + 1 for node in range(len(draft)))])
            parents = np.array([-1, *(parent + 1 for parent in draft.parents)])
            batch = Pass(fed, depths + base, wanted, tree=parents, gains=gains)
        (output,) = yield Evaluate(self._backend, ((self._cache, batch),))
        hidden, resumed = output.hidden, resumption is not None
        if head is None:
            size = len(output.logits)  # of a pass that others share it has as much of the draft as pays there
            return fed[:size], LogitRows(output.logits, hidden, started=started, resumed=resumed)
        assert hidden is not None, "its head reads the states"
        hidden = hidden.copy()  # the head's passes overwrite them
        leaving = partial(self._note, draft) if self._sampler.records_logprobs else None
        return fed, LogitRows(output.logits, hidden, head, leaving, started=started, resumed=resumed)

    def _resume(self, draft: Draft, base: int) -> Passes[Resumption | None]:
        """What drafting computed of a chain's pass, if anything; the cache ends at the root's place afterwards."""
        resumption = None
        if draft.is_chain:
            for name in dict.fromkeys(draft.sources):
                resumption = (yield from self._drafters[name].resume(self._context, draft.tokens)) or resumption
        if self._cache.length != base:
            self._cache.trim(base)
        return resumption

    def _recheck(
        self, verdict: Verdict, target: RoundView, fed: Ints, passed: LogitRows, base: int
    ) -> Passes[tuple[Verdict, LogitRows]]:
        """Repeats the first choice that rounding may have decided, by the pass over the root alone that plain decoding
        would run; returns the verdict, and the logits with what that gave, copied before the pass overwrites them."""
        if not self._noise or len(fed) == 1:
            return verdict, passed
        for place, node in enumerate((-1, *verdict.accepted)):
            if not target.near_tie(node, self._noise):
                continue
            logits = passed.rows.copy()
            self._cache.trim(base + place)
            batch = Pass(fed[node + 1 : node + 2], np.array([base + place]), np.zeros(1, np.int64))
            (output,) = yield Evaluate(self._backend, ((self._cache, batch),))
            logits[node + 1] = output.logits[0]
            token = self._sampler.sample(logits[node + 1], target.position(node), target.path(node))
            self.speculation.rechecked += 1
            return Verdict(verdict.accepted[:place], token, False), LogitRows(logits)
        return verdict, passed

    def _catch_up(self) -> None:
        """Tell drafters of the plain steps since the last round."""
        self._count_plain_steps()
        if not self._started:
            self._start(self._context.tokens)
        if not self._unobserved:
            return
        tokens = tuple(self._context.tokens[-self._unobserved :])
        self._unobserved = 0
        nothing = np.zeros((0, self._backend.geometry.vocab_size), np.float32)
        verdict, no_rows = Verdict((), tokens[-1], True), np.zeros(0, np.int64)
        round = Round(Draft(), verdict, tokens, no_rows, nothing, self._plain_hidden)
        for drafter in self._drafters.values():
            drafter.observe(round)

    def _count_plain_steps(self) -> None:
        """Enter the plain steps since the last round in the statistics."""
        self._plain_left = 0
        if steps := len(self._pass_ns):
            other = self._other_ns / steps
            self._controller.rested(steps)
            self.speculation.add_rounds("none", steps, bonus=steps)
            self.speculation.verify_ms += sum(self._pass_ns) / 1e6
            self.speculation.overhead_ms += steps * other / 1e6
            if self.timings.alone:
                self.timings.passes += [(1, ns / 1e6) for ns in self._pass_ns]
                self.timings.plain_overhead_ms += [other / 1e6] * steps
                self._on_plain_ms((median(self._pass_ns) + other) / 1e6)
            self._pass_ns.clear()
            self._other_ns = 0
            self._unobserved += steps

    def _count_round(self, round: Round, passed: LogitRows, times: tuple[int, int, int]) -> None:
        (started, drafted, verified), ended = times, time.perf_counter_ns()
        draft, verdict, rows = round.draft, round.verdict, len(round.fed)
        head_ms = passed.head_ms  # is time of the pass, which would have had all rows at once
        pass_ms, other_ms = (verified - drafted) / 1e6 + head_ms, (ended - verified) / 1e6 - head_ms
        draft_ms, use, timings = (drafted - started) / 1e6, self.speculation, self.timings
        use.add_round(draft.sources, verdict.accepted, bonus=verdict.bonus)
        use.draft_ms, use.verify_ms = use.draft_ms + draft_ms, use.verify_ms + pass_ms
        use.overhead_ms += other_ms
        if not timings.alone:
            return
        asking_ms = max(0.0, draft_ms - self._controller.guessed_ms) + other_ms
        timings.asking.append((asking_ms, len(round.committed)))
        guesses = self._controller.timed_guesses
        for name in dict.fromkeys(name for name, _ in guesses):
            timings.guesses.setdefault(name, []).append(fmean(ms for of, ms in guesses if of == name))
        for name, ms in self._controller.timed_reading:
            timings.reading.setdefault(name, []).append(ms)
        # One whose last rows of logits were not needed would make passes of all sizes look cheaper than they are.
        if not passed.resumed and passed.complete:
            timings.passes.append((rows, (verified - passed.started) / 1e6 + head_ms))
        if rows == 1:
            self._on_plain_ms((ended - passed.started) / 1e6)

    def limit(self, most: int) -> None:
        """Draft at most so many tokens from the next round on; with 0 no drafter is asked again or follows."""
        self._most = min(self._most, most)
        if not most:
            self._drafters.clear()

    def finish(self) -> None:
        self._count_plain_steps()
        # It leads back here: what the reply was asked with would wait for a collection of cycles.
        self._context = _over

    def _draw(self, logits: Floats, drafted: Sequence[int]) -> tuple[int, Probabilities | None]:
        position, path = len(self._context.tokens) + len(drafted), drafted if self._sampler.follows_paths else ()
        if not self._verification.stochastic:
            return self._sampler.sample(logits, position, path), None
        probabilities = self._sampler.probabilities(logits, path)
        return self._sampler.sample_from(probabilities, position, _stream(drafted, 0)), probabilities

    def _draw_further(self, probabilities: Probabilities, drafted: Sequence[int], taken: Sequence[int]) -> int | None:
        probabilities = probabilities.copy()
        probabilities[list(taken)] = 0
        if not probabilities.any():
            return None
        position = len(self._context.tokens) + len(drafted)
        return self._sampler.sample_from(probabilities, position, _stream(drafted, len(taken)))

    def _chance(self, depth: int, draw: int) -> float:
        return self._sampler.chance(len(self._context.tokens) + depth, draw)


def _stream(drafted: Sequence[int], taken: int) -> int:
    """Which of a place's draws is the one after `taken` siblings: branches draw independently of each other."""
    return taken + (zlib.crc32(np.array(drafted, np.int64).tobytes()) << 8)


def _nothing_drawn(logits: Floats, drafted: Sequence[int]) -> NoReturn:
    raise AssertionError("nothing is drafted before the reply and after it")


_over = DraftContext([], _nothing_drawn, lambda _: ())
