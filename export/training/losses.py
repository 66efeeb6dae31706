"""Losses over large vocabularies in pieces, and a target's probabilities recorded on disk to learn from. Of each
distribution the most probable tokens are recorded, and the rest as one sum: a student reads them as often as it likes,
in a fraction of the time that the target takes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from edgeinfer.bundle.writing import new_file
from edgeinfer.core.results import Progress
from edgeinfer.export.training.models import Target, hidden_states
from edgeinfer.export.training.text import TokenFile

# Logits in memory at a time: 64 MB in float32, and as much again for intermediate results.
_MOST_LOGITS = 1 << 24
# Least probability of all tokens that are not recorded.
_TINY = 1e-6
# Recorded tokens of a distribution: they hold all but a few percent of it.
TOP_TOKENS = 16
# Windows that the target reads at a time.
_ROWS = 16


def in_pieces(
    loss: Callable[..., torch.Tensor], vocabulary: int, *rows: torch.Tensor, most: int = _MOST_LOGITS
) -> torch.Tensor:
    """The mean over rows (N, ...) of a loss, computed for rows of `most` logits at a time, and again for its
    gradient."""
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
    """Mean Kullback-Leibler divergence of the student from its teacher, in nats. hidden (N, D), head (V, D), teacher
    (N, T), teacher_head (V', T); where V' differs, the columns of both count."""
    known = min(len(head), len(teacher_head))

    def piece(states: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = torch.log_softmax(taught @ teacher_head[:known].T, -1)  # (n, V)
        guessed = torch.log_softmax(states @ head[:known].T, -1)  # (n, V)
        return F.kl_div(guessed, wanted, reduction="sum", log_target=True)

    return in_pieces(piece, known, hidden, teacher)


def divergence_from_logits(hidden: torch.Tensor, head: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`divergence` from a teacher's logits of the same tokens.  hidden (N, D), head (V, D), logits (N, V)"""

    def piece(states: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        guessed, wanted = torch.log_softmax(states @ head.T, -1), torch.log_softmax(taught, -1)
        return F.kl_div(guessed, wanted, reduction="sum", log_target=True)

    return in_pieces(piece, len(head), hidden, logits)


def taught_divergence(
    hidden: torch.Tensor, head: torch.Tensor, likeliest: torch.Tensor, logs: torch.Tensor
) -> torch.Tensor:
    """`divergence` from recorded distributions: their most probable tokens, and the sum of the others. hidden (N, D),
    head (V, D), likeliest (N, K), logs (N, K)"""

    def piece(states: torch.Tensor, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = states @ head.T  # (n, V)
        guessed = logits.gather(-1, tokens) - torch.logsumexp(logits, -1, keepdim=True)  # (n, K)
        known = wanted.exp()
        rest, guessed_rest = ((1 - part.sum(-1)).clamp(min=_TINY) for part in (known, guessed.exp()))
        return (known * (wanted - guessed)).sum() + (rest * (rest / guessed_rest).log()).sum()

    return in_pieces(piece, len(head), hidden, likeliest, logs)


@dataclass(frozen=True)
class TeacherProbabilities:
    """Windows of tokens with the target's probabilities after each token, mapped into memory."""

    # Tokens; ids and log probabilities of the likeliest next tokens. (n,) of fields (S,), (S, K), (S, K).
    table: NDArray[np.void]
    digest: str  # of the tokens and the target

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, seed: int, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Windows by seed and step: tokens (B, S), ids (B, S, K) and log probabilities (B, S, K)."""
        chosen = self.table[np.sort(np.random.default_rng((seed, step)).integers(0, len(self), rows))]
        ids, likeliest = (torch.from_numpy(chosen[name].astype(np.int64)) for name in ("tokens", "likeliest"))
        return ids, likeliest, torch.from_numpy(chosen["logs"].astype(np.float32))


def teacher_probabilities(
    target: Target, tokens: TokenFile, length: int, work: Path, progress: Progress | None = None
) -> TeacherProbabilities:
    """Records the target's probabilities over consecutive windows, or maps those that a working folder has."""
    tokens.require(length, "The target's text")
    digest = f"{target.digest} {tokens.digest} {length}"
    kind = np.dtype(
        [("tokens", "<u4", length), ("likeliest", "<u4", (length, TOP_TOKENS)), ("logs", "<f2", (length, TOP_TOKENS))]
    )
    path = work / f"probabilities-{hashlib.sha256(digest.encode()).hexdigest()[:16]}.bin"
    if not path.exists():
        with new_file(path) as file:
            for windows in _read(target, tokens, length, kind, progress):
                file.write(windows.tobytes())
    return TeacherProbabilities(np.memmap(path, kind, "r"), digest)


@torch.inference_mode()
def _read(
    target: Target, tokens: TokenFile, length: int, kind: np.dtype[np.void], progress: Progress | None
) -> Iterator[NDArray[np.void]]:
    count = len(tokens) // length
    for start in range(0, count, _ROWS):
        stop = min(start + _ROWS, count)
        found = np.empty(stop - start, kind)
        found["tokens"] = tokens.ids[start * length : stop * length].reshape(-1, length)
        inputs = torch.from_numpy(found["tokens"].astype(np.int64)).to(target.device)
        states = hidden_states(target.model, inputs)  # (b * S, D)
        # A window at a time, so that few logits are in memory.
        for row, part in enumerate(torch.split(states, length)):
            logits = target.model.lm_head(part).float()
            best = torch.topk(logits, min(TOP_TOKENS, logits.shape[-1]))
            found["likeliest"][row] = best.indices.cpu().numpy()
            found["logs"][row] = (best.values - torch.logsumexp(logits, -1, keepdim=True)).cpu().numpy()
        if progress is not None:
            progress("reading with the target", stop, count)
        yield found
