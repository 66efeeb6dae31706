"""Losses over a large vocabulary in pieces, so that few rows of logits are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Logits in memory at a time: 64 MB in float32, and as much again for what is derived from them.
_MOST_LOGITS = 1 << 24
# What is left to tokens that are not known one by one, at least.
_TINY = 1e-6


def in_pieces(
    loss: Callable[..., torch.Tensor], vocabulary: int, *rows: torch.Tensor, most: int = _MOST_LOGITS
) -> torch.Tensor:
    """The mean over rows of a loss that is computed for some of them at a time, and again for its gradient.

    Args:
        vocabulary: columns of the logits that it makes.
        rows: what it takes. (N, ...) each
        most: logits that it may make at a time.
    """
    count = len(rows[0])
    size = max(1, most // vocabulary)
    if size >= count:
        return loss(*rows) / count
    total = torch.zeros((), device=rows[0].device)
    for start in range(0, count, size):
        part = [each[start : start + size] for each in rows]
        total = total + checkpoint(loss, *part, use_reentrant=False, preserve_rng_state=False)
    return total / count


def cross_entropy(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean of -log p(label).  hidden (N, D), head (V, D), labels (N,)"""

    def piece(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(states @ head.T, wanted, reduction="sum")

    return in_pieces(piece, len(head), hidden, labels)


def divergence(
    hidden: torch.Tensor, head: torch.Tensor, teacher: torch.Tensor, teacher_head: torch.Tensor
) -> torch.Tensor:
    """Mean Kullback-Leibler divergence of the student from its teacher, in nats.

    hidden (N, D), head (V, D), teacher (N, T), teacher_head (V', T); where V' differs, the columns of both count.
    """
    known = min(len(head), len(teacher_head))

    def piece(states: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(taught @ teacher_head[:known].T, -1)  # (n, V)
        guessed = torch.log_softmax(states @ head[:known].T, -1)  # (n, V)
        return F.kl_div(guessed, wanted, reduction="sum", log_target=True)

    return in_pieces(piece, known, hidden, teacher)


def divergence_from_logits(hidden: torch.Tensor, head: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """As `divergence`, from a teacher's logits of the same tokens.  hidden (N, D), head (V, D), logits (N, V)"""

    def piece(states: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        guessed, wanted = torch.log_softmax(states @ head.T, -1), torch.log_softmax(taught, -1)
        return F.kl_div(guessed, wanted, reduction="sum", log_target=True)

    return in_pieces(piece, len(head), hidden, logits)


def taught_divergence(
    hidden: torch.Tensor, head: torch.Tensor, likeliest: torch.Tensor, logs: torch.Tensor
) -> torch.Tensor:
    """As `divergence`, from distributions known by their most probable tokens and the sum of the others.

    hidden (N, D), head (V, D), likeliest (N, K), logs (N, K)
    """

    def piece(states: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = states @ head.T  # (n, V)
        guessed = logits.gather(-1, tokens) - torch.logsumexp(logits, -1, keepdim=True)  # (n, K)
        known = wanted.exp()
        rest, guessed_rest = ((1 - part.sum(-1)).clamp(min=_TINY) for part in (known, guessed.exp()))
        return (known * (wanted - guessed)).sum() + (rest * (rest / guessed_rest).log()).sum()

    return in_pieces(piece, len(head), hidden, likeliest, logs)
