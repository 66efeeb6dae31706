"""Diverse beam search: the likeliest beginnings are kept, in groups that avoid what the groups before them chose."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchStrategy, likeliest, log_probabilities

__all__ = ["Beam"]

Logs = NDArray[np.float64]


@dataclass(frozen=True)
class _Beginning:
    """A beginning of the reply: its tokens, their log-probability in all, the branch that holds all but the last."""

    tokens: tuple[int, ...]
    total: float
    branch: Branch | None


@dataclass
class _Group:
    """Beginnings kept together, with the log-probabilities behind each, and those that have ended."""

    live: list[_Beginning]
    ended: list[_Beginning] = field(default_factory=list)
    behind: list[Logs] = field(default_factory=list)


class Beam(SearchStrategy):
    """The reply of the highest log-probability divided by length**length_penalty among those found.

    What a group avoids counts where it chooses, not in the log-probabilities that are compared at the end.
    """

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Sequence[int]:  # (V,)
        """The whole reply."""
        options, first_logits = self._config, logits.copy()
        limit = self._share(options.beams, room)
        self._reply_rows = self._backend.cache.length
        branches = Branches(self._passes)
        groups = [_Group([_Beginning((), 0.0, None)]) for _ in range(options.beam_groups)]
        for group in groups:
            group.behind = [log_probabilities(first_logits)]
        for length in range(1, limit + 1):
            chosen: Counter[int] = Counter()
            for group in groups:
                self._lengthen(group, chosen, options.beams // options.beam_groups)
            if length == limit or not any(group.live for group in groups):
                break
            self._feed(groups, branches)
        branches.end()
        self._reply_rows = None
        found = [beginning for group in groups for beginning in (*group.ended, *group.live)]
        ranked = sorted(found, key=self._score, reverse=True)[: options.beams]
        self._tell(prompt, ranked)
        self._statistics.trials = len(found)
        return self._take(ranked[0].tokens, first_logits)

    def next(self, room: int, lost: int) -> tuple[int]:
        """Where the context had no room for as much of all of them: the reply goes on alone."""
        return self._plain_step()

    def _score(self, beginning: _Beginning) -> float:
        return beginning.total / math.pow(len(beginning.tokens), self._config.length_penalty)

    def _lengthen(self, group: _Group, chosen: Counter[int], size: int) -> None:
        """Replaces a group's beginnings by the best that are one token longer, and counts their tokens."""
        if not group.live:
            return
        stop_ids, live = self._parts.stop_ids, list[_Beginning]()
        for rank, (_, index, token) in enumerate(sorted(self._candidates(group, chosen, size))):
            parent = group.live[index]
            longer = _Beginning(
                (*parent.tokens, token), parent.total + float(group.behind[index][token]), parent.branch
            )
            if token in stop_ids:
                if rank < size:
                    group.ended.append(longer)
            elif len(live) < size:
                live.append(longer)
        chosen.update(beginning.tokens[-1] for beginning in live)
        group.live = [] if self._over(group, live, size) else live

    def _candidates(self, group: _Group, chosen: Counter[int], size: int) -> Iterator[tuple[float, int, int]]:
        """The best tokens behind each beginning: what they are judged by, less being better, its index, the token.

        So many of each that `size` are left without stop tokens.
        """
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

    def _feed(self, groups: Sequence[_Group], branches: Branches) -> None:
        """Feeds the last token of every beginning that goes on, each into a branch of its own."""
        old = branches.live
        for group in groups:
            group.live = [self._forked(beginning, branches) for beginning in group.live]
        for branch in old:
            branches.drop(branch)
        fed = [(b.branch, b.tokens[-1:]) for group in groups for b in group.live if b.branch is not None]
        rows = iter(branches.feed(fed))
        for group in groups:
            group.behind = [log_probabilities(next(rows)) for _ in group.live]

    @staticmethod
    def _forked(beginning: _Beginning, branches: Branches) -> _Beginning:
        branch = branches.begin() if beginning.branch is None else branches.fork(beginning.branch)
        return _Beginning(beginning.tokens, beginning.total, branch)

    def _tell(self, prompt: Sequence[int], ranked: Sequence[_Beginning]) -> None:
        texts = []
        for beginning in ranked:
            text = self._parts.reply_text(prompt)
            for token in beginning.tokens:
                text.push(token)
            texts.append(self._searched_text(text, beginning.total))
        self._texts = tuple(texts)
