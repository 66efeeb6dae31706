"""What policies of reduced compute promise: sets of layers decided after the prompt, and models that take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from edgeinfer.records import dataclass
from edgeinfer.runtime.arrays import Floats, Ints
from edgeinfer.runtime.backends.contract import Backend, ForwardInput
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts

Mask = NDArray[np.bool_]  # (2 L,), [2i] attention and [2i+1] MLP of layer i


@dataclass(frozen=True)
class SpeedTarget:
    """What a set of layers is chosen for.

    Attributes:
        speedup: of a pass, over the whole model's.
        costs: of the blocks here.
    """

    speedup: float
    costs: BlockCosts

    def reached(self, mask: Mask) -> bool:
        """Whether passes of these blocks are that fast."""
        whole = self.costs.ms(np.ones_like(mask))
        # Sums of floats: what is equal on paper counts as reached.
        return self.costs.ms(mask) * self.speedup <= whole * (1 + 1e-9)


class EvaluatedPrompt(Protocol):
    """A prompt that the whole model evaluated, as policies may look at it."""

    @property
    def layers(self) -> int:
        """The number of layers, L."""

    def states(self) -> Floats:
        """Hidden states of its last tokens: those entering each layer, then those leaving the last. (L + 1, S, D)"""


class SkipPolicy(Protocol):
    """Decides once per reply what runs for its tokens.

    Attributes:
        reads_states: of the prompt, which its passes then keep.
    """

    reads_states: ClassVar[bool]

    def mask(self, prompt: EvaluatedPrompt, wanted: SpeedTarget) -> Mask:
        """Chooses the blocks that run."""


class SmallModel(Protocol):
    """A small model with a cache of its own, which evaluates of a growing text what it has not seen yet."""

    def begin(self, tokens: Sequence[int]) -> None:
        """Starts with a text; what its cache shares with it stays."""

    def after(self, tokens: Sequence[int]) -> Floats | None:  # (V,)
        """Logits after a text that has only grown since `begin`, a view; None where it does not fit the cache."""

    def behind(self, tokens: Sequence[int], count: int) -> list[Floats] | None:
        """Copies of the logits (V,) after each of the last tokens of such a text; None where it does not fit."""


class SwitchPolicy(Protocol):
    """Decides token by token which of two models makes it."""

    def seen(self, entropy: float) -> None:
        """A token was predicted with so many bits of entropy, by whichever model made it."""

    def large(self) -> bool:
        """Whether the large model makes the next token."""


def feed(
    run: Callable[[Ints, Ints, Ints], Floats], tokens: Sequence[int], start: int, wanted: Sequence[int], chunk: int
) -> Iterator[tuple[int, Floats]]:
    """Feeds tokens from row `start` on, chunk by chunk, and yields the logits (V,) after those of these indices.

    Args:
        run: a pass: tokens (S,), positions (S,), rows (R,) -> logits (R, V).
        wanted: indices into the tokens, ascending.
    """
    for at in range(0, len(tokens), chunk):
        size = min(chunk, len(tokens) - at)
        rows = [index - at for index in wanted if at <= index < at + size]
        logits = run(np.array(tokens[at : at + size], np.int64), start + at + np.arange(size), np.array(rows, np.int64))
        yield from ((at + row, each) for row, each in zip(rows, logits, strict=True))


def whole_pass(backend: Backend) -> Callable[[Ints, Ints, Ints], Floats]:
    """Passes of the whole model, as `feed` takes them."""
    return lambda tokens, positions, rows: backend.forward(ForwardInput(tokens, positions, rows)).logits
