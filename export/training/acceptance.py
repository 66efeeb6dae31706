"""How often a target takes a student's guesses, by the laws of both over text; knows nothing of engines or costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.export.training.depths import layer_states
from edgeinfer.export.training.student import hidden_states

__all__ = ["Acceptance", "measure_acceptance", "run_lengths"]

# Windows that are read at a time, so that few logits are in memory.
_ROWS = 4
_DRAFTED = 4


@dataclass(frozen=True)
class Acceptance:
    """What a student's guesses are worth.

    Attributes:
        agreement: share of tokens at which both find the same token likeliest: the acceptance of greedy drafts.
        overlap: sum over tokens of the lesser of the two probabilities: the acceptance of drawn drafts.
        mean_accepted_length: tokens per round with four drafted, by runs of agreement.
        divergence: mean Kullback-Leibler divergence from the target, in nats.
    """

    agreement: float
    overlap: float
    mean_accepted_length: float
    divergence: float


@torch.inference_mode()
def measure_acceptance(
    student: Any, target: Any, windows: NDArray[np.int64], depth: int | None = None
) -> Acceptance:  # (n, S)
    """Reads windows with both; with so many layers of the student, or all."""
    device = target.device
    agreed: list[NDArray[np.bool_]] = []
    overlaps, divergences = [], []
    for start in range(0, len(windows), _ROWS):
        tokens = torch.from_numpy(windows[start : start + _ROWS]).to(device)  # (b, S)
        theirs = torch.log_softmax(target.lm_head(hidden_states(target, tokens)).float(), -1)  # (b * S, V)
        states = hidden_states(student, tokens) if depth is None else layer_states(student, tokens)[depth - 1]
        ours = torch.log_softmax(student.lm_head(states).float(), -1)
        agreed.append((ours.argmax(-1) == theirs.argmax(-1)).reshape(tokens.shape).cpu().numpy())
        overlaps.append(float(torch.minimum(ours, theirs).exp().sum(-1).mean()))
        divergences.append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
    matches = np.concatenate(agreed)  # (n, S)
    lengths = [1 + length for row in matches for length in run_lengths(row, _DRAFTED)]
    return Acceptance(
        float(matches.mean()), float(np.mean(overlaps)), float(np.mean(lengths)), float(np.mean(divergences))
    )


def run_lengths(matches: NDArray[np.bool_], drafted: int) -> list[int]:  # (S,)
    """Accepted tokens of each round, where rounds follow one another and draft so many tokens."""
    found, at = [], 0
    while at + drafted < len(matches):
        run = 0
        while run < drafted and matches[at + run]:
            run += 1
        found.append(run)
        at += run + 1
    return found
