"""Chooses the size of drafter that pays most for a target on a device, from measured costs; needs no torch.

A round with g drafted tokens takes g passes of the drafter and one of the target over g + 1 tokens, and commits
(1 - a^(g+1)) / (1 - a) tokens where each is accepted with probability a. What a larger drafter gains in a it loses in
passes: wide and shallow ones win, as a layer costs a fixed time besides its weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edgeinfer.errors import UsageError

_HEAD_DIM = 32
_WIDTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)
_LAYERS = (1, 2)
_MOST_DRAFTED = 15
# Acceptance rates that drafters of a share of the target's weights reach: FastDraft's and the like of published
# pairs lie between, from 0.4 at a thousandth to 0.8 at a third. A second layer is worth what doubling is.
_AT_EQUAL, _PER_HALVING, _LEAST = 0.86, 0.045, 0.2


@dataclass(frozen=True)
class StudentSize:
    """Sizes of a Llama with tied embeddings.

    Attributes:
        width: hidden size, a multiple of 32.
        inner: of the MLP.
    """

    width: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int = _HEAD_DIM

    def __post_init__(self) -> None:
        fits = self.width > 0 and self.width % 32 == 0 and self.layers > 0 and self.inner > 0
        fits = fits and self.heads > 0 and self.kv_heads > 0 and self.heads % self.kv_heads == 0
        if not fits:
            hint = "Use a width that is a multiple of 32 and at least 1 layer, such as 128x1."
            raise UsageError(f"A drafter of width {self.width} with {self.layers} layers is not supported.", hint)

    @classmethod
    def of(cls, width: int, layers: int) -> StudentSize:
        """The usual proportions: heads of 32, two to a key head where that goes, an MLP three times as wide."""
        heads = max(1, width // _HEAD_DIM)
        return cls(width, layers, 3 * width, heads, heads // 2 if heads % 2 == 0 else heads)

    @classmethod
    def parse(cls, text: str) -> StudentSize:
        """Width and layers, as 128x1."""
        width, _, layers = text.partition("x")
        if not (width.isdecimal() and layers.isdecimal()):
            raise UsageError(f"{text!r} is not a drafter size.", "Write width and layers like 128x1.")
        return cls.of(int(width), int(layers))

    def weights(self, vocabulary: int) -> int:
        """Parameters that a pass reads."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return vocabulary * self.width + self.layers * (attention + 3 * self.width * self.inner)


@dataclass(frozen=True)
class TargetCosts:
    """What passes of the target cost on a device.

    Attributes:
        target_ms: milliseconds of a pass of the target by its rows, 1 among them.
        target_weights: parameters of the target that a pass reads.
        target_layers: of the target.
        call_ms: of any pass of any model, before its first layer.
        layer_ms: of any layer besides its weights.
    """

    target_ms: Mapping[int, float]
    target_weights: int
    target_layers: int
    call_ms: float = 0.06
    layer_ms: float = 0.025

    def __post_init__(self) -> None:
        if 1 not in self.target_ms or not all(0 < ms < math.inf for ms in self.target_ms.values()):
            raise UsageError(
                "The costs of the target's passes were not measured.", "Measure a pass of one row at least."
            )

    def verify_ms(self, rows: int) -> float:
        """A pass over so many rows, on a straight line between those that were measured."""
        known = sorted(self.target_ms)
        if rows >= known[-1]:
            return self.target_ms[known[-1]] * rows / known[-1]
        above = next(m for m in known if m >= rows)
        below = max(m for m in known if m <= rows)
        share = 0.0 if above == below else (rows - below) / (above - below)
        return self.target_ms[below] * (1 - share) + self.target_ms[above] * share

    def draft_ms(self, size: StudentSize, vocabulary: int) -> float:
        """A pass of a drafter: its weights are read as fast as the target's."""
        fixed = self.call_ms + self.layer_ms * self.target_layers
        reading = max(self.target_ms[1] - fixed, 0.1 * self.target_ms[1]) / self.target_weights
        return self.call_ms + self.layer_ms * size.layers + reading * size.weights(vocabulary)


@dataclass(frozen=True)
class SizeChoice:
    """The chosen size, and why.

    Attributes:
        drafted: tokens of a draft that are best.
        speedup: that is predicted, by an assumed acceptance.
    """

    size: StudentSize
    acceptance: float
    drafted: int
    draft_ms: float
    speedup: float


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Tokens that a round commits: 1 + a + ... + a^g."""
    return sum(acceptance**i for i in range(drafted + 1))


def acceptance_guess(size: StudentSize, vocabulary: int, target_weights: int) -> float:
    """The acceptance rate that a drafter of this size may reach once it is trained."""
    halvings = max(0.0, math.log2(target_weights / size.weights(vocabulary)) + 1 - math.log2(size.layers + 1))
    return max(_LEAST, _AT_EQUAL - _PER_HALVING * halvings)


def choose_size(costs: TargetCosts, vocabulary: int) -> SizeChoice:
    """The size of the highest predicted speed-up; among equals the smallest."""
    sizes = [StudentSize.of(width, layers) for width in _WIDTHS for layers in _LAYERS]
    choices = [_judge(size, costs, vocabulary) for size in sizes]
    return max(choices, key=lambda choice: (choice.speedup, -choice.size.weights(vocabulary)))


def _judge(size: StudentSize, costs: TargetCosts, vocabulary: int) -> SizeChoice:
    acceptance = acceptance_guess(size, vocabulary, costs.target_weights)
    draft_ms = costs.draft_ms(size, vocabulary)

    def speedup(drafted: int) -> float:
        round_ms = drafted * draft_ms + costs.verify_ms(drafted + 1)
        return expected_tokens(acceptance, drafted) * costs.target_ms[1] / round_ms

    best = max(range(1, _MOST_DRAFTED + 1), key=speedup)
    return SizeChoice(size, acceptance, best, draft_ms, speedup(best))
