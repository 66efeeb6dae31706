"""What all decoding is made of: generators that yield passes and are sent their results, and the base of strategies."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from edgeinfer.core.records import dataclass
from edgeinfer.core.results import ComputeUse, RemoteUse, SearchUse, SpeculationUse
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


_ONE_ROW = np.zeros(1, np.int64)


class Strategy:
    """Decodes one reply: `first` follows the prompt, then `next` until the reply ends; this one is plain decoding.

    The rows of the sequence's cache must be those that the whole model gives to the text's tokens. A strategy that
    leaves some out, or feeds them later, cuts the cache to those that are by the time its generation ends.

    Attributes:
        searches: the cache holds more than the reply while it is decoded, so that the reply cannot be paused.
        pass_ns: of the latest step, nanoseconds of its pass where it was plain; 0 where it was another.
        speculation, compute, search, remote: what the strategy counts, as results have it; complete after `finish`.
    """

    searches = False
    speculation: SpeculationUse | None = None
    compute: ComputeUse | None = None
    search: SearchUse | None = None
    remote: RemoteUse | None = None

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
