"""Diverse beam search: the likeliest beginnings are kept, in groups that avoid what the groups before them chose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.sampling.constraint import ConstraintPlaces
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchMethod, SearchParts, SearchStrategy, likeliest, log_probabilities

Logs = NDArray[np.float64]


@dataclass(frozen=True)
class _Beginning:
    """A beginning of the reply: its tokens, their log-probability in all, the branch that holds all but the last, and
    where it is in what the reply must follow."""

    tokens: tuple[int, ...]
    total: float
    branch: Branch | None
    place: Any = None


@dataclass
class _Group:
    """Beginnings kept together, with the log-probabilities behind each, and those that have ended."""

    live: list[_Beginning]
    behind: Logs  # (live, V)
    ended: list[_Beginning] = field(default_factory=list)


class Beam(SearchStrategy):
    """The reply of the highest log-probability divided by length**length_penalty among those found.

    What a group avoids counts where it chooses, not in the log-probabilities that are compared at the end. Where the
    reply must follow a list of choices or a grammar, beginnings that cannot become such are never among those compared,
    and what has ended wins over what was cut off.
    """

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._places: ConstraintPlaces | None = None

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        options, first_logits = self._config, logits.copy()
        limit = self._share(options.beams, room)
        branches = Branches(self._feeder)
        self._places = self._parts.sampler.places()
        none = _Beginning((), 0.0, None, None if self._places is None else self._places.start())
        behind = log_probabilities(first_logits)[np.newaxis]
        groups = [_Group([none], behind) for _ in range(options.beam_groups)]
        for length in range(1, limit + 1):
            chosen: Counter[int] = Counter()
            for group in groups:
                self._lengthen(group, chosen, options.beams // options.beam_groups)
            if length == limit or not any(group.live for group in groups):
                break
            yield from self._feed(groups, branches)
        branches.end()
        ended = [beginning for group in groups for beginning in group.ended]
        going = [beginning for group in groups for beginning in group.live]
        found = ended if ended and self._places is not None else [*ended, *going]
        ranked = sorted(found, key=self._score, reverse=True)[: options.beams]
        self._tell(prompt, [(beginning.tokens, beginning.total) for beginning in ranked])
        self.search.trials = len(found)
        return (yield from self._take(ranked[0].tokens, first_logits))

    def _score(self, beginning: _Beginning) -> float:
        return beginning.total / math.pow(len(beginning.tokens), self._config.length_penalty)

    def _lengthen(self, group: _Group, chosen: Counter[int], size: int) -> None:
        """Replaces a group's beginnings by the best that are one token longer, and counts their tokens."""
        if not group.live:
            return
        stop_ids, live = self._parts.stop_ids, list[_Beginning]()
        candidates = self._free(group, chosen, size) if self._places is None else self._bound(group, chosen, size)
        for rank, (_, index, token) in enumerate(sorted(candidates)):
            parent = group.live[index]
            total = parent.total + float(group.behind[index, token])
            longer = _Beginning((*parent.tokens, token), total, parent.branch, parent.place)
            if token in stop_ids:
                if rank < size:
                    group.ended.append(longer)
            elif len(live) < size:
                live.append(longer)
        chosen.update(beginning.tokens[-1] for beginning in live)
        group.live = [] if self._over(group, live, size) else self._placed(live)

    def _placed(self, live: list[_Beginning]) -> list[_Beginning]:
        """Give these beginnings at the places behind their last tokens."""
        if self._places is None or not live:
            return live
        places = self._places.after([each.place for each in live], [each.tokens[-1] for each in live])
        return [replace(each, place=place) for each, place in zip(live, places, strict=True)]

    def _bound(self, group: _Group, chosen: Counter[int], size: int) -> Iterator[tuple[float, int, int]]:
        """As `_free`, of what the reply may go on with: of all beginnings together, in one look."""
        assert self._places is not None, "who asks has looked"
        rows, tokens = self._places.followers([beginning.place for beginning in group.live])
        totals = np.array([beginning.total for beginning in group.live])
        # By one number each, which takes a quarter of what pairs take.
        judged = totals[rows] + group.behind.reshape(-1).take(rows * group.behind.shape[1] + tokens)
        for token, times in chosen.items():
            judged[tokens == token] -= self._config.diversity * times
        most = size + len(self._parts.stop_ids) * len(group.live)
        for index in likeliest(judged, min(len(judged), most)).tolist():
            yield -float(judged[index]), int(rows[index]), int(tokens[index])

    def _free(self, group: _Group, chosen: Counter[int], size: int) -> Iterator[tuple[float, int, int]]:
        """The best tokens behind each beginning: what they are judged by, less being better, its index, the token. So
        many of each that `size` are left without stop tokens."""
        for index, (beginning, row) in enumerate(zip(group.live, group.behind, strict=True)):
            judged = beginning.total + row
            for token, times in chosen.items():
                judged[token] -= self._config.diversity * times
            for token in likeliest(judged, min(len(row), size + len(self._parts.stop_ids))).tolist():
                yield -float(judged[token]), index, token

    def _over(self, group: _Group, live: Sequence[_Beginning], size: int) -> bool:
        """Whether enough have ended, and none that goes on is better by now than the worst of them."""
        if len(group.ended) < size or not live:
            return len(group.ended) >= size
        kept = sorted(map(self._score, group.ended), reverse=True)[:size]
        return max(map(self._score, live)) <= kept[-1]

    def _feed(self, groups: Sequence[_Group], branches: Branches) -> Passes[None]:
        """Feed the last token of every beginning that goes on, each into a branch of its own."""
        old = branches.live
        for group in groups:
            group.live = [self._forked(beginning, branches) for beginning in group.live]
        for branch in old:
            branches.drop(branch)
        fed = [(b.branch, b.tokens[-1:]) for group in groups for b in group.live if b.branch is not None]
        rows = iter((yield from branches.feed(fed)))
        for group in groups:
            group.behind = np.empty((len(group.live), group.behind.shape[1]))
            for behind in group.behind:
                behind[:] = log_probabilities(next(rows))

    @staticmethod
    def _forked(beginning: _Beginning, branches: Branches) -> _Beginning:
        branch = branches.begin() if beginning.branch is None else branches.fork(beginning.branch)
        return replace(beginning, branch=branch)


METHODS = (
    SearchMethod(
        name="beam",
        help="beam search: several of the likeliest beginnings are kept",
        make=Beam,
        draws="never",
        constrained=True,
    ),
)
