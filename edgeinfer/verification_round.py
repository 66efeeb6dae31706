"""One round of a reply whose drafts come from elsewhere, and whose text this model decides."""

from __future__ import annotations

import time

import numpy as np

from edgeinfer.generation import TokenStream
from edgeinfer.model_parts import ModelParts
from edgeinfer.reply_decoding import GenerationRequest
from edgeinfer.results import FinishReason
from edgeinfer.runtime.backends.contract import PreemptedError
from edgeinfer.runtime.decoding.strategy import Step
from edgeinfer.runtime.decoding.verifying import verify
from edgeinfer.turns import Turns

__all__ = ["VerificationStream"]


class VerificationStream(TokenStream):
    """The tokens of a round: those of the draft with which plain decoding agrees, one more, and further ones.

    Its result's text is that of the round alone.

    Args:
        further: tokens that the model makes by itself after those that come of the draft; the others are those of
            `TokenStream`.
    """

    def __init__(self, parts: ModelParts, request: GenerationRequest, turns: Turns, further: int) -> None:
        self._further = further
        super().__init__(parts, request, turns)

    def _prepare(self) -> None:
        super()._prepare()
        for token in self._request.reply:
            # Logits are needed for log-probabilities alone, which a round has none of.
            self._sampler.accept(token, np.zeros(0, np.float32))
        self._made = list(self._request.reply)
        room = self._parts.engine.allowance(len(self._prompt) + len(self._made), None)
        self._left = min(1 + len(self._request.draft), room)
        self._verified = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the round so far, a stop token included."""
        return tuple(self._made[len(self._request.reply) :])

    @property
    def ending(self) -> FinishReason | None:
        """Why the whole reply is over by this round: a stop token, or no room for another; None where it goes on."""
        if not self.tokens:
            return "length"
        return "stop" if self.tokens[-1] in self._stop_ids else None

    def _step(self) -> Step | None:
        if self._verified:
            return super()._step()
        if self._left == 0 or self._cancelled:
            return None
        self._turns.claim(self)
        engine = self._parts.engine
        engine.use_adapter(self._config.adapter)
        text, draft = [*self._prompt, *self._made], self._request.draft[: self._left - 1]
        started = time.perf_counter()
        try:
            tokens = verify(engine, text, draft, self._sampler, self._stop_ids)
        except PreemptedError:
            # Its pages are others' now; the text is evaluated again as soon as there are some.
            engine.restart()
            return self._step()
        self._add_prefill()
        if not tokens or self._parts.verification.await_verdict(lambda: self._cancelled) is None:
            return None
        self._verified = True
        self._made += tokens
        self._left = min(self._further, engine.allowance(len(self._prompt) + len(self._made), None))
        self._ahead.extend(Step(token, 0.0, last=place == len(tokens)) for place, token in enumerate(tokens[1:], 2))
        return Step(tokens[0], (time.perf_counter() - started) * 1e3, last=len(tokens) == 1)
