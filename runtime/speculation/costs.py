"""What passes and guesses cost on this device: measured once, kept, and corrected by every reply."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.backends.cache import CopiedRows
from edgeinfer.runtime.backends.contract import HEAD_ROWS, Backend, KVCache, Pass
from edgeinfer.runtime.decoding.sequence import run_alone
from edgeinfer.runtime.profile.costs import DraftCosts, PassCosts, RanPasses, TimedPass, following, pace
from edgeinfer.runtime.profile.device_profile import DeviceProfile, stamped
from edgeinfer.runtime.speculation.drafters.contract import Draft, DraftContext, Drafter, Round, Verdict, guessed
from edgeinfer.runtime.speculation.selfcheck import ExactCheck, check_exact, filler_tokens
from edgeinfer.runtime.system.memory import release_code

# Every size that short drafts have, then steps that show where the cost turns steep.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
# Sizes that tell anything at all; they are measured even where that takes longer than the budget.
_FEWEST = 2
# Visits to a size at most: on the smallest model the budget would allow hundreds.
_MOST_VISITS = 12
# Chains asked of a drafter at most, and guesses in each.
_CHAINS = 8
_CHAIN = 4


def sizes_to_measure(step: int, most: int) -> tuple[int, ...]:
    """Rows of the passes that `measure_passes` times where cache and time suffice; arguments as it takes them."""
    return tuple(m for m in _SIZES if (m == 1 or m % step == 0) and m <= max(most, step))


def measure_passes(
    backend: Backend, cache: KVCache, budget_s: float = 0.6, past: int = 64, step: int = 1, most: int = _SIZES[-1]
) -> PassCosts:
    """Times passes of 1 to 32 rows with all their logits; leaves the cache empty.

    The best of a few visits counts, as what else runs on the machine only ever adds, and the few visits that fit the
    budget are too few for a median. All sizes take turns, ascending; later turns leave out those that have had their
    share of the budget, so large passes run once where they are slow. What does not fit the budget is not measured.

    Args:
        budget_s: seconds; two sizes are measured even where that takes longer.
        past: rows in the cache before each pass, fewer where it is small.
    """
    capacity = cache.capacity
    past = min(past, max(0, capacity - _SIZES[-1]))
    sizes = [m for m in sizes_to_measure(step, most) if past + m <= capacity] or [1]
    cache.trim(0)
    _fill(backend, cache, past)
    # Recurrent layers go back to it, whatever a pass leaves.
    cache.mark()
    deadline = time.perf_counter() + budget_s
    _timed_pass(backend, cache, past, 1, 0)  # reads the weights' pages in, and is no measure
    skip = 1
    best: dict[int, float] = {}
    spent = dict.fromkeys(sizes, 0.0)
    for visit in range(_MOST_VISITS):
        for size in sizes:
            expected = best.get(size) or max(best.values(), default=0.0)
            late = time.perf_counter() + expected > deadline
            if late and len(best) >= _FEWEST:
                break
            if visit and spent[size] >= budget_s / len(sizes):
                continue
            seconds = _timed_pass(backend, cache, past, size, skip)
            skip += size
            spent[size] += seconds
            best[size] = min(seconds, best.get(size, seconds))
    cache.trim(0)
    return PassCosts(tuple((size, best[size] * 1e3) for size in sizes if size in best), step)


def _timed_pass(backend: Backend, cache: KVCache, past: int, size: int, skip: int) -> float:
    tokens, rows, apart = filler_tokens(backend, size, skip), np.arange(size), backend.head_apart and size > HEAD_ROWS
    started = time.perf_counter()
    batch = Pass(tokens, rows + past, rows[:HEAD_ROWS] if apart else rows)
    (output,) = backend.forward([(cache, batch)])
    if apart and output.hidden is not None:
        # As for a draft of which nothing is refused.
        hidden = output.hidden.copy()
        for first in range(HEAD_ROWS, size, HEAD_ROWS):
            backend.head(cache, hidden[first : first + HEAD_ROWS])
    seconds = time.perf_counter() - started
    cache.trim(past)
    return seconds


def _fill(backend: Backend, cache: KVCache, length: int) -> None:
    """Put rows into an empty cache, for passes to attend to."""
    if cache.editable and backend.capabilities.copies and not backend.geometry.states:
        cache.append(_blank(cache, length))
    elif length:
        backend.forward([(cache, Pass(filler_tokens(backend, length), np.arange(length), np.zeros(0, np.int64)))])


def _blank(cache: KVCache, length: int) -> CopiedRows:
    """A cache of zeros, which costs nothing to make and as much as any other to attend to."""
    empty = cache.snapshot(0, 0)
    # Layers that keep the same share their zeros.
    kinds = {(len(a), a.shape[2], a.dtype) for a in (*empty.keys, *empty.values)}  # of (H, 0, width)
    zeros = {kind: np.zeros((kind[0], length, kind[1]), kind[2]) for kind in kinds}
    keys, values = ([zeros[len(a), a.shape[2], a.dtype] for a in rows] for rows in (empty.keys, empty.values))
    return CopiedRows(length, keys, values, empty.kv, empty.scales)


def measure_guesses(drafter: Drafter, context: DraftContext, budget_s: float = 0.05) -> float:
    """Milliseconds of one guess: the median over chains of guesses after different first tokens; or of a round's first
    one, of drafters that guess `at_once`. The first chain is not counted: it evaluates the context. If the drafter
    works on the target's cache, its rows are left there."""
    deadline, each = time.perf_counter() + budget_s, list[float]()
    # Different tokens, so that no chain finds what the one before it left in a cache.
    starts = list(dict.fromkeys(reversed(context.tokens)))
    while len(each) < 2 or (len(each) <= _CHAINS and time.perf_counter() < deadline):
        path, given = [starts[len(each) % len(starts)]] * (1 + len(each) // len(starts)), 0
        drafter.repeat()
        started = time.perf_counter()
        while given < _CHAIN and (guesses := run_alone(guessed(drafter, context, path, 1))):
            given += 1
            path.append(guesses[0].token)
        # Where heads come to an end, having none to give costs nothing and would make the others look cheaper.
        each.append((time.perf_counter() - started) * 1e3 / (1 if drafter.at_once else max(1, given)))
    return median(each[1:])


def measure_reading(
    drafter: Drafter, shown: Callable[[int], DraftContext], lengths: tuple[int, int]
) -> tuple[int, float]:
    """Tokens that a drafter reads before its first guess of a text when it was shown a shorter one before, and the
    milliseconds of that guess with them. The less of two times, as one busy moment must not decide: a drafter
    that seems slow at reading is not asked to read, and then nothing corrects it."""
    unread, least = 0, math.inf
    for length in lengths * 2:  # reading the shorter one brings what reads into memory
        context = shown(length)
        unread, started = drafter.unread(context), time.perf_counter()
        run_alone(guessed(drafter, context, (), 1))
        if length == lengths[1]:
            least = min(least, (time.perf_counter() - started) * 1e3)
    return unread, least


_log = logging.getLogger("edgeinfer")

# Tokens of the made-up conversation behind which guesses are timed.
_FILLER = 48
# What a round in which drafters are asked takes more than a plain step besides pass and guesses, until it is known.
_ROUND_MS = 0.12
# How far one reply moves what rounds and tokens are known to take besides passes.
_PULL = 0.4
# A pass so slow that larger ones are not measured.
_SLOW_MS = 100.0
# Rounds that tell what one costs, and texts that were read that tell what reading does.
_ENOUGH = 5
# Passes that texts shared of which the latest count.
_SHARED = 512
# Passes of one size in a session after which its cost is no longer a matter of the moment it was measured in.
_CONFIRMED = 3
# What a guess was believed to cost counts as so many rounds, and what reading was as so many texts.
_BELIEVED = 2.0
_EXACT = "exact"


@dataclass
class RoundTimings:
    """What the rounds of a reply tell of costs. Where others' rows share its passes it is not `alone`, and nothing is
    entered."""

    alone: bool = True
    # Rows and milliseconds of passes of the target that gave the logits of all rows, as they ran.
    passes: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    # By drafter, milliseconds of its guesses that were paid for, the mean of each round.
    guesses: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    # By drafter, milliseconds a token of what it read before a guess.
    reading: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    # What rounds in which drafters were asked took besides pass and guesses, each with the tokens it made.
    asking: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    # What plain steps took besides their pass, one entry each.
    plain_overhead_ms: list[float] = dataclasses.field(default_factory=list)


@dataclass(frozen=True)
class SessionCosts:
    """Implements `controller.RoundCosts` by what is known when a reply begins."""

    passes: PassCosts  # c(m)
    guess_ms_of: Mapping[str, float]  # milliseconds of one guess, by the drafter's name
    round_ms: float  # what a round costs besides its pass and its guesses
    confirmed: int  # rows of the largest pass that this session has run often enough to know what it costs
    # Milliseconds of one token of the text that is read before a guess, by the name of a drafter that reads.
    read_ms_of: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def pass_ms(self, rows: int) -> float:
        """Milliseconds of a pass of the target over so many new tokens with all their logits."""
        return self.passes.ms(rows)

    def guess_ms(self, drafter: str) -> float:
        """Milliseconds of one guess; KeyError for a drafter that was not measured."""
        return self.guess_ms_of[drafter]

    def read_ms(self, drafter: str) -> float:
        """Milliseconds of reading one token of the text before a guess; 0 for a drafter that reads nothing."""
        return self.read_ms_of.get(drafter, 0.0)


class DeviceCosts:
    """Costs of one target and its drafters; `check` proves that rows do not depend on how a chain is cut into
    passes."""

    def __init__(
        self,
        backend: Backend,
        cache: KVCache,
        profile: DeviceProfile,
        check: bool,
        most: int,
        stand_in: Callable[[str], Drafter],
    ) -> None:
        self._backend, self._cache = backend, cache
        self._most = most
        self._profile = profile
        self._check = check
        self._stand_in = stand_in
        self.exact: ExactCheck | None = None
        self._passes: PassCosts | None = None
        self._kept: tuple[PassCosts, DraftCosts] | None = None  # as the profile has them
        self._guess_ms: dict[str, float] = {}
        self._read_ms: dict[str, float] = {}  # of drafters that read before they guess
        self._readings: dict[str, deque[float]] = {}  # the latest, a token
        self._round_ms = _ROUND_MS
        self._token_ms: float | None = None
        self._overhead_ms = 0.0  # of a plain step, once there were some
        self._shared: deque[TimedPass] = deque(maxlen=_SHARED)
        self._ran_passes = RanPasses()
        self._ran = Counter[int]()  # passes of this session by their rows
        self.plain_ms: list[float] = []

    def prepare(self) -> None:
        """Find out what passes cost; empties the cache if they have to be measured. What was kept is not compared with
        the pace of this moment: controllers weigh costs against each other, replies move them to the pace they find
        (`learn`), and passes to find out would keep the first token waiting."""
        kept = self._profile.costs()
        if kept is not None and self._reaches(kept.passes):
            self._kept = kept.passes, kept.drafts
            self._passes, self._guess_ms = kept.passes, dict(kept.drafts.guess_ms)
            self._round_ms, self._token_ms = kept.drafts.round_ms, kept.drafts.token_ms
            self._read_ms = dict(kept.drafts.read_ms)
            self.exact = _check_from(self._profile.arrays(_EXACT))
        if self._passes is None or (self._check and self.exact is None):
            # Passes read the weights' pages in. What loading ran through of all libraries must have gone by then.
            release_code()
        if self._check and self.exact is None:
            self.exact = check_exact(self._backend, self._cache)
            kept_check = dataclasses.asdict(self.exact)
            self._profile.save_arrays(_EXACT, {name: np.array([value]) for name, value in kept_check.items()})
        if self._passes is None:
            can = self._backend.capabilities
            padded = self.exact is not None and self.exact.bit_identical and not can.paged
            # ONNX Runtime's attention wants two rows to be exact, its MatMulNBits an even number.
            step = max(2, can.row_multiple) if padded else 1
            self._passes = measure_passes(self._backend, self._cache, step=step, most=self._most)
            self.plain_ms = [self._passes.ms(1)]
            # Nothing of it is needed again, and a small model in a small budget may never make so large a pass.
            self._cache.clear()
            self._save()
        if self.exact is not None and not self.exact.bit_identical:
            # Where no more was promised, this is nothing to warn of.
            level = logging.WARNING if self._backend.capabilities.exact else logging.INFO
            _log.log(
                level,
                "Passes of different sizes differ on this device, by up to %.2g in a logit: choices that close are "
                "taken again by a plain pass, and texts may still part from those of plain decoding.",
                self.exact.largest_difference,
            )

    @property
    def pass_ms(self) -> Callable[[int], float] | None:
        """Milliseconds of a pass of the target by its rows; None where none was measured and too few ran. Larger ones
        than were measured are known by those that replies shared."""
        costs = self._ran_passes.beyond(self._passes)
        return None if costs is None else costs.ms

    def of(self, drafters: Sequence[Drafter]) -> SessionCosts:
        """All costs of rounds with these drafters."""
        assert self._passes is not None, "prepare comes first"
        missing = [drafter for drafter in drafters if drafter.name not in self._guess_ms]
        for drafter in missing:
            self._measure(drafter if drafter.draws else self._stand_in(drafter.name))
        if missing:
            self._save()
        confirmed = max((rows for rows, times in self._ran.items() if times >= _CONFIRMED), default=1)
        return SessionCosts(self._passes, dict(self._guess_ms), self._round_ms, confirmed, dict(self._read_ms))

    def observe(self, rows: int, ms: float) -> None:
        """Note a pass that several texts shared; all its rows are of replies, not of prompts."""
        self._shared.append((rows, ms))
        self._ran_passes.observe(rows, ms)

    def learn(self, timings: RoundTimings) -> None:
        """Follow passes, guesses and rounds of a reply, and passes that texts shared; kept with the next `save`."""
        if self._passes is None:
            return
        for passes in (timings.passes, self._shared):
            self._passes = following(self._passes, passes)
            self._ran.update(rows for rows, _ in passes)
        self._shared.clear()
        for name, times in timings.guesses.items():
            if name in self._guess_ms:
                self._guess_ms[name] = _followed(self._guess_ms[name], times)
        for name, times in timings.reading.items():
            if name in self._read_ms:
                believed = [self._read_ms[name]] * int(_BELIEVED)
                self._readings.setdefault(name, deque(believed, maxlen=_ENOUGH)).extend(times)
                self._read_ms[name] = median(self._readings[name])
        if len(timings.plain_overhead_ms) >= _ENOUGH:
            self._overhead_ms = median(timings.plain_overhead_ms)
        if len(timings.asking) >= _ENOUGH and self._overhead_ms:
            # Choosing a token takes its time in plain decoding too.
            extra = median(max(0.0, ms - tokens * self._overhead_ms) for ms, tokens in timings.asking)
            self._round_ms += _PULL * (extra - self._round_ms)

    def learn_overhead(self, times: Sequence[float]) -> None:
        """Follow what tokens of a reply took besides their passes; kept with the next `save`."""
        if len(times) < _ENOUGH:
            return
        ms = max(0.0, median(times))
        self._token_ms = ms if self._token_ms is None else self._token_ms + _PULL * (ms - self._token_ms)

    def plain_step_ms(self, timings: RoundTimings) -> float | None:
        """What a plain step takes at the pace of a reply's passes; None where none of them tells."""
        return None if self._passes is None else pace(self._passes, timings.passes)

    def save(self) -> None:
        """Keep what is known now."""
        if self._passes is not None:
            self._save()

    def forget(self, drafter: str) -> None:
        """The drafter of this name is another from now on."""
        for known in (self._guess_ms, self._read_ms, self._readings):
            known.pop(drafter, None)

    def _reaches(self, passes: PassCosts) -> bool:
        """Whether passes as large as are verified here were measured; plans of less memory measure smaller ones."""
        wanted = sizes_to_measure(passes.step, min(self._most, self._cache.capacity))[-1]
        # Where passes are this slow, time ended the measurement and would do so again.
        return passes.largest >= wanted or passes.ms(passes.largest) > _SLOW_MS

    def _measure(self, drafter: Drafter) -> None:
        """Times guesses behind a conversation that repeats itself, so that tables have something to say, and before
        them the reading of its second half."""
        cache, base = self._cache, self._cache.length
        filler = filler_tokens(self._backend, _FILLER // 2).tolist()
        size = base + 1 if drafter.uses_target else max(base + 1, _FILLER)
        tokens = (filler * (2 + (base + 1) // len(filler)))[:size]
        if drafter.follows_passes:
            tokens = tokens[: cache.capacity]

        def shown(length: int) -> DraftContext:
            cache.trim(base)
            return self._shown_text(drafter, tokens[:length])

        try:
            unread, ms = measure_reading(drafter, shown, ((base + 1 + len(tokens)) // 2, len(tokens)))
            self._guess_ms[drafter.name] = guess_ms = measure_guesses(drafter, shown(len(tokens)))
        finally:
            cache.trim(base)
            cache.hold(None)
        if unread:
            self._read_ms[drafter.name] = max(0.0, ms - guess_ms) / unread

    def _shown_text(self, drafter: Drafter, tokens: list[int]) -> DraftContext:
        """A drafter knows a text afterwards, and has seen passes of the target over it if it follows those."""
        fed = self._cache.length
        rest = np.array(tokens[fed:-1], np.int64)
        if drafter.follows_passes and len(rest):
            batch = Pass(rest, np.arange(fed, fed + len(rest)), np.zeros(0, np.int64))
            self._backend.forward([(self._cache, batch)])
        drafter.begin(tokens)
        drafter.observe(self._shown(tokens[-1]))
        return DraftContext(tokens, lambda logits, drafted: (int(logits.argmax()), None), lambda drafted: ())

    def _shown(self, root: int) -> Round:
        """A round that committed nothing and shows made-up states, for drafters that guess from those."""
        size, vocabulary = self._backend.geometry.hidden_size, self._backend.geometry.vocab_size
        hidden = np.zeros((1, size), np.float32) if self._backend.capabilities.hidden else None
        no_logits, no_tokens = np.zeros((0, vocabulary), np.float32), np.zeros(0, np.int64)
        return Round(Draft(), Verdict((), root, True), (), no_tokens, no_logits, hidden)

    def _save(self) -> None:
        assert self._passes is not None
        drafts = DraftCosts(dict(self._guess_ms), self._round_ms, self._token_ms, dict(self._read_ms))
        if self._kept != (self._passes, drafts):
            self._profile.save_costs(stamped(self._passes, drafts))
            self._kept = self._passes, drafts


def _followed(believed: float, times: Sequence[float]) -> float:
    """Milliseconds between what was believed and the median of what rounds took, which busy moments move little."""
    if len(times) < _ENOUGH:
        return believed
    share = len(times) / (len(times) + _BELIEVED)
    return believed + share * (median(times) - believed)


def _check_from(state: dict[str, NDArray[Any]] | None) -> ExactCheck | None:
    """What was kept of a check; None where that is not one."""
    fields = {field.name for field in dataclasses.fields(ExactCheck)}
    if state is None or set(state) != fields or any(a.shape != (1,) for a in state.values()):
        return None
    values = {name: array[0].item() for name, array in state.items()}
    check = ExactCheck(**values)
    return check if isinstance(check.bit_identical, bool) and 0 <= check.noise < np.inf else None
