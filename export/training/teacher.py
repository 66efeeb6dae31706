"""What a target thinks likely after every token of its own replies, worked out once and kept on disk.

Of each distribution the likeliest tokens are kept and what is left to all others together: a student reads it as often
as it likes, at a fraction of what the target would take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.bundle import write_file
from edgeinfer.bundle.writing import new_file, storage_errors
from edgeinfer.errors import UsageError
from edgeinfer.export.training.options import Progress
from edgeinfer.export.training.student import hidden_states
from edgeinfer.export.training.target import Target
from edgeinfer.export.training.tokens import TokenFile

__all__ = ["KEPT", "TeacherProbabilities", "teach"]

# Tokens that are kept of a distribution: they hold all but a few percent of it.
KEPT = 16
# Windows that the target reads at a time.
_ROWS = 16
_FILE, _RECORD = "laws.bin", "laws.json"


@dataclass(frozen=True)
class TeacherProbabilities:
    """Windows of tokens with the target's probabilities after each, mapped into memory.

    Attributes:
        table: tokens, ids and log probabilities of the likeliest tokens after them. (n,) of fields (S,), (S, K), (S, K)
        digest: of the tokens and the target.
    """

    table: NDArray[np.void]
    digest: str

    def __len__(self) -> int:
        return len(self.table)

    def batch(self, seed: int, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Windows that the seed and the step decide: tokens (B, S), ids (B, S, K) and log probabilities (B, S, K)."""
        chosen = self.table[np.sort(np.random.default_rng((seed, step)).integers(0, len(self), rows))]
        ids, likeliest = (torch.from_numpy(chosen[name].astype(np.int64)) for name in ("tokens", "likeliest"))
        return ids, likeliest, torch.from_numpy(chosen["logs"].astype(np.float32))


def teach(
    target: Target, tokens: TokenFile, length: int, folder: Path, progress: Progress | None = None
) -> TeacherProbabilities:
    """Has the target read consecutive windows, or takes what it said of them before.

    Raises:
        UsageError: there is not one window, or the folder holds probabilities of something else.
        StorageError: the folder cannot be written, or the disk is full.
    """
    tokens.require(length, "What the target said")
    record = {"target": target.digest, "tokens": tokens.digest, "length": length}
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    kind = np.dtype([("tokens", "<u4", length), ("likeliest", "<u4", (length, KEPT)), ("logs", "<f2", (length, KEPT))])
    path = folder / _FILE
    if path.exists():
        if json.loads((folder / _RECORD).read_text("utf-8")) != record:
            hint = "Give another working folder, or remove this one to start again."
            raise UsageError(f"{folder} holds probabilities of another target or text.", hint)
    else:
        write_file(folder / _RECORD, json.dumps(record).encode())
        with new_file(path) as file:
            for windows in _read(target, tokens, length, kind, progress):
                file.write(windows.tobytes())
    return TeacherProbabilities(np.memmap(path, kind, "r"), f"{target.digest} {tokens.digest} {length}")


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
            best = torch.topk(logits, min(KEPT, logits.shape[-1]))
            found["likeliest"][row] = best.indices.cpu().numpy()
            found["logs"][row] = (best.values - torch.logsumexp(logits, -1, keepdim=True)).cpu().numpy()
        if progress is not None:
            progress("reading with the target", stop, count)
        yield found
