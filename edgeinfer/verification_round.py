"""One round of verifying drafts of another device."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable

import numpy as np

from edgeinfer.core.options import Range, require
from edgeinfer.core.results import FinishReason
from edgeinfer.generation import TokenStream
from edgeinfer.lifecycle import ModelParts
from edgeinfer.reply_decoding import GenerationRequest
from edgeinfer.runtime.backends.contract import PassCancelledError, PreemptedError
from edgeinfer.runtime.decoding.sequence import Passes, Sequence
from edgeinfer.runtime.decoding.shares import VERIFIED_ROWS, DraftAdvice, draft_advice
from edgeinfer.turns import Turns


class VerificationStream(TokenStream):
    """The tokens of a round: the accepted tokens of the draft, one more, and further ones.

    If other replies share the pass, it may evaluate only the start of the draft. The result's text is that of the
    round.

    Args:
        further: tokens that the model makes by itself after those of the draft.
        acceptance: expected share of accepted tokens, from 0 to 1.

    Attributes:
        verified: drafted tokens that the pass evaluated.
        compared: drafted tokens up to and including the first wrong one.
        right: accepted tokens among them.
    """

    def __init__(
        self, parts: ModelParts, request: GenerationRequest, turns: Turns | None, further: int, acceptance: float
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
            # Logits are needed only for log-probabilities, which a round has none of.
            self._sampler.accept(token, np.zeros(0, np.float32))
        self._left = min(1 + len(self._request.draft), self._parts.sequence.allowance(len(self._tokens), None))
        self._decided = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the round so far, a stop token included."""
        return tuple(self._tokens[len(self._prompt) + len(self._request.reply) :])

    @property
    def ending(self) -> FinishReason | None:
        """Why the reply ends with this round: a stop token, or no room for another; None where it continues."""
        if not self.tokens:
            return None if self._given_up else "length"
        return "stop" if self.tokens[-1] in self._stop_ids else None

    def give_up(self) -> None:
        """End the round within its current pass with the tokens decided so far. Safe from any thread."""
        self._given_up = True
        self.cancel()

    def _reason_at_limit(self) -> FinishReason:
        return "length" if self._given_up else super()._reason_at_limit()

    def advice(self, devices: int) -> DraftAdvice | None:
        """What is best for all replies of now, with so many devices that asked for rounds lately; between two rounds
        they have no rows in a pass. None where there is no other, or too little is known. Safe from any thread."""
        replies = max(self._advice, devices)
        if replies < 2 or self._pass_ms is None:
            return None
        return draft_advice(replies, self._acceptance, self._pass_ms, VERIFIED_ROWS)

    def _look_around(self) -> None:
        self._advice, self._pass_ms = self._parts.scheduler.batch_size, self._parts.speculator.pass_ms

    def _next_tokens(self) -> Passes[bool]:
        if self._decided:
            self._look_around()
            return (yield from super()._next_tokens())
        if self._left == 0 or self._cancelled:
            return False
        yield from self._join()
        self._enter()
        sequence = self._parts.sequence
        try:
            tokens = yield from self._verify(sequence, self._tokens, self._request.draft[: self._left - 1])
        except PreemptedError:
            # Its pages were given to others; the text is evaluated again as soon as pages are free.
            yield from sequence.give_way()
            return (yield from self._next_tokens())
        self._add_prefill()
        if not tokens or self._parts.verification.await_verdict(lambda: self._cancelled) is None:
            return False
        self._decided, self._round_ms = True, (time.perf_counter() - self._request.started) * 1e3
        self._tokens = [*self._tokens, *tokens]
        self._left = min(self._further, sequence.allowance(len(self._tokens), None))
        self._ahead.extend(tokens)
        return True

    def _verify(self, sequence: Sequence, text: abc.Sequence[int], draft: abc.Sequence[int]) -> Passes[list[int]]:
        """Evaluate a draft after a text in one pass and return the tokens of plain decoding: the accepted ones and the
        one after them, 1 to `1 + len(draft)`; none where the round was cancelled.

        The draft is ignored where a pass of several rows rounds differently from passes of one row, and where it could
        reach the position from which the text is rotated differently.
        """
        backend, cache = sequence.backend, sequence.cache
        if backend.rotation_border is not None or not backend.capabilities.paged:
            draft = ()
        if not (yield from sequence.prepare(text, len(text))):
            return []
        cache.hold(cache.length)
        gains = tuple(self._acceptance**depth for depth in range(1 + len(draft)))
        try:
            # In a shared pass, only the part of the draft that pays is evaluated.
            result = yield from sequence.feed([text[-1], *draft], np.arange(1 + len(draft)), gains)
        except PassCancelledError:
            return []
        logits = result.logits  # (1 + D, V)
        self.verified = len(logits) - 1
        self._look_around()
        tokens: list[int] = []
        # Where the draft was cut, the token after the evaluated part is known as well.
        for row, expected in zip(logits, (*draft, None), strict=False):
            token = self._sampler.sample(row, len(text) + len(tokens))
            self._sampler.accept(token, row)
            tokens.append(token)
            self.compared += expected is not None
            self.right += token == expected
            if token != expected or token in self._stop_ids:
                break
        sequence.truncate(len(text) + len(tokens) - 1)
        return tokens
