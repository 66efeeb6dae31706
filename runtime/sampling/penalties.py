"""What biases and the text so far do to logits: penalties on tokens that occurred, and on those that would repeat what
the text said before."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass

# A bias of +inf means "force". A large finite number does that and keeps the arithmetic free of inf - inf.
_FORCED = np.float32(1e30)
# Tokens of a repeat that are counted at most, and before it that may hold the beginning of a sequence breaker.
_LONGEST, _BEFORE = 512, 40


class TokenCounts:
    """The tokens of prompt and reply, and how often each occurs, as a stack: tokens are pushed and popped in order.
    Only ids that occur take space. Draft positions are evaluated by pushing the draft and undone by popping it."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        text = list(prompt)
        self._start = self._end = len(text)
        self._text = np.zeros(max(64, 2 * len(text)), np.int64)
        self._text[: len(text)] = text
        ids = list(dict.fromkeys(text))
        self._slots = {token: slot for slot, token in enumerate(ids)}
        self._prompt_size = len(ids)
        self._size = len(ids)
        capacity = max(64, 2 * len(ids))
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(ids)] = ids
        self._counts = np.zeros(capacity, np.float32)

    def __len__(self) -> int:
        return self._end - self._start

    @property
    def text(self) -> NDArray[np.int64]:  # (T,)
        """Tokens of prompt and reply; a view that is valid until the next push or pop."""
        return self._text[: self._end]

    @property
    def ids(self) -> NDArray[np.int64]:  # (U,)
        """Ids present in prompt or reply, each once; a view that is valid until the next push or pop."""
        return self._ids[: self._size]

    @property
    def reply_counts(self) -> NDArray[np.float32]:  # (U,)
        """Occurrences in the reply of each of `ids`; a view that is valid until the next push or pop."""
        return self._counts[: self._size]

    def push(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._size
            if slot == len(self._ids):
                self._ids = np.resize(self._ids, 2 * slot)
                self._counts = np.resize(self._counts, 2 * slot)
            self._slots[token] = slot
            self._ids[slot] = token
            self._counts[slot] = 0
            self._size += 1
        self._counts[slot] += 1
        if self._end == len(self._text):
            self._text = np.resize(self._text, 2 * self._end)
        self._text[self._end] = token
        self._end += 1

    def pop(self, count: int = 1) -> None:
        assert 0 <= count <= len(self), "popping more tokens than were pushed"
        for _ in range(count):
            self._end -= 1
            token = int(self._text[self._end])
            slot = self._slots[token]
            self._counts[slot] -= 1
            # Last in, first out: a slot that a push opened is the newest one when that push is undone.
            if slot >= self._prompt_size and self._counts[slot] == 0:
                del self._slots[token]
                self._size -= 1


class RepeatPenalty:
    """llama.cpp's DRY: if the last L tokens of the text occurred before in it, the token that followed them there loses
    multiplier x base ** (L - allowed length), for the largest L from the allowed length on. No repeat reaches back past
    a token in which a sequence breaker ends. Without `pieces`, the bytes of a token, there are no breakers."""

    def __init__(self, config: ReplyOptions, pieces: Callable[[int], bytes] | None) -> None:
        self._multiplier, self._base = config.dry_multiplier, config.dry_base
        self._allowed, self._last = config.dry_allowed_length, config.dry_penalty_last_n
        growth = math.log(self._base)
        # Of longer repeats the penalty grows no more, or past all numbers.
        steps = min(math.ceil(math.log(_FORCED) / growth), _LONGEST) if growth * _LONGEST > 1 else _LONGEST
        self._most = self._allowed + steps
        self._breakers = [text.encode() for text in config.dry_sequence_breakers]
        self._pieces = None if pieces is None else cache(pieces)

    def apply(self, row: NDArray[np.float32], text: NDArray[np.int64]) -> None:  # (V,), (T,)
        if self._last >= 0:
            text = text[max(len(text) - self._last, 0) :]
        lengths = self._repeats(text)
        if not (lengths >= self._allowed).any():
            return
        unbroken = self._unbroken(text)
        if unbroken < self._allowed:
            return
        places = np.flatnonzero(lengths >= self._allowed)
        exponents = np.minimum(lengths[places], unbroken) - self._allowed
        order = np.argsort(exponents, kind="stable")  # of a token that followed several, the largest is written last
        ids = text[places[order]]
        with np.errstate(over="ignore"):
            penalty = np.minimum(self._multiplier * self._base ** exponents[order].astype(np.float64), _FORCED)
        row[ids] = row[ids] - penalty.astype(np.float32)

    def _repeats(self, text: NDArray[np.int64]) -> NDArray[np.int64]:  # (T,) -> (T,)
        """How many tokens before each are also the last ones of the text, up to a limit; -1 for the first."""
        last = len(text) - 1
        lengths = np.full(len(text), -1)
        alive = np.arange(last)  # where a repeat ends
        for length in range(self._most + 1):
            if length:
                alive = alive[alive >= length - 1]
                alive = alive[text[alive - length + 1] == text[last - length + 1]]
            if not len(alive):
                break
            lengths[alive + 1] = length
        return lengths

    def _unbroken(self, text: NDArray[np.int64]) -> int:  # (T,)
        """How many of the last tokens come after the last sequence breaker."""
        if self._pieces is None or not self._breakers:
            return self._most
        pieces = [self._pieces(token) for token in text[-self._most - _BEFORE :].tolist()]
        end, joined = -1, b"".join(pieces)
        for breaker in self._breakers:
            place = joined.rfind(breaker)
            end = max(end, place + len(breaker)) if place >= 0 else end
        if end < 0:
            return self._most
        return len(pieces) - 1 - int(np.cumsum([len(piece) for piece in pieces]).searchsorted(end))


@dataclass(frozen=True)
class Penalties:
    """Changes of logits before temperature, in this order: bias, repetition, frequency + presence, repeats."""

    # CTRL's factor (Keskar et al. 2019) on tokens of prompt and reply: positive logits are divided by it, negative ones
    # multiplied; 1 is none.
    repetition: float
    frequency: float  # OpenAI's, taken once per occurrence in the reply
    presence: float  # OpenAI's, taken once from every token of the reply
    bias_ids: NDArray[np.int64]  # token ids with a bias. (B,)
    bias: NDArray[np.float32]  # added to the logits of those ids; -inf bans, +inf forces. (B,)
    repeats: RepeatPenalty | None  # where the text repeats itself

    @classmethod
    def from_config(cls, config: ReplyOptions, vocab_size: int, pieces: Callable[[int], bytes] | None = None) -> Self:
        for token in config.logit_bias:
            if not 0 <= token < vocab_size:
                raise UsageError(
                    f"logit_bias names token {token}, but the vocabulary has {vocab_size} tokens.",
                    f"Use ids from 0 to {vocab_size - 1}.",
                )
        return cls(
            repetition=config.repetition_penalty,
            frequency=config.frequency_penalty,
            presence=config.presence_penalty,
            bias_ids=np.array(list(config.logit_bias), np.int64),
            bias=np.minimum(np.array(list(config.logit_bias.values()), np.float64), _FORCED).astype(np.float32),
            repeats=RepeatPenalty(config, pieces) if config.dry_multiplier and config.dry_penalty_last_n else None,
        )

    @property
    def counting(self) -> bool:
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0 or self.repeats is not None

    @property
    def active(self) -> bool:
        return self.counting or len(self.bias_ids) > 0

    def apply(self, row: NDArray[np.float32], counts: TokenCounts | None) -> None:
        """Change a row of logits (V,) in place, only at ids that are biased or present; `counts` may be None unless
        `counting`."""
        if len(self.bias_ids):
            row[self.bias_ids] += self.bias
        if not self.counting:
            return
        assert counts is not None, "penalties on present tokens need their counts"
        ids = counts.ids
        logits = row[ids]  # (U,)
        if self.repetition != 1:
            factor = np.float32(self.repetition)
            logits = np.where(logits > 0, logits / factor, logits * factor)
        if self.frequency != 0 or self.presence != 0:
            occurrences = counts.reply_counts  # (U,)
            logits -= np.float32(self.frequency) * occurrences + np.float32(self.presence) * (occurrences > 0)
        row[ids] = logits
        if self.repeats is not None:
            self.repeats.apply(row, counts.text)
