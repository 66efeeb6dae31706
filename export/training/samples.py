"""Text, prompts and a target's own replies to learn from; replies are written to disk as they are drawn."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from edgeinfer.bundle.writing import storage_errors
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options import require
from edgeinfer.core.results import Progress
from edgeinfer.export.training.models import Target
from edgeinfer.export.training.text import TextSource, TokenFile, open_tokens, write_tokens

Ints = NDArray[np.int64]
# Most prompts of a text, and one in so many that is set aside for validation.
_PROMPTS, _KEPT = 4000, 20


@dataclass(frozen=True)
class TrainingText:
    tokens: TokenFile
    asked: list[Ints]  # prompts to sample replies to. (n,) each
    kept: list[Ints]  # other prompts, for measuring on an engine; the same ones where there are few. (n,) each


def open_text(text: TextSource, work: Path, length: int, threads: int | None) -> TrainingText:
    """Tokenises a text into a working folder, which is made."""
    if threads is not None:
        torch.set_num_threads(threads)
    with storage_errors(work):
        work.mkdir(parents=True, exist_ok=True)
    tokens = text.tokens(work)
    tokens.require(4 * length, "The text")
    prompts = text.prompts(_PROMPTS)
    return TrainingText(tokens, [p for i, p in enumerate(prompts) if i % _KEPT], prompts[::_KEPT] or prompts)


@dataclass(frozen=True)
class SampleOptions:
    tokens: int  # least number in all
    length: int = 256  # most tokens of a reply
    rows: int = 96  # replies drawn at a time
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)  # used in turn; 0 takes the most likely token
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "length", "rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        fits = bool(self.temperatures) and all(0 <= t <= 10 for t in self.temperatures)
        require(fits, "temperatures", self.temperatures, "one or more, from 0 to 10")


class Replier(Protocol):
    """Draws replies of a target."""

    @property
    def name(self) -> str:
        """Its name in the record of the samples."""

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its reply."""

    def replies(
        self, prompts: Sequence[Ints], temperatures: Sequence[float], most: int, seed: int
    ) -> Sequence[Sequence[int]]:
        """A reply to each prompt, end token included; the same seed gives the same replies."""


def sample(
    replier: Replier,
    prompts: Sequence[Ints],
    options: SampleOptions,
    folder: Path,
    digest: str,
    progress: Progress | None = None,
) -> TokenFile:
    """Samples replies to prompts into a file, each after its prompt; resumes a sampling with the same options."""
    if not prompts:
        raise UsageError("There are no prompts to sample from.", "Give more text.")
    record = {"target": digest, "by": replier.name, "prompts": _digest(prompts)} | asdict(options)
    name = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.u32"
    if path.exists():
        return open_tokens(path)
    done, batch, written = 0, 0, []
    while done < options.tokens:
        file = folder / f"{name}-{batch}.u32"
        tokens = open_tokens(file) if file.exists() else write_tokens(file, _batch(replier, prompts, options, batch))
        written.append(file)
        done, batch = done + len(tokens), batch + 1
        if progress is not None:
            progress("sampling the target", min(done, options.tokens), options.tokens)
    joined = write_tokens(path, (open_tokens(file).ids for file in written))
    for file in written:
        file.unlink()
    return joined


def _digest(prompts: Sequence[Ints]) -> str:
    return hashlib.sha256(b"".join(prompt.astype("<u4").tobytes() + b"|" for prompt in prompts)).hexdigest()


def _batch(replier: Replier, prompts: Sequence[Ints], options: SampleOptions, batch: int) -> Iterator[Ints]:
    count = min(options.rows, len(prompts))
    chosen = [prompts[(batch * count + row) % len(prompts)][: replier.context - 1] for row in range(count)]
    heat = [options.temperatures[(batch + row) % len(options.temperatures)] for row in range(count)]
    replies = replier.replies(chosen, heat, options.length, options.seed * 1_000_003 + batch)
    return (np.concatenate([p, np.array(reply, np.int64)]) for p, reply in zip(chosen, replies, strict=True))


@dataclass(frozen=True)
class TorchReplier:
    """Draws replies with a target's float weights, many at a time. Implements `Replier`."""

    target: Target
    name: str = "torch"

    @property
    def context(self) -> int:
        return int(self.target.config.max_position_embeddings)

    def replies(self, prompts: Sequence[Ints], temperatures: Sequence[float], most: int, seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        room = self.context - max(map(len, prompts))
        return _Replies(self.target, prompts, torch.tensor(temperatures), generator).draw(min(most, room))


class _Replies:
    """Replies drawn together, one row each; finished rows are removed. Prompts are padded in front, so that all rows
    end at the same column."""

    def __init__(
        self, target: Target, prompts: Sequence[Ints], heat: torch.Tensor, generator: torch.Generator
    ) -> None:  # heat (B,)
        self._target, self._heat, self._generator = target, heat, generator
        width = max(map(len, prompts))
        self._ids = torch.zeros((len(prompts), width), dtype=torch.int64)
        self._seen = torch.zeros((len(prompts), width), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            self._ids[row, width - len(prompt) :] = torch.from_numpy(prompt)
            self._seen[row, width - len(prompt) :] = 1

    @torch.inference_mode()
    def draw(self, most: int) -> list[list[int]]:
        """The reply of each row, end token included."""
        replies: list[list[int]] = [[] for _ in self._ids]
        alive = torch.arange(len(replies))
        device, cache = self._target.device, DynamicCache()
        # transformers 5.24 gave it another name.
        renamed = "cache" in inspect.signature(self._target.model.model.forward).parameters
        cached = {"cache" if renamed else "past_key_values": cache}
        inputs, seen, heat = self._ids, self._seen, self._heat
        positions = (seen.cumsum(-1) - 1).clamp(min=0)
        for _ in range(most):
            states = self._target.model.model(
                inputs.to(device),
                attention_mask=seen.to(device),
                position_ids=positions.to(device),
                use_cache=True,
                **cached,
            ).last_hidden_state[:, -1]
            tokens = self._choose(self._target.logits(states).cpu(), heat)  # (b,)
            for row, token in zip(alive.tolist(), tokens.tolist(), strict=True):
                replies[row].append(token)
            going = torch.tensor([token not in self._target.ends for token in tokens.tolist()])
            if not going.any():
                break
            if not going.all():
                kept = going.nonzero().flatten()
                cache.batch_select_indices(kept.to(device))
                alive, tokens, seen, heat, positions = (each[kept] for each in (alive, tokens, seen, heat, positions))
            inputs, positions = tokens[:, None], positions[:, -1:] + 1
            seen = torch.cat([seen, torch.ones((len(seen), 1), dtype=seen.dtype)], 1)
        return replies

    def _choose(self, logits: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:  # (b, V), (b,) -> (b,)
        probabilities = torch.softmax(logits / heat.clamp(min=1e-3)[:, None], -1)
        drawn = torch.multinomial(probabilities, 1, generator=self._generator).flatten()
        return torch.where(heat > 0, drawn, logits.argmax(-1))
