"""What a drafter learns: the next token of given text, then the probabilities of its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from edgeinfer.export.training.losses import cross_entropy, layer_states, taught_divergence
from edgeinfer.export.training.student import hidden_states
from edgeinfer.export.training.teacher import TeacherProbabilities
from edgeinfer.export.training.tokens import TokenFile

__all__ = ["Batches", "TeacherTask", "TextTask"]


@dataclass(frozen=True)
class Batches:
    """Windows of tokens that steps draw.

    Attributes:
        rows: windows of a step.
        length: tokens of a window.
    """

    seed: int
    rows: int
    length: int

    def draw(self, tokens: TokenFile, step: int, extra: int, device: torch.device) -> torch.Tensor:
        """The windows of a step, with `extra` more tokens each. (rows, length + extra)"""
        return torch.from_numpy(tokens.batch(self.seed, step, self.rows, self.length + extra)).to(device)

    @property
    def facts(self) -> dict[str, Any]:
        """What the result depends on."""
        return {"rows": self.rows, "length": self.length}


class TextTask:
    """Next tokens of given text. Implements `trainer.Task`.

    Args:
        nested: every depth of the student learns, and not the whole alone (S2D's sorted training).
    """

    name = "reading"

    def __init__(
        self, student: Any, tokens: TokenFile, batches: Batches, facts: Mapping[str, Any], *, nested: bool = False
    ) -> None:
        tokens.require(batches.length + 1, "The text")
        self._student, self._tokens, self._batches, self._nested = student, tokens, batches, nested
        self._facts = {"text": tokens.digest} | batches.facts | dict(facts)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        return self._facts

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """All of the student's."""
        return dict(self._student.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """Mean of -log p of the tokens of a batch."""
        batch = self._batches.draw(self._tokens, step, 1, self._student.device)  # (B, S + 1)
        found = _states(self._student, batch[:, :-1], self._nested)
        losses = [cross_entropy(states, self._student.lm_head.weight, batch[:, 1:].flatten()) for states in found]
        return torch.stack(losses).mean()


class TeacherTask:
    """Learns a target's probabilities at every token of its own replies; `nested` as TextTask."""

    name = "distilling"

    def __init__(
        self,
        student: Any,
        taught: TeacherProbabilities,
        seed: int,
        rows: int,
        facts: Mapping[str, Any],
        *,
        nested: bool = False,
    ) -> None:
        self._student, self._taught, self._seed, self._rows, self._nested = student, taught, seed, rows, nested
        self._facts = {"laws": taught.digest, "rows": rows} | dict(facts)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        return self._facts

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """All of the student's."""
        return dict(self._student.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """Mean divergence from the target over the tokens of a batch."""
        device = self._student.device
        tokens, likeliest, logs = (part.to(device) for part in self._taught.batch(self._seed, step, self._rows))
        distribution, head = (likeliest.flatten(0, 1), logs.flatten(0, 1)), self._student.lm_head.weight
        found = _states(self._student, tokens, self._nested)
        return torch.stack([taught_divergence(states, head, *distribution) for states in found]).mean()


def _states(student: Any, tokens: torch.Tensor, nested: bool) -> list[torch.Tensor]:
    """What learns: the states of the whole student, or after each of its layers. (B, S) -> one or L of (B * S, D)"""
    return layer_states(student, tokens) if nested else [hidden_states(student, tokens)]
