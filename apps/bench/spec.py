"""Times speculation against plain decoding, prompt by prompt and in turns; knows nothing of tables or files.

Plain decoding is the same model in the same process with drafting off. Modes take turns on each prompt, so that a
machine that slows down slows all of them; a prompt's figure is the median of its repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.prompts import TokenizedPrompt
from edgeinfer.apps.bench.spec_modes import EdgeInferMode, Generates, LlamaCppMode, Mode, Sampling
from edgeinfer.apps.bench.spec_results import PLAIN, PromptTimes, Reply, Setup
from edgeinfer.apps.bench.timing import rotated
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.results import ModelInfo

__all__ = ["LOOKUPS", "SpecConfig", "describe_setup", "edgeinfer_modes", "llamacpp_modes", "measure"]

# Lengths of llama.cpp's prompt lookup: its binding's default, and what its documentation advises for CPUs.
LOOKUPS = (10, 2)


@dataclass(frozen=True)
class SpecConfig:
    """What is compared.

    Attributes:
        modes: "off", "auto", CONTROL, or drafters joined by "+"; plain decoding is always measured, and comes first.
        sampling: of every reply.
        repeats: replies of each mode to each prompt.
    """

    modes: tuple[str, ...] = (PLAIN, "auto")
    sampling: Sampling = field(default_factory=Sampling)
    repeats: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "modes", tuple(dict.fromkeys((PLAIN, *self.modes))))
        if self.repeats < 1:
            raise UsageError(f"repeats must be at least 1, not {self.repeats}.", "See --help.")
        if self.sampling.max_tokens < 3:
            raise UsageError("Replies of fewer than 3 tokens cannot be timed.", "Ask for more (-n).")


def edgeinfer_modes(model: Generates, config: SpecConfig, skipped: dict[str, str]) -> list[Mode]:
    """The modes of a model, each tried once; those that it cannot run are put in `skipped` with the reason.

    Raises:
        EdgeInferError: plain decoding failed.
    """
    runnable: list[Mode] = []
    # All are made before any is tried: each starts from what drafters know now.
    for mode in [EdgeInferMode(model, name, config.sampling) for name in config.modes]:
        try:
            mode.reply([1])
        except EdgeInferError as error:
            if mode.name == PLAIN:
                raise
            skipped[mode.name] = str(error)
            continue
        runnable.append(mode)
    return runnable


def llamacpp_modes(worker: Worker, config: SpecConfig, stop_ids: Sequence[int]) -> list[Mode]:
    """llama.cpp plainly and with its prompt lookup.

    Raises:
        UsageError: replies are to be drawn at random, which would compare different texts.
    """
    if config.sampling.temperature > 0:
        raise UsageError("llama.cpp is compared at temperature 0 only.", "Leave out --temp or --llamacpp.")
    return [LlamaCppMode(worker, config.sampling, stop_ids, lookup) for lookup in (0, *LOOKUPS)]


def measure(
    prompts: Sequence[TokenizedPrompt],
    modes: Sequence[Mode],
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[PromptTimes]:
    """Replies of every mode to each prompt in turn.

    Args:
        modes: in the order of the tables.
        progress: called with the replies done and their number.
    """
    plain = {mode.name: mode.plain for mode in modes}
    total = len(prompts) * len(modes) * repeats
    done = 0
    for number, item in enumerate(prompts):
        replies: dict[str, list[Reply]] = {mode.name: [] for mode in modes}
        for repeat in range(repeats):
            for mode in rotated(modes, number + repeat):
                if progress:
                    progress(done, total)
                replies[mode.name].append(mode.reply(item.ids))
                done += 1
        for mode in modes:
            mode.learn()
        yield PromptTimes(item, replies, plain)


def describe_setup(info: ModelInfo, threads: int, options: Mapping[str, Any]) -> Setup:
    """What the figures of this process depend on."""
    return Setup(
        threads=threads,
        kernel=info.kernel,
        model=info.name,
        bits_per_weight=info.bits_per_weight,
        options=dict(options),
    )
