"""One round of a reply whose drafts come from elsewhere, and whose text this model decides."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from edgeinfer.batching import Turns
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelParts
from edgeinfer.options import Range, require
from edgeinfer.reply_decoding import GenerationRequest
from edgeinfer.results import FinishReason
from edgeinfer.runtime.backends.contract import PassCancelledError, PreemptedError, RotatingBackend
from edgeinfer.runtime.decoding.engine import Engine
from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS, DraftAdvice, draft_advice
from edgeinfer.runtime.decoding.strategy import Step


class VerificationStream(TokenStream):
    """The tokens of a round: those of the draft with which plain decoding agrees, one more, and further ones.

    Where other replies share the pass, it may evaluate the beginning of the draft alone. Its result's text is that of
    the round alone.

    Args:
        further: tokens that the model makes by itself after those that come of the draft.
        acceptance: the share of drafted tokens that is expected to be right.
        parts, request, turns: as `TokenStream` takes them.

    Raises:
        UsageError: `acceptance` is no share.

    Attributes:
        verified: drafted tokens that the pass evaluated.
        compared: drafted tokens up to the first that is wrong, of which the pass tells whether they are right.
        right: those of them that are the text's.
    """

    def __init__(
        self, parts: ModelParts, request: GenerationRequest, turns: Turns, further: int, acceptance: float
    ) -> None:
        require(Range(0, 1).holds(acceptance), "acceptance", acceptance, "a number from 0 to 1")
        self._further, self._acceptance = further, acceptance
        self.verified = self.compared = self.right = 0
        self._given_up = False
        self._advice = 1
        self._pass_ms: Callable[[int], float] | None = None
        super().__init__(parts, request, turns)

    def _prepare(self) -> None:
        super()._prepare()
        for token in self._request.reply:
            # Logits are needed for log-probabilities alone, which a round has none of.
            self._sampler.accept(token, np.zeros(0, np.float32))
        self._made = list(self._request.reply)
        room = self._parts.engine.allowance(len(self._prompt) + len(self._made), None)
        self._left = min(1 + len(self._request.draft), room)
        self._decided = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the round so far, a stop token included."""
        return tuple(self._made[len(self._request.reply) :])

    @property
    def ending(self) -> FinishReason | None:
        """Why the whole reply is over by this round: a stop token, or no room for another; None where it goes on."""
        if not self.tokens:
            return None if self._given_up else "length"
        return "stop" if self.tokens[-1] in self._stop_ids else None

    def give_up(self) -> None:
        """Ends the round within its current pass, with what was decided, as the client wants no more. Safe from any
        thread."""
        self._given_up = True
        self.cancel()

    def _reason_at_limit(self) -> FinishReason:
        return "length" if self._given_up else super()._reason_at_limit()

    def advice(self, devices: int) -> DraftAdvice | None:
        """What is best for all replies of now; None where there is no other, or too little is known. Safe from any
        thread.

        Args:
            devices: that have asked for rounds lately, as those between two rounds have no rows in a pass.
        """
        replies = max(self._advice, devices)
        if replies < 2 or self._pass_ms is None:
            return None
        return draft_advice(replies, self._acceptance, self._pass_ms, VERIFIED_ROWS)

    def _look_around(self) -> None:
        """Remember the batch size of the last pass, for other threads."""
        self._advice, self._pass_ms = self._parts.batch_size, self._parts.speculator.pass_ms

    def _step(self) -> Step | None:
        if self._decided:
            self._look_around()
            return super()._step()
        if self._left == 0 or self._cancelled:
            return None
        self._turns.claim(self)
        engine = self._parts.engine
        engine.use_adapter(self._config.adapter)
        started = time.perf_counter()
        try:
            tokens = self._verify(engine, [*self._prompt, *self._made], self._request.draft[: self._left - 1])
        except PreemptedError:
            # Its pages are others' now; the text is evaluated again as soon as there are some.
            engine.restart()
            return self._step()
        self._add_prefill()
        if not tokens or self._parts.verification.await_verdict(lambda: self._cancelled) is None:
            return None
        self._decided = True
        self._made += tokens
        self._left = min(self._further, engine.allowance(len(self._prompt) + len(self._made), None))
        self._ahead.extend(Step(token, 0.0, last=place == len(tokens)) for place, token in enumerate(tokens[1:], 2))
        return Step(tokens[0], (time.perf_counter() - started) * 1e3, last=len(tokens) == 1)

    def _verify(self, engine: Engine, text: Sequence[int], draft: Sequence[int]) -> list[int]:
        """Evaluates a draft behind a text in one pass, and gives the tokens that plain decoding makes there: those of
        the draft that agree, and one further, which is the first that does not or comes behind the last; the sampler
        accepts them.

        Where a pass of several rows rounds otherwise than passes of one row, and where the draft could reach the border
        behind which a text is rotated otherwise, the draft is not looked at.

        Returns:
            One to `1 + len(draft)` tokens; none where the round was cancelled.
        """
        rotates = isinstance(engine.backend, RotatingBackend) and engine.backend.rotation_border is not None
        if rotates or not engine.backend.capabilities.paged:
            draft = ()
        if not engine.prepare(text, len(text)):
            return []
        cache = engine.backend.cache
        cache.hold(cache.length)
        gains = tuple(self._acceptance**depth for depth in range(1 + len(draft)))
        try:
            # Of a pass that other replies share, it has as much of the draft as is worth most there.
            logits = engine.feed([text[-1], *draft], np.arange(1 + len(draft)), gains)  # (1 + D, V)
        except PassCancelledError:
            return []
        self.verified = len(logits) - 1
        self._look_around()
        tokens: list[int] = []
        # Where the draft was cut, the token behind what was evaluated is known as well.
        for row, expected in zip(logits, (*draft, None), strict=False):
            token = self._sampler.sample(row, len(text) + len(tokens))
            self._sampler.accept(token, row)
            tokens.append(token)
            self.compared += expected is not None
            self.right += token == expected
            if token != expected or token in self._stop_ids:
                break
        engine.truncate(len(text) + len(tokens) - 1)
        return tokens
