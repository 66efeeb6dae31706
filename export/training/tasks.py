"""What a drafter learns: the next token of given text, then its target's probabilities, recorded once and kept on disk.

Of each distribution the most probable tokens are kept, and the rest as one sum: a student reads them as often as it
likes, at a fraction of the time that the target would take.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgeinfer.bundle.writing import new_file, storage_errors, write_file
from edgeinfer.errors import UsageError
from edgeinfer.export.training.losses import cross_entropy, taught_divergence
from edgeinfer.export.training.models import Target, hidden_states, layer_states
from edgeinfer.export.training.options import DraftTrainOptions
from edgeinfer.export.training.text import TokenFile
from edgeinfer.results import Progress

# Tokens that are kept of a distribution: they hold all but a few percent of it.
TOP_TOKENS = 16
# Windows that the target reads at a time.
_ROWS = 16
# What they are called on disk and in the configuration of a training, so that older working folders are resumed.
_ON_DISK = "laws"


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

    @property
    def facts(self) -> dict[str, str]:
        """What the result of a training on them depends on."""
        return {_ON_DISK: self.digest}

    def batch(self, seed: int, step: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Windows that the seed and the step decide: tokens (B, S), ids (B, S, K) and log probabilities (B, S, K)."""
        chosen = self.table[np.sort(np.random.default_rng((seed, step)).integers(0, len(self), rows))]
        ids, likeliest = (torch.from_numpy(chosen[name].astype(np.int64)) for name in ("tokens", "likeliest"))
        return ids, likeliest, torch.from_numpy(chosen["logs"].astype(np.float32))


def teacher_probabilities(
    target: Target, tokens: TokenFile, length: int, work: Path, progress: Progress | None = None
) -> TeacherProbabilities:
    """Records the target's probabilities over consecutive windows, or maps those that a working folder has."""
    tokens.require(length, "What the target said")
    record = {"target": target.digest, "tokens": tokens.digest, "length": length}
    folder = work / _ON_DISK
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    kind = np.dtype(
        [("tokens", "<u4", length), ("likeliest", "<u4", (length, TOP_TOKENS)), ("logs", "<f2", (length, TOP_TOKENS))]
    )
    path, described = folder / f"{_ON_DISK}.bin", folder / f"{_ON_DISK}.json"
    if path.exists():
        if json.loads(described.read_text("utf-8")) != record:
            hint = "Use another working folder, or remove this one to start over."
            raise UsageError(f"{folder} contains probabilities of another target or text.", hint)
    else:
        write_file(described, json.dumps(record).encode())
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
            best = torch.topk(logits, min(TOP_TOKENS, logits.shape[-1]))
            found["likeliest"][row] = best.indices.cpu().numpy()
            found["logs"][row] = (best.values - torch.logsumexp(logits, -1, keepdim=True)).cpu().numpy()
        if progress is not None:
            progress("reading with the target", stop, count)
        yield found


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

    @staticmethod
    def of(options: DraftTrainOptions) -> Batches:
        """The windows that a drafter's training reads."""
        return Batches(options.seed, options.rows, options.length)

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
        """All parameters of the student."""
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
        self._facts = taught.facts | {"rows": rows} | dict(facts)

    @property
    def configuration(self) -> Mapping[str, Any]:
        """As `Task.configuration`."""
        return self._facts

    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """All parameters of the student."""
        return dict(self._student.named_parameters())

    def loss(self, step: int) -> torch.Tensor:
        """Mean divergence from the target over the tokens of a batch."""
        device = self._student.device
        tokens, likeliest, logs = (part.to(device) for part in self._taught.batch(self._seed, step, self._rows))
        distribution, head = (likeliest.flatten(0, 1), logs.flatten(0, 1)), self._student.lm_head.weight
        found = _states(self._student, tokens, self._nested)
        return torch.stack([taught_divergence(states, head, *distribution) for states in found]).mean()


def _states(student: Any, tokens: torch.Tensor, nested: bool) -> list[torch.Tensor]:
    """The states that learn: the whole student's, or those after each layer. (B, S) -> one or L of (B * S, D)"""
    return layer_states(student, tokens) if nested else [hidden_states(student, tokens)]
