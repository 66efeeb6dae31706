"""Runs loaded models for the training of their drafters: replies to learn from, and what a drafter brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api import load
from edgeinfer.core.errors import NativeUnavailableError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.model import Model
from edgeinfer.runtime.native.library import native_kernel

Progress = Callable[[str, int, int], None]

# What is compared takes turns so many times, as other programs may want the processor too.
_TURNS = 3


@dataclass(frozen=True)
class ModelReplier:
    """Draws replies of a loaded model, one after the other."""

    model: Model
    name: str = "edgeinfer"

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its reply."""
        return self.model.context

    def replies(
        self, prompts: Sequence[NDArray[np.int64]], temperatures: Sequence[float], most: int, seed: int
    ) -> list[list[int]]:
        """A reply to each prompt, its end included; the same seed gives the same."""
        found = []
        for index, (prompt, heat) in enumerate(zip(prompts, temperatures, strict=True)):
            room = min(most, self.context - len(prompt))
            drawn = self.model.generate(
                prompt.tolist(), max_tokens=room, temperature=heat, seed=seed * 4096 + index, speculation="off"
            )
            found.append([*drawn.token_ids])
        return found


@dataclass(frozen=True)
class DraftFigures:
    """What drafting did to greedy replies."""

    acceptance_rate: float  # accepted tokens by drafted ones, of the drafter alone
    mean_accepted_length: float  # tokens committed per pass of the target, of the drafter alone
    tokens_per_second: float  # of replies that it alone drafted, as the controller lets it
    plain_tokens_per_second: float  # without drafting
    speedup: float  # median over prompts of how many times faster it was


def measure_drafter(
    target: str | Path | None,
    drafter: str | Path | None,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int = 96,
    who: str = "model",
    progress: Progress | None = None,
    **options: Any,
) -> DraftFigures:
    """Compares drafting for a target, by its bundle's own drafter if none is given, with plain decoding, in turns."""
    if not prompts:
        raise UsageError("There are no prompts to measure with.", "Give more text.")
    drafted = accepted = rounds = made = 0
    speeds: list[tuple[float, float]] = []
    kept = {"remember": False} | options
    with load(target, draft_model=drafter, speculation=who, **kept) as model:
        for index, prompt in enumerate(prompts):
            if progress is not None:
                progress("measuring", index, len(prompts))
            pair = []
            for mode in ("off", who):
                times = []
                for _ in range(_TURNS):
                    result = model.generate(prompt, max_tokens=tokens, temperature=0.0, speculation=mode)
                    times.append(result.timings.tokens_per_second)
                pair.append(max(times))
            use = result.speculation
            drafted, accepted, rounds = drafted + use.drafted, accepted + use.accepted, rounds + use.rounds
            made += len(result.token_ids)
            speeds.append((pair[0], pair[1]))
    return DraftFigures(
        accepted / drafted if drafted else 0.0,
        made / rounds if rounds else 1.0,
        median(fast for _, fast in speeds),
        median(plain for plain, _ in speeds),
        median(fast / plain for plain, fast in speeds),
    )


def require_native() -> None:
    """Refuses a device on which drafters that read a model's states do not run."""
    try:
        native_kernel()
    except NativeUnavailableError as error:
        message = f"A drafter that reads a model's states needs the native kernel. {error.message}"
        raise UsageError(message, error.hint) from error
