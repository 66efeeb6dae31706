"""What all ways of computing less do alike: the first token, a reply's books, its floor; knows not what is left out."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer.adaptive import ComputeOptions, ComputeUse
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.layer_skip.contract import Chooser, Mask, feed, whole_pass
from edgeinfer.runtime.layer_skip.floor import Floor
from edgeinfer.runtime.speculation.skip_costs import BlockCosts

__all__ = ["Steps", "Surroundings"]

# Tokens of the prompt that are tried before anything is left out.
_TRIED = 32


@dataclass(frozen=True)
class Surroundings:
    """What the steps of a reply work with.

    Attributes:
        backend: of the whole model.
        chooser: of the reply's tokens.
        options: what was asked for.
        chunk: most tokens of a pass.
        rows: most logit rows of a pass, as memory was planned for.
        plain_ms: a pass of the whole model over one token, as far as that is known already.
    """

    backend: Backend
    chooser: Chooser
    options: ComputeOptions
    chunk: int
    rows: int
    plain_ms: float | None


@dataclass
class Books:
    """What happened to a reply's tokens after the first."""

    tokens: int = 0
    reduced: int = 0
    caught_up: int = 0
    blocks_skipped: int = 0
    decide_ms: float = 0.0
    ms: float = 0.0


class Steps(ABC):
    """Implements `engine.Multistep`, one token at a time.

    Args:
        given: what it works with.
    """

    def __init__(self, given: Surroundings) -> None:
        self._backend = given.backend
        self._chooser = given.chooser
        self._options = given.options
        self._chunk = given.chunk
        self._plain_ms = given.plain_ms
        # The last row of a pass is the one that counts; samples take the others.
        self._samples = max(1, min(given.rows - 1, 8))
        self._floor = Floor(given.options.quality_floor)
        self._books = Books()
        self._tokens: list[int] = []  # prompt and reply; the last is the root

    def first(self, prompt: Sequence[int], logits: Floats, room: int) -> tuple[int]:  # (V,)
        """The token after a prompt that the whole model took in."""
        token = self._chooser.token(logits, len(prompt))
        self._chooser.accept(token, logits)
        self._tokens[:] = [*prompt, token]
        begun = time.perf_counter()
        self._begin(logits)
        self._books.decide_ms += (time.perf_counter() - begun) * 1e3
        return (token,)

    def next(self, room: int, lost: int) -> tuple[int]:
        """One further token."""
        begun = time.perf_counter()
        logits = self._logits(lost)
        token = self._chooser.token(logits, len(self._tokens))
        self._chooser.accept(token, logits)
        self._tokens.append(token)
        self._books.tokens += 1
        self._chosen(logits)
        self._books.ms += (time.perf_counter() - begun) * 1e3
        return (token,)

    @abstractmethod
    def leave(self) -> None:
        """Rows that the whole model did not make are dropped."""

    @abstractmethod
    def _begin(self, logits: Floats) -> None:  # (V,)
        """Decides what is decided once, after the prompt; from these logits, a view, the first token was chosen."""

    def _try(self, share: float) -> None:
        """Reads the prompt's last tokens in both ways, where a floor is to be kept: if what is left out diverges too
        far there already, nothing is left out of the reply.

        Args:
            share: of the reply's tokens that are expected to be made with less.
        """
        end = self._backend.cache.length
        size = min(_TRIED, end - 1, len(self._tokens) - 2)
        if not self._floor.watching or size < 1:
            return
        tokens, start = self._tokens[-1 - size : -1], end - size
        wanted = sorted({size - 1 - index * size // self._samples for index in range(min(size, self._samples))})
        self._backend.cache.trim(start)
        reduced = self._reduced(tokens, start, wanted)
        self._backend.cache.trim(start)
        trial = Floor(self._floor.nats)
        for index, whole in feed(whole_pass(self._backend), tokens, start, wanted, self._chunk):
            trial.add(whole, reduced.get(index, whole))
        if trial.check(share, 1):
            self._floor.expect(trial)
        else:
            self._floor.refuse()

    @abstractmethod
    def _reduced(self, tokens: Sequence[int], start: int, wanted: Sequence[int]) -> dict[int, Floats]:
        """Copies of what is said behind these of the prompt's last tokens with less; those that would be made in full
        all the same are left out. The cache holds what is before them, and may be written to."""

    @abstractmethod
    def _logits(self, lost: int) -> Floats:  # (V,)
        """After the text's last token; a view that the next pass overwrites."""

    @abstractmethod
    def _chosen(self, logits: Floats) -> None:  # (V,)
        """A token was chosen from these logits and joined the text, so that passes may run again."""

    def _predicted(self, layer_mask: Mask, costs: BlockCosts) -> ComputeUse:
        """What happened so far where reduced tokens run these blocks."""
        ms, whole = costs.ms(layer_mask), costs.ms(np.ones_like(layer_mask))
        use, mask = Steps.use(self), tuple(layer_mask.tolist())
        return dataclasses.replace(use, layer_mask=mask, predicted_ms=ms, predicted_speedup=whole / ms)

    def use(self) -> ComputeUse:
        """What happened so far."""
        books, blocks = self._books, 2 * self._backend.geometry.num_layers
        plain, sampled = self._plain_ms, self._floor.mean
        return ComputeUse(
            compute=self._options.compute,
            lossless=books.reduced == 0,
            tokens=books.tokens,
            reduced=books.reduced,
            skipped_share=books.blocks_skipped / (blocks * books.tokens) if books.tokens else 0.0,
            caught_up=books.caught_up,
            decide_ms=books.decide_ms,
            per_token_ms=books.ms / books.tokens if books.tokens else None,
            plain_ms=plain,
            saved_ms=None if plain is None else plain * books.tokens - books.ms - books.decide_ms,
            divergence=None if sampled is None else sampled * books.reduced / max(books.tokens, 1),
            sampled=self._floor.sampled,
            quality_floor=self._floor.nats,
            stopped_at=self._floor.stopped_at,
        )
