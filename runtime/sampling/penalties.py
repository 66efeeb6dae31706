"""Logit bias and the penalties on tokens already present, with counts that can be undone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass

# A bias of +inf means "force". A large finite number does that and keeps the arithmetic free of inf - inf.
_FORCED = np.float32(1e30)


class TokenCounts:
    """How often each token occurs in the prompt and in the reply, as a stack: tokens are pushed and popped in order.

    Only ids that occur take space. Draft positions are evaluated by pushing the draft and undone by popping it.

    Args:
        prompt: token ids of the prompt.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        ids = list(dict.fromkeys(prompt))
        self._slots = {token: slot for slot, token in enumerate(ids)}
        self._prompt_size = len(ids)
        self._size = len(ids)
        capacity = max(64, 2 * len(ids))
        self._ids = np.zeros(capacity, np.int64)
        self._ids[: len(ids)] = ids
        self._counts = np.zeros(capacity, np.float32)
        self._reply: list[int] = []

    def __len__(self) -> int:
        """Tokens of the reply."""
        return len(self._reply)

    @property
    def ids(self) -> NDArray[np.int64]:  # (U,)
        """Ids present in prompt or reply, each once; a view that is valid until the next push or pop."""
        return self._ids[: self._size]

    @property
    def reply_counts(self) -> NDArray[np.float32]:  # (U,)
        """Occurrences in the reply of each of `ids`; a view that is valid until the next push or pop."""
        return self._counts[: self._size]

    def push(self, token: int) -> None:
        """Appends one token to the reply."""
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
        self._reply.append(token)

    def pop(self, count: int = 1) -> None:
        """Removes the last `count` tokens of the reply."""
        assert 0 <= count <= len(self._reply), "popping more tokens than were pushed"
        for _ in range(count):
            token = self._reply.pop()
            slot = self._slots[token]
            self._counts[slot] -= 1
            # Last in, first out: a slot that a push opened is the newest one when that push is undone.
            if slot >= self._prompt_size and self._counts[slot] == 0:
                del self._slots[token]
                self._size -= 1


@dataclass(frozen=True)
class Penalties:
    """What is added to or taken from logits before temperature, in this order: bias, repetition, frequency + presence.

    Attributes:
        repetition: CTRL's factor (Keskar et al. 2019) on tokens of prompt and reply: positive logits are divided
            by it, negative ones multiplied; 1 is none.
        frequency: OpenAI's, taken once per occurrence in the reply.
        presence: OpenAI's, taken once from every token of the reply.
        bias_ids: token ids with a bias. (B,)
        bias: added to the logits of those ids; -inf bans, +inf forces. (B,)
    """

    repetition: float
    frequency: float
    presence: float
    bias_ids: NDArray[np.int64]
    bias: NDArray[np.float32]

    @classmethod
    def from_config(cls, config: GenerationConfig, vocab_size: int) -> Self:
        """The penalties a generation asks for."""
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
        )

    @property
    def counting(self) -> bool:
        """Whether the counts of tokens matter."""
        return self.repetition != 1 or self.frequency != 0 or self.presence != 0

    @property
    def active(self) -> bool:
        """Whether any logit can change."""
        return self.counting or len(self.bias_ids) > 0

    def apply(self, row: NDArray[np.float32], counts: TokenCounts | None) -> None:
        """Changes a row of logits (V,) in place, only at ids that are biased or present.

        Args:
            row: logits. (V,)
            counts: tokens so far; None only where `counting` is false.
        """
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
