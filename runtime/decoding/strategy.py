"""What all decoding is made of: generators that yield passes and are sent their results, and the base of strategies."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import field
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ComputeUse, DrafterUse, RemoteUse, SearchUse
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend, KVCache, Pass, PassResult
from edgeinfer.runtime.sampling.sampler import Sampler

if TYPE_CHECKING:
    from edgeinfer.runtime.decoding import sequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Evaluate:
    """What a generator yields: passes over sequences of one backend, whose results it is sent; arrays in these are
    views until it yields again. Without passes, others go first. A draft with `gains` may be cut, then there are fewer
    rows of logits."""

    backend: Backend
    passes: Sequence[tuple[KVCache, Pass]]


# A computation that needs passes: `value = yield from computation`.
Passes: TypeAlias = Generator[Evaluate, "list[PassResult]", T]


def run_alone(work: Passes[T]) -> T:
    """Runs a computation to its end outside of a scheduler, each pass at once."""
    try:
        wanted = next(work)
        while True:
            try:
                results = wanted.backend.forward(wanted.passes) if wanted.passes else []
            except BaseException as error:
                wanted = work.throw(error)
            else:
                wanted = work.send(results)
    except StopIteration as done:
        value: T = done.value
        return value


@dataclass
class SearchStatistics:
    """Counts what a search took; fields as in `results.SearchUse`."""

    passes: int = 0
    rows: int = 0
    branches: int = 0
    trials: int = 0


@dataclass
class ReducedStatistics:
    """What reduced compute made of a reply's tokens after the first."""

    tokens: int = 0
    reduced: int = 0  # of them, made with less than the whole model
    caught_up: int = 0  # of those, evaluated by the whole model later
    blocks_skipped: int = 0  # attention and MLP blocks, over all tokens
    decide_ms: float = 0.0  # milliseconds of deciding what is left out
    ms: float = 0.0  # milliseconds of all tokens


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Milliseconds of one round: proposing, the target's pass, and all else."""

    draft_ms: float
    verify_ms: float
    overhead_ms: float


@dataclass
class SpeculationStatistics:
    """Counts what the rounds of one generation came to; fields as in `results.SpeculationUse`."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    recovered: int = 0
    bonus: int = 0
    rechecked: int = 0
    committed: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    overhead_ms: float = 0.0
    accepted_per_position: list[int] = field(default_factory=list)
    # Rows and milliseconds of passes of the target that gave the logits of all rows, as they ran.
    timed_passes: list[tuple[int, float]] = field(default_factory=list)
    # By drafter, milliseconds of its guesses that were paid for, the mean of each round.
    timed_guesses: dict[str, list[float]] = field(default_factory=dict)
    # By drafter, milliseconds a token of what it read before a guess.
    timed_reading: dict[str, list[float]] = field(default_factory=dict)
    # What rounds in which drafters were asked took besides pass and guesses, each with the tokens it made.
    asking: list[tuple[float, int]] = field(default_factory=list)
    # What plain steps took besides their pass, one entry each.
    plain_overhead_ms: list[float] = field(default_factory=list)
    choices: Counter[str] = field(default_factory=Counter)
    per_drafter: dict[str, DrafterUse] = field(default_factory=dict)
    # The passes are of this reply's rows, so that these times tell what passes and rounds cost; where others' rows
    # share them, `timed_passes`, `timed_guesses`, `timed_reading`, `asking` and `plain_overhead_ms` get no entries.
    alone: bool = True

    def add_round(
        self,
        sources: Sequence[str],
        accepted: Sequence[int],
        committed: int,
        *,
        bonus: bool,
        times: RoundTimes,
        guessed_ms: float,
    ) -> None:
        self.rounds += 1
        self.drafted += len(sources)
        self.accepted += len(accepted)
        self.committed += committed
        if bonus:
            self.bonus += 1
        else:
            self.recovered += 1
        self.draft_ms += times.draft_ms
        self.verify_ms += times.verify_ms
        self.overhead_ms += times.overhead_ms
        if self.alone:
            self.asking.append((max(0.0, times.draft_ms - guessed_ms) + times.overhead_ms, committed))
        names = dict.fromkeys(sources)
        self.choices["+".join(names) or "none"] += 1
        self.accepted_per_position = _raised(self.accepted_per_position, range(len(accepted)))
        for name in names:
            use = self.per_drafter.get(name, DrafterUse())
            mine = [place for place, node in enumerate(accepted) if sources[node] == name]
            self.per_drafter[name] = DrafterUse(
                rounds=use.rounds + 1,
                drafted=use.drafted + sources.count(name),
                accepted=use.accepted + len(mine),
                accepted_per_position=tuple(_raised(list(use.accepted_per_position), mine)),
            )

    def add_guesses(self, timed: Sequence[tuple[str, float]], reading: Sequence[tuple[str, float]] = ()) -> None:
        """Record the times of one round's guesses and of reading before them, by drafter."""
        for name in dict.fromkeys(name for name, _ in timed):
            self.timed_guesses.setdefault(name, []).append(fmean(ms for of, ms in timed if of == name))
        for name, ms in reading:
            self.timed_reading.setdefault(name, []).append(ms)

    def add_plain(self, verify_ms: Sequence[float], overhead_ms: float) -> None:
        """Count plain steps with their passes."""
        steps = len(verify_ms)
        self.rounds += steps
        self.bonus += steps
        self.committed += steps
        self.verify_ms += sum(verify_ms)
        self.overhead_ms += steps * overhead_ms
        self.choices["none"] += steps
        if self.alone:
            self.timed_passes += [(1, ms) for ms in verify_ms]
            self.plain_overhead_ms += [overhead_ms] * steps


def _raised(counts: list[int], places: range | list[int]) -> list[int]:
    more = [0] * (max(places) + 1 if places else 0)
    for place in places:
        more[place] = 1
    return [a + b for a, b in zip_longest(counts, more, fillvalue=0)]


_ONE_ROW = np.zeros(1, np.int64)


class Strategy:
    """Decodes one reply: `first` follows the prompt, then `next` until the reply ends; this one is plain decoding.

    The rows of the sequence's cache must be those that the whole model gives to the text's tokens. A strategy that
    leaves some out, or feeds them later, cuts the cache to those that are by the time its generation ends.

    Attributes:
        searches: the cache holds more than the reply while it is decoded, so that the reply cannot be paused.
        pass_ns: of the latest step, nanoseconds of its pass where it was plain; 0 where it was another.
    """

    searches = False

    def __init__(self, sequence: sequence.Sequence, sampler: Sampler) -> None:
        self._sequence, self._sampler = sequence, sampler
        self._backend, self._cache = sequence.backend, sequence.cache
        self.pass_ns = 0
        self._root = 0  # the reply's last token, which the cache does not hold yet
        self._plain_hidden: Floats | None = None  # of the last plain step; a view until the next pass
        self._tokens_fed, self._position = np.zeros(1, np.int64), np.zeros(1, np.int64)
        step = Pass(self._tokens_fed, self._position, _ONE_ROW)
        self._plain_pass = Evaluate(self._backend, ((self._cache, step),))

    def read(self, batch: Pass) -> Passes[PassResult]:
        """Evaluates a chunk of the prompt by the whole model."""
        (result,) = yield Evaluate(self._backend, ((self._cache, batch),))
        return result

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        """Start after a prompt that was fed: make 1 to `room` tokens. Called again when a paused reply goes on."""
        yield from ()
        return self._first(prompt, logits)

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        """Make 1 to `room` further tokens, accepted by the sampler; at least the last is not fed yet. The sequence has
        all tokens made before in `tokens`."""
        return self._plain_step(lost)

    def leave(self) -> None:
        """Drops what was fed for the generation alone, which pauses or ends."""

    def finish(self) -> None:
        """Ends the reply: statistics are complete afterwards, and nothing of the request is referred to."""

    def compute_use(self) -> ComputeUse | None:
        """Statistics of reduced compute; None if everything is computed."""
        return None

    def search_use(self) -> SearchUse | None:
        """Statistics of the search; None if there is none."""
        return None

    def remote_use(self) -> RemoteUse | None:
        """Statistics of the server; None if no server decides."""
        return None

    def _first(self, prompt: Sequence[int], logits: Floats) -> tuple[int]:  # (V,)
        self.pass_ns = 0
        return self._accept(self._sampler.sample(logits, len(prompt)), logits)

    def _plain_step(self, lost: int = 0) -> Passes[tuple[int]]:
        """Make one token by plain decoding: forward one row, sample, accept."""
        started = time.perf_counter_ns()
        self._tokens_fed[0], self._position[0] = self._root, self._cache.length
        (result,) = yield self._plain_pass
        self.pass_ns = time.perf_counter_ns() - started
        self._plain_hidden, logits = result.hidden, result.logits[0]
        return self._accept(self._sampler.sample(logits, self._cache.length + lost), logits)

    def _accept(self, token: int, logits: Floats) -> tuple[int]:  # (V,)
        self._sampler.accept(token, logits)
        self._root = token
        return (token,)


def until_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> Sequence[int]:
    """Cuts tokens behind the first stop id."""
    for place, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: place + 1]
    return tokens
