"""A whole speculation benchmark: makes the model files, loads the model, asks every prompt; prints nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import psutil

import edgeinfer
from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.model_files import BundleKind, TrainedArtifacts, default_folder
from edgeinfer.apps.bench.prompts import Prompt, builtin_prompts, load_prompts, tokenize_prompts
from edgeinfer.apps.bench.spec import SpecConfig, describe_setup, edgeinfer_modes, llamacpp_modes, measure
from edgeinfer.apps.bench.spec_modes import Learns, Mode
from edgeinfer.apps.bench.spec_results import PromptTimes, SpecResults
from edgeinfer.apps.bench.synthetic import find_shape
from edgeinfer.errors import CheckpointError, UsageError

__all__ = ["EXPANDED_SHAPE", "SpecOptions", "run_spec"]

EXPANDED_SHAPE = "qwen2.5-0.5b"
# llama.cpp rounds contexts up to multiples of this.
_LLAMACPP_CONTEXT = 256

Load = Callable[[str | None, Mapping[str, Any]], edgeinfer.Model]


@dataclass(frozen=True)
class SpecOptions:
    """What to benchmark.

    Attributes:
        config: modes, replies and repeats.
        model: bundle or hub id; None is the built-in model, or what `expand` makes.
        load: options of `edgeinfer.load`.
        data: folder of data sets; None takes the built-in prompts.
        per_category: prompts of each category at most.
        warm_up: further prompts of each category that are answered first, so that drafters have learnt from some texts;
            they are not timed.
        categories: only these, or of these sources; None is all.
        checkpoint: a small Llama checkpoint, which `expand` and `llamacpp` need.
        expand: benchmark the checkpoint cost-expanded to this shape.
        bits: of the bundle that `expand` makes.
        llamacpp: measure llama.cpp too, on the checkpoint (expanded or not) in Q4_0.
        work: where model files are kept.
        rebuild: export the bundle again.
    """

    config: SpecConfig = field(default_factory=SpecConfig)
    model: str | None = None
    load: Mapping[str, Any] = field(default_factory=dict)
    data: Path | None = None
    per_category: int = 4
    warm_up: int = 0
    categories: tuple[str, ...] | None = None
    checkpoint: Path | None = None
    expand: str | None = None
    bits: int = 4
    llamacpp: bool = False
    work: Path = field(default_factory=default_folder)
    rebuild: bool = False

    def __post_init__(self) -> None:
        if self.per_category < 1:
            raise UsageError(f"per_category must be at least 1, not {self.per_category}.", "See --help.")
        if self.warm_up < 0:
            raise UsageError(f"warm_up must be 0 or more, not {self.warm_up}.", "See --help.")
        if self.expand and self.model:
            raise UsageError("A bundle cannot be expanded.", "Give a checkpoint with --checkpoint, and no -m.")
        if (self.expand or self.llamacpp) and self.checkpoint is None:
            raise UsageError("--expand and --llamacpp need a checkpoint.", "Name a small Llama one with --checkpoint.")
        if self.llamacpp and (missing := [name for name in ("llama_cpp", "gguf") if find_spec(name) is None]):
            message = f"{' and '.join(missing)} not installed."
            raise UsageError(message, "Install the gguf extra: edgeinfer[gguf].")

    def artifacts(self) -> TrainedArtifacts | None:
        """Files made of the checkpoint; None where there is none."""
        if self.checkpoint is None:
            return None
        shape = find_shape(self.expand) if self.expand else None
        return TrainedArtifacts(self.work, self.checkpoint, shape, rebuild=self.rebuild)

    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Of the data sets, or the built-in ones: those that are timed, and those to warm up with."""
        count = self.per_category + self.warm_up
        if self.data is None:
            found = builtin_prompts(count, self.categories)
        else:
            found = load_prompts(self.data, count, categories=self.categories)
        timed: list[Prompt] = []
        warming: list[Prompt] = []
        for _, of_category in groupby(found, key=lambda prompt: prompt.category):
            prompts = list(of_category)
            timed += prompts[: self.per_category]
            warming += prompts[self.per_category :]
        return timed, warming


def run_spec(
    options: SpecOptions, load: Load, progress: Callable[[str, int, int], None] | None = None
) -> tuple[SpecResults, bool]:
    """Measures; an interrupt ends it early with the prompts that are done. Whether it came to its end is returned too.

    Args:
        load: loads a model, as `edgeinfer.load`.
        progress: called with a stage, replies done and replies in all.

    Raises:
        EdgeInferError: files cannot be made, the model cannot be loaded, or it failed.
        KeyboardInterrupt: before the first prompt was done.
    """
    prompts, warming = options.prompts()
    artifacts = options.artifacts()
    bundle = str(artifacts.bundle(BundleKind(bits=options.bits))) if artifacts and options.expand else options.model
    config, skipped = options.config, dict[str, str]()
    # What earlier sessions learnt would be an advantage that nobody can repeat.
    loading = {"remember": False, **options.load}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(load(bundle, loading))
        items = tokenize_prompts(model, prompts, config.sampling.max_tokens)
        threads = loading.get("threads") or psutil.cpu_count(logical=False) or 1
        modes: list[Mode] = edgeinfer_modes(model, config, skipped)
        if artifacts and options.llamacpp:
            context = -(-model.context // _LLAMACPP_CONTEXT) * _LLAMACPP_CONTEXT
            arguments = {"path": str(artifacts.gguf()), "threads": threads, "context": context}
            worker = stack.enter_context(Worker("llamacpp", arguments))
            modes += llamacpp_modes(worker, config, _stop_ids(artifacts.checkpoint()))
        recorded = {**loading, **asdict(config.sampling), "repeats": config.repeats, "expand": options.expand}
        recorded["warm_up"] = len(warming)
        for item in tokenize_prompts(model, warming, config.sampling.max_tokens):
            for mode in modes:
                if mode.learns:
                    mode.reply(item.ids)
                    mode.learn()
        setup = describe_setup(model.info, threads, recorded)
        done: list[PromptTimes] = []
        finished = True
        try:
            told = None if progress is None else _stage(progress)
            for times in measure(items, modes, config.repeats, told):
                done.append(times)
        except KeyboardInterrupt:
            if not done:
                raise
            finished = False
        names = tuple(mode.name for mode in modes)
        return SpecResults(setup, names, tuple(done), isinstance(model, Learns), skipped), finished


def _stage(progress: Callable[[str, int, int], None]) -> Callable[[int, int], None]:
    return lambda done, total: progress("replies", done, total)


def _stop_ids(checkpoint: Path) -> list[int]:
    """Tokens that end a reply, as the checkpoint's generation_config.json has them.

    Raises:
        CheckpointError: it cannot be read.
    """
    path = checkpoint / "generation_config.json"
    try:
        ends = json.loads(path.read_text("utf-8")).get("eos_token_id", [])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.", "Give a complete checkpoint.") from error
    return list(ends) if isinstance(ends, list) else [int(ends)]
