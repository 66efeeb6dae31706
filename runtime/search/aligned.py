"""Grammar-aligned sampling (ASAp): replies as the model writes them when they happen to follow the grammar.

Masking alone changes how likely replies are: it goes on as if every beginning led to an end as surely as any other.
Here each beginning has an estimate of how much of what the model writes behind it follows the grammar, 1 at first; a
token is drawn by its probability times that estimate, and every reply that was drawn makes the estimates of its
beginnings smaller and truer (Park et al. 2024, arXiv 2405.21047).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchMethod, SearchParts, SearchStrategy, logprob
from edgeinfer.runtime.text.streaming import ReplyText


@dataclass(eq=False)
class Beginning:
    """A beginning of replies that were drawn."""

    allowed: int = 0  # how many tokens may follow
    # Probability of those that were not drawn; None before that was looked at, and behind an end.
    unseen: float | None = None
    # The tokens that were drawn behind it, each with its probability.
    behind: dict[int, tuple[float, Beginning]] = field(default_factory=dict)
    estimate: float = 1.0  # of the probability that the model ends a reply that begins so as it must

    def weights(self, probabilities: NDArray[np.float64], ids: Ints) -> NDArray[np.float64]:  # (V,), (A,) -> (A,)
        """What tokens are drawn by: their probability times the estimate behind them."""
        weights, self.allowed = probabilities[ids], len(ids)
        drawn = ids.searchsorted(list(self.behind))
        known = weights[drawn] * [beginning.estimate for _, beginning in self.behind.values()]
        weights[drawn] = 0
        self.unseen = float(weights.sum())
        weights[drawn] = known
        return weights

    def after(self, token: int, probability: float) -> Beginning:
        """The beginning that is one token longer."""
        if token not in self.behind:
            assert self.unseen is not None, "tokens are drawn by their weights"
            self.behind[token] = probability, Beginning()
            self.unseen = max(self.unseen - probability, 0.0) if len(self.behind) < self.allowed else 0.0
        return self.behind[token][1]

    def learn(self) -> None:
        """Make the estimate what those behind add up to: a sum, so that the least likely forms keep their digits."""
        if self.unseen is not None:
            self.estimate = self.unseen + sum(p * longer.estimate for p, longer in self.behind.values())


@dataclass(eq=False)
class _Draw:
    text: ReplyText
    path: list[Beginning]  # its beginnings, the empty one first
    stream: int
    branch: Branch | None = None
    score: float = 0.0
    stuck: bool = False  # nothing that may follow has any probability

    def over(self, most: int) -> bool:
        """Whether it has ended, or as many tokens as it may."""
        return self.stuck or self.text.ended or len(self.text.tokens) >= most


class Aligned(SearchStrategy):
    """Draws rounds of replies side by side, learns from each round, and answers with one of the last. Temperature and
    truncation are part of the distribution that is aligned."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        if not parts.sampler.constrained:
            message = Setting("search", "aligned") + " aligns replies with a form that they must have."
            raise UsageError(message, "Give a schema, an expression, a grammar or choices.")
        self._tree = Beginning()

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        count, rounds = self._config.samples, self._config.rounds
        most, first_logits = self._share(count, room), logits.copy()
        draws: list[_Draw] = []
        for turn in range(rounds):
            draws = yield from self._round(prompt, first_logits, most, range(turn * count, (turn + 1) * count))
            self.search.trials += count
        whole = [draw for draw in draws if not draw.stuck]
        if not whole:
            message = "The replies drawn led nowhere: what they must go on with has no probability."
            raise UsageError(
                message, "Raise " + Setting("top_p") + " or " + Setting("rounds") + ", or change the form."
            )
        whole.sort(key=lambda draw: not draw.text.ended)  # those that have ended first, in the order of their draws
        self.search.texts = tuple(self._searched_text(draw.text, draw.score) for draw in whole)
        return (yield from self._take(whole[0].text.tokens, first_logits))

    def _round(self, prompt: Sequence[int], logits: Floats, most: int, streams: range) -> Passes[list[_Draw]]:  # (V,)
        """Replies drawn by the same estimates, from which these learn."""
        branches = Branches(self._feeder)
        draws = [_Draw(self._parts.reply_text(prompt), [self._tree], stream) for stream in streams]
        for draw in draws:
            self._extend(draw, logits, len(prompt))
            draw.branch = branches.begin()
        while live := [draw for draw in draws if not draw.over(most)]:
            fed = [(draw.branch, draw.text.tokens[-1:]) for draw in live if draw.branch is not None]
            for draw, row in zip(live, (yield from branches.feed(fed)), strict=True):
                self._extend(draw, row, len(prompt))
                if draw.over(most) and draw.branch is not None:
                    branches.drop(draw.branch)
                    draw.branch = None
        branches.end()
        for draw in draws:
            for beginning in reversed(draw.path):
                beginning.learn()
        return draws

    def _extend(self, draw: _Draw, logits: Floats, prompt: int) -> None:  # (V,)
        """Draw a reply's next token."""
        probabilities, ids = self._parts.sampler.unbound(logits, draw.text.tokens)
        here = draw.path[-1]
        weights = here.weights(probabilities, ids)
        if not weights.any():
            draw.stuck = True
            return
        index = self._parts.sampler.sample_from(weights, prompt + len(draw.text.tokens), draw.stream)
        token = int(ids[index])
        draw.path.append(here.after(token, float(probabilities[token])))
        draw.score += logprob(logits, token)
        draw.text.push(token)


METHODS = (
    SearchMethod(
        name="aligned",
        help="replies of a form as likely as the model finds them",
        make=Aligned,
        draws="always",
        constrained=True,
    ),
)
