"""USCD: where the next token is uncertain, the reply moves away from what the model would say to a worse prompt. The
worse prompt and the reply behind it lie in the same cache, and one pass feeds both texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.methods import method_option
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.decoding.sequence import Passes
from edgeinfer.runtime.search.branches import Branch, Branches
from edgeinfer.runtime.search.strategy import (
    MOST_ROWS,
    SearchMethod,
    SearchParts,
    SearchStrategy,
    entropy,
    log_probabilities,
)
from edgeinfer.runtime.text.special_tokens import LiteralEncoder

# As the authors ran it (github.com/alphadl/CodeGen-USCD at c4bf692). Tokens below this share of the mean probability
# stay out.
_PLAUSIBLE = 2 / 3
# They contrast where the standard deviation of the probabilities of 32,016 tokens is at most 0.005, which is where the
# chance of drawing the same token twice is at most 0.8. Put so, it means the same for vocabularies of other sizes.
_CERTAIN = 0.8


def contrasted(logits: Floats, lame: Floats, strength: float, judged: Floats) -> Floats:  # (V,), (V,), _, (V,) -> (V,)
    """log(p - strength * p_lame) of the plausible tokens, of the others -inf; the logits where that leaves no token."""
    own = np.exp(log_probabilities(logits))
    moved = own - strength * np.exp(log_probabilities(lame))
    left = (moved > 0) & (own >= _PLAUSIBLE / len(own)) & np.isfinite(judged)
    if not left.any():
        return logits
    return np.log(moved, out=np.full(len(own), -np.inf), where=left).astype(np.float32)


class Contrast(SearchStrategy):
    """Chooses as asked, greedily or by sampling, but of contrasted logits where the model's own are uncertain."""

    def __init__(self, parts: SearchParts) -> None:
        super().__init__(parts)
        self._options, tokenizer = METHOD.values(self._config.method_options), parts.tokenizer
        lame = self._options["lame_prompt"] or ""
        if not lame:
            raise UsageError("contrast needs the method option lame_prompt.", "Write a worse prompt.")
        if parts.rephrased is not None:
            self._lame = parts.rephrased(lame)
        elif self._config.parses_prompt:
            self._lame = tokenizer.encode(lame)
        else:
            self._lame = LiteralEncoder(tokenizer, parts.stop_ids).literal(lame, add_special_tokens=True)
        self._pair: tuple[Branch, Branch] | None = None  # the reply, and the reply behind the worse prompt
        self._branches: Branches | None = None
        self._tokens: list[int] = []
        self._prompt = 0

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> Passes[Sequence[int]]:  # (V,)
        limit = self._config.max_tokens
        wanted = len(self._lame) + (2 * (room - 1) if limit is not None else 2)
        free, bound = self._parts.room(copied=self._cache.length)
        if wanted > free:
            message = f"The {bound} has no room for both prompts and their replies."
            hint = "Ask for a shorter reply, or load the model with a larger " + Setting(bound) + "."
            raise UsageError(message, hint)
        self._prompt = self._cache.length
        own = logits.copy()
        self._branches = Branches(self._feeder)
        self._pair = self._branches.begin(), self._branches.begin(apart=True)
        for begin in range(0, len(self._lame), MOST_ROWS):
            (lame,) = yield from self._branches.feed([(self._pair[1], self._lame[begin : begin + MOST_ROWS])])
        return self._choose(own, lame)

    def next(self, room: int, lost: int) -> Passes[Sequence[int]]:
        """The token after that; where there is no room for two texts any more, plain decoding's."""
        if self._branches is None or self._pair is None:
            return (yield from super().next(room, lost))
        if self._branches.room < 2:
            self._branches.end()
            self._branches = self._pair = None
            # What follows rests on passes of the reply's own text.
            yield from self._feeder.chain(self._tokens[:-1], lambda index, row: None)
            return (yield from super().next(room, lost))
        own, lame = yield from self._branches.feed([(branch, [self._root]) for branch in self._pair])
        return self._choose(own, lame)

    def _choose(self, own: Floats, lame: Floats) -> tuple[int]:  # (V,), (V,)
        sampler, place = self._parts.sampler, self._prompt + len(self._tokens)
        probabilities, above = np.exp(log_probabilities(own)), self._options["uncertainty"]
        uncertain = probabilities @ probabilities <= _CERTAIN if above is None else entropy(probabilities) > above
        plain = sampler.sample(own, place)
        token = plain
        if uncertain:
            moved = contrasted(own, lame, self._options["contrast_strength"], sampler.adjusted(own))
            token = sampler.sample(moved, place)
        self.search.trials += token != plain
        self._tokens.append(token)
        return self._accept(token, own)


METHOD = SearchMethod(
    name="contrast",
    help="steers away from a worse prompt where the next token is uncertain (USCD)",
    make=Contrast,
    draws="either",
    constrained=True,
    thinks=True,
    options=(
        method_option("lame_prompt", None, "worse prompt; in a chat instead of the user's last message", kind=str),
        method_option("contrast_strength", 0.7, "how strongly to steer away from it", low=0, high=100),
        method_option(
            "uncertainty",
            None,
            "entropy in nats above which the next token is uncertain; without one, a chance of at most 0.8 that it is "
            "drawn twice",
            kind=float,
            low=0,
            high=100,
        ),
    ),
)
