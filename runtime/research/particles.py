"""Particle decoding: sequential Monte Carlo for a sharper, scored or checked distribution of whole replies.

The target is p(reply)**power * exp(scorer(reply)) over the replies that form and checker allow. Sampling every token
from its own sharpened distribution is another thing: that ignores how much probability lies behind a token. Particles
are drawn so, and carry as weights what this gets wrong (Power-SMC, arXiv 2602.10273; scores of beginnings
as in SMC steering, arXiv 2306.03081).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.methods import method_option
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.research.scoring import SCORER, asked_score
from edgeinfer.runtime.sampling.distributions import draw_from
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import SearchMethod, SearchParts, SearchStrategy, logprob
from edgeinfer.runtime.text.streaming import ReplyText

# Particles are resampled where fewer of them than this share still count (the published code's default).
_EFFECTIVE_SHARE = 0.5


def systematic(weights: NDArray[np.float64], start: float) -> list[int]:  # (N,)
    """Indices of N particles, each about as often as N times its weight, by one number in [0, 1)."""
    cumulative = np.cumsum(weights)
    places = (start + np.arange(len(weights))) * (cumulative[-1] / len(weights))
    # Rounding must not move a place beyond the last particle.
    below = np.minimum(places, np.nextafter(cumulative[-1], 0))
    chosen: list[int] = cumulative.searchsorted(below, side="right").tolist()
    return chosen


@dataclass(eq=False)
class _Particle:
    text: ReplyText
    branch: Branch | None = None  # that it is drawn in, until it is over
    log_weight: float = 0.0  # since the last resampling
    score: float = 0.0  # sum of its tokens' log-probabilities by the model
    reward: float = 0.0  # what the scorer said of it last

    @property
    def dead(self) -> bool:
        """Whether it cannot be the reply any more."""
        return self.log_weight == -math.inf

    def over(self, most: int) -> bool:
        """Whether it is dead, has ended, or has as many tokens as it may."""
        return self.dead or self.text.ended or len(self.text.tokens) >= most


class Particles(SearchStrategy):
    """Draws replies side by side, replaces those of little weight by others, and answers with one by its weight.
    Temperature, truncation and penalties are part of p. The scorer is asked before each resampling and at the end."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._options = METHOD.values(self._config.method_options)
        self.log_evidence = 0.0  # logarithm of the unbiased estimate of the target's sum over all replies

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        count = self._config.samples
        most, first_logits = self._share(count, room), logits.copy()
        branches = Branches(self._feeder)
        particles = [_Particle(self._parts.reply_text(prompt)) for _ in range(count)]
        for slot, particle in enumerate(particles):
            particle.branch = branches.begin()
            self._extend(particle, slot, first_logits, len(prompt))
        length = 1
        while not all(particle.over(most) for particle in particles):
            if length % self._options["resample_every"] == 0:
                self._weigh(particles)
                particles = self._resampled(particles, prompt, length, branches)
            for particle in particles:
                if particle.branch is not None and particle.over(most):
                    branches.drop(particle.branch)
                    particle.branch = None
            yield from self._feed(particles, len(prompt), branches)
            length += 1
        branches.end()
        self._weigh(particles)
        return (yield from self._take(self._chosen_of(particles, len(prompt)), first_logits))

    def _feed(self, particles: Sequence[_Particle], prompt: int, branches: Branches) -> Passes[None]:
        """Draw the next token of each particle that is not over."""
        live = [(slot, each, each.branch) for slot, each in enumerate(particles) if each.branch is not None]
        if not live:
            return
        rows = yield from branches.feed([(branch, each.text.tokens[-1:]) for _, each, branch in live])
        for (slot, each, _), row in zip(live, rows, strict=True):
            self._extend(each, slot, row, prompt)

    def _extend(self, particle: _Particle, slot: int, logits: Floats, prompt: int) -> None:  # (V,)
        """Draw a particle's next token, and weigh it by what this token's law gets wrong."""
        tokens = particle.text.tokens
        token, log_weight = self._parts.sampler.weighed_sample(
            logits, prompt + len(tokens), tokens, self._options["power"], slot
        )
        particle.log_weight += log_weight
        if token is not None:
            particle.score += logprob(logits, token)
            particle.text.push(token)

    def _weigh(self, particles: Sequence[_Particle]) -> None:
        """Weigh particles by what the scorer says of them, in place of what it said before."""
        scorer = self._options["scorer"]
        for particle in particles:
            if scorer is not None and not particle.dead:
                reward = asked_score(scorer, particle.text.text, particle.text.ended)
                particle.log_weight += reward - particle.reward
                particle.reward = reward

    def _resampled(
        self, particles: list[_Particle], prompt: Sequence[int], length: int, branches: Branches
    ) -> list[_Particle]:
        """The particles, or as many drawn of them by their weights where too few still count."""
        weights, log_mean = self._weights(particles)
        if 1 / (weights @ weights) >= _EFFECTIVE_SHARE * len(particles):
            return particles
        self.log_evidence += log_mean
        chosen = systematic(weights, self._parts.sampler.uniform(len(prompt) + length, 0))
        for index, particle in enumerate(particles):
            if particle.branch is not None and index not in chosen:
                branches.drop(particle.branch)
        found, seen = list[_Particle](), set[int]()
        for index in chosen:
            particle = particles[index]
            if index in seen:
                particle = self._copy(particle, prompt, branches)
            seen.add(index)
            particle.log_weight = 0.0
            found.append(particle)
        return found

    def _copy(self, particle: _Particle, prompt: Sequence[int], branches: Branches) -> _Particle:
        """A particle that goes on as another one did so far."""
        branch = None if particle.branch is None else branches.fork(particle.branch)
        text = self._text_of(prompt, particle.text.tokens)
        return _Particle(text, branch, score=particle.score, reward=particle.reward)

    @staticmethod
    def _weights(particles: Sequence[_Particle]) -> tuple[NDArray[np.float64], float]:  # (N,)
        """The particles' shares of the weight, and the logarithm of their mean weight."""
        logs = np.array([particle.log_weight for particle in particles])
        best = float(logs.max())
        if best == -math.inf:
            message = f"None of {len(logs)} particles can become the reply: form, checker or scorer refuse all of them."
            raise UsageError(message, "Raise " + Setting("samples") + ", or refuse less.")
        weights = np.exp(logs - best)
        return weights / weights.sum(), best + math.log(float(weights.mean()))

    def _chosen_of(self, particles: Sequence[_Particle], prompt: int) -> Sequence[int]:
        """The tokens of the reply, drawn by the weights; tells what all of them became."""
        weights, log_mean = self._weights(particles)
        self.log_evidence += log_mean
        self.search.trials = len(particles)
        left = [index for index, particle in enumerate(particles) if not particle.dead]
        self.search.chosen = draw_from(weights[left], self._parts.sampler.uniform(prompt, 0))
        kept = [(particles[index], float(weights[index])) for index in left]
        self.search.texts = tuple(replace(self._searched_text(p.text, p.score), weight=weight) for p, weight in kept)
        return particles[left[self.search.chosen]].text.tokens


METHOD = SearchMethod(
    name="particles",
    help="replies by the model's probability to a power and a scorer (Power-SMC)",
    make=Particles,
    draws="always",
    constrained=True,
    checked=True,
    thinks=True,
    options=(
        SCORER,
        method_option("power", 2.0, "power to which the model's probabilities are raised", low=0.01, high=32),
        method_option("resample_every", 16, "tokens after which particles are weighed and resampled", low=1, high=4096),
    ),
)
