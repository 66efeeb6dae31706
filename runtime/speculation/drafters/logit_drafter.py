"""Drafters that choose from logits of a model whose cache follows the text."""

from __future__ import annotations

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import KVCache
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.speculation.drafters.contract import DraftContext, Drafter, Guess, Round, State

# Runs one pass: tokens (S,), positions (S,), rows (R,) -> logits (R, V), valid until the backend's next pass.
Run = Callable[[Ints, Ints, Ints], Passes[Floats]]

# Whose rows each cache holds: several followers may take turns at one, and rows look the same from outside whoever
# wrote them. A mark, not the follower, which would keep its cache alive.
_owners: WeakKeyDictionary[KVCache, object] = WeakKeyDictionary()


class Follower:
    """Keeps the cache's rows from `start` on in step with a path: a head of committed tokens, then drafted ones."""

    def __init__(self, cache: KVCache, run: Run, chunk: int) -> None:
        self._cache = cache
        self._run = run
        self._chunk = chunk
        self._fed: list[int] = []  # tokens of the rows from `start` on
        self._agreed = 0  # how many of them are known to be the head's
        self._last: Floats | None = None  # logits after the last of them, while they are valid
        self._mark = object()
        self.start = 0

    @property
    def owns(self) -> bool:
        """Whether no other follower wrote the cache's last rows."""
        return _owners.get(self._cache) is self._mark

    @property
    def end(self) -> int:
        """Rows that the cache holds, if no other used it."""
        return self.start + len(self._fed)

    def restart(self, start: int) -> None:
        """Follow from row `start` on, which the cache must reach, and drop what comes after it."""
        self._cache.trim(start)
        self.start = start
        self._fed.clear()
        self._agreed = 0
        self._last = None
        _owners[self._cache] = self._mark

    def leave(self) -> None:
        """Give up the cache's rows."""
        _owners.pop(self._cache, None)

    def doubt(self) -> None:
        """Another head follows: compares it from its beginning the next time."""
        self._agreed = 0

    def forget_logits(self) -> None:
        """Another pass of the backend overwrote the last logits."""
        self._last = None

    def shared(self, head: Sequence[int], drafted: Sequence[int]) -> int:
        """Rows of this path that the cache holds."""
        fed, agreed = self._fed, self._agreed
        most = min(len(fed), len(head))
        while agreed < most and fed[agreed] == head[agreed]:
            agreed += 1
        self._agreed = agreed
        if agreed == len(head):
            for token in drafted:
                if agreed == len(fed) or fed[agreed] != token:
                    break
                agreed += 1
        return agreed

    def unread(self, head: Sequence[int]) -> int:
        """Tokens that the cache lacks of a head, besides its last one; it may have only grown, as `follow` says."""
        return max(0, len(head) - 1 - (self.shared(head, ()) if self.owns else 0))

    def follow(self, head: Sequence[int], drafted: Sequence[int], wanted: int) -> Passes[Floats]:
        """Feed what the cache lacks of a path and give the logits after so many of its last tokens (wanted, V), a view
        that the backend's next pass overwrites."""
        if not self.owns:
            self.restart(self.start)
        total, shared = len(head) + len(drafted), self.shared(head, drafted)
        if wanted == 1 and self._last is not None and shared == total == len(self._fed):
            return self._last
        shared = min(shared, total - wanted)
        if shared < len(self._fed):
            shared = self._cut(shared)
        # Drafted tokens come and go, and with them the last ones whose logits are asked for again.
        self._cache.hold(self.start + max(0, len(head) - wanted))
        missing = [*head[shared:], *drafted[max(0, shared - len(head)) :]]
        at = 0
        while len(missing) - at > max(self._chunk, wanted):
            size = min(self._chunk, len(missing) - at - wanted)
            yield from self._feed(missing[at : at + size], 0)
            at += size
        logits = (yield from self._feed(missing[at:], wanted)) if at < len(missing) else np.empty((0, 0), np.float32)
        self._last = logits[-1:] if wanted else None
        return logits

    def _cut(self, rows: int) -> int:
        """Cut the rows to so many, or fewer where the cache can go on from those alone; tells how many are left."""
        rows = self._cache.rewindable_to(self.start + rows) - self.start
        self._cache.trim(self.start + rows)
        del self._fed[rows:]
        self._agreed = min(self._agreed, rows)
        self._last = None
        return rows

    def _feed(self, tokens: Sequence[int], wanted: int) -> Passes[Floats]:  # (wanted, V)
        size, first = len(tokens), self.end
        self._last = None
        places, rows = np.arange(first, first + size), np.arange(size - wanted, size)
        logits = yield from self._run(np.array(tokens, np.int64), places, rows)
        self._fed.extend(tokens)
        return logits


# Upper edges of the drafter's own probability of a token; the last bucket ends at 1. With acceptance learnt
# by bucket it does better than SpecDec++'s trained estimate.
_EDGES = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95)
_BUCKETS = len(_EDGES) + 1
# Members of the groups whose maxima are compared first. Of 16 to 256, 64 is within a fifth of the fastest at all sizes
# of vocabulary from 4096 to 152064.
_GROUP = 64
# Acceptance of drawn tokens by bucket, then of further ones, which only count where the drawn token is rejected.
_PRIORS = (0.1, 0.2, 0.35, 0.5, 0.65, 0.75, 0.85, 0.93, 0.03, 0.08, 0.15, 0.2, 0.2, 0.2, 0.2, 0.2)


class LogitDrafter(Drafter):
    """Does what follows from having logits after any path, over a vocabulary of so many columns."""

    priors: Sequence[float] = _PRIORS
    draws = True
    branches = True

    def __init__(self, vocabulary: int) -> None:
        self._known: dict[tuple[int, ...], tuple[Guess, ...]] = {}
        self._powers = np.empty(vocabulary, np.float32)

    @abstractmethod
    def _logits(self, context: DraftContext, drafted: Sequence[int]) -> Passes[Floats | None]:  # (V,)
        """After context and drafted tokens, valid until the next pass; None where the path does not fit the cache."""

    def begin(self, tokens: Sequence[int]) -> None:
        self._known.clear()

    def guesses(self, context: DraftContext, drafted: Sequence[int], width: int) -> Passes[Sequence[Guess]]:
        """The token that `context.draw` chooses, then others; asked again within a round it costs nothing. Others are
        further draws from the same distribution, or, where there is none, the most likely tokens."""
        path = tuple(drafted)
        found = self._known.get(path, ())
        if len(found) < width:
            logits = yield from self._logits(context, drafted)
            found = found if logits is None else self._learn(context, path, logits, width)
        return found[:width]

    def _learn(self, context: DraftContext, path: tuple[int, ...], logits: Floats, width: int) -> tuple[Guess, ...]:
        """Guesses after a path from its logits (V,); those known before stay."""
        top = float(logits[int(logits.argmax())])  # three times as fast as max
        np.subtract(logits, np.float32(top), out=self._powers)
        total = float(np.exp(self._powers, out=self._powers).sum())

        def sign(token: int) -> int:
            return bisect_right(_EDGES, math.exp(float(logits[token]) - top) / total)

        if path in self._known:
            found = [*self._known[path]]
        else:
            token, probabilities = context.draw(logits, path)
            found = [Guess(token, sign(token), probabilities)]
        probabilities = found[0].probabilities
        if probabilities is None:
            others = _likely(logits, width, found[0].token)[len(found) - 1 :]
            found.extend(Guess(token, _BUCKETS + sign(token)) for token in others)
        while probabilities is not None and len(found) < width:
            drawn = context.further(probabilities, path, [guess.token for guess in found])
            if drawn is None:
                break
            found.append(Guess(drawn, _BUCKETS + sign(drawn), probabilities))
        self._known[path] = known = tuple(found)
        return known

    def observe(self, round: Round) -> None:
        """Forget the round's guesses; the next path tells what was committed."""
        self._known.clear()

    def nbytes(self) -> int:
        return self._powers.nbytes

    def restore(self, state: State) -> None:
        if state:
            raise StorageError("What was kept belongs to another drafter.", "Delete it; it is learned again.")

    def close(self) -> None:
        """Free what it holds; a target stays open."""
        self._known.clear()


def _likely(logits: Floats, width: int, taken: int) -> list[int]:  # (V,)
    """The most likely tokens but the one taken, `width - 1` of them or all that are possible, best first."""
    if width < 2:
        return []
    ids = best_tokens(logits, width)
    return [token for token in ids[logits[ids] > -np.inf].tolist() if token != taken][: width - 1]


def best_tokens(logits: Floats, count: int) -> NDArray[np.int64]:  # (V,) -> (count,)
    """The tokens of the largest logits, largest first, the lower id first where they are equal. A maximum of each group
    bounds what can be among them: the smallest of the largest maxima. Groups are columns of a grid, so that the maxima
    are taken over whole rows at a time."""
    groups = len(logits) // _GROUP
    if groups <= count:
        order: NDArray[np.int64] = np.argsort(-logits, kind="stable")[:count]
        return order
    maxima = np.maximum.reduce(logits[: groups * _GROUP].reshape(_GROUP, groups), axis=0)
    least = np.partition(maxima, groups - count)[groups - count]
    found = np.flatnonzero(logits >= least)
    chosen: NDArray[np.int64] = found[np.argsort(-logits[found], kind="stable")[:count]]
    return chosen
