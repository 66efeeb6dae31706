"""`edgeinfer bench spec`: speculation against plain decoding, on the same prompts, model and process, in turns."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, option
from edgeinfer.apps.bench.driver import Worker
from edgeinfer.apps.bench.grid import grid_prompts
from edgeinfer.apps.bench.model_files import BundleKind, TrainedArtifacts, default_folder
from edgeinfer.apps.bench.prompts import (
    Prompt,
    TokenizedPrompt,
    Tokenizes,
    builtin_prompts,
    load_prompts,
    tokenize_prompts,
)
from edgeinfer.apps.bench.spec_modes import (
    LearningModel,
    Learns,
    Mode,
    ReplySettings,
    SpecConfig,
    edgeinfer_modes,
    llamacpp_modes,
    measure,
)
from edgeinfer.apps.bench.spec_results import CONTROL, PLAIN, PromptTimes, SpecResults, SpecSetup, spec_section
from edgeinfer.apps.bench.synthetic import find_shape
from edgeinfer.errors import CheckpointError, UsageError
from edgeinfer.methods import find_method

# llama.cpp rounds contexts up to multiples of this.
_LLAMACPP_CONTEXT = 256
_WIDTHS = tuple(map(str, range(1, 9)))
_WORK, _FILES = "workload", "cost-expanded model and llama.cpp"
_DESCRIPTION = """\
Compare speculation with plain decoding: the same prompts, model and process, mode after mode in turns.

examples:
  edgeinfer bench spec --modes off,copy,copy+recycle,auto -t 1
  edgeinfer bench spec --data DATA --per-category 10 --json spec.json
  edgeinfer bench spec --checkpoint CHECKPOINT --expand --llamacpp -t 1

With --expand the figures are those of a cost-expanded model: a small trained checkpoint at the sizes of a larger one.
"""


@dataclass(frozen=True)
class SpecOptions:
    """What to benchmark.

    Attributes:
        warm_up: these are answered first, so that drafters have learnt from some texts; they are not timed.
        categories: names of categories or of their sources; None is all.
        lengths: of prompts in tokens, for a grid of lengths by entropy in place of the categories; empty has none.
        expand: shape to which the checkpoint is cost-expanded.
        work: where model files are kept; None is the usual folder.
        rebuild: whether the bundle is exported again.
    """

    modes: tuple[str, ...] = option(
        "--modes LIST",
        default=(PLAIN, "auto"),
        group=_WORK,
        help="comma-separated modes: off, auto, or drafters joined by +; off is always measured",
    )
    control: bool = option("--control", rare=True, default=False, help="measure off twice, to show the noise")
    data: Path | None = option(
        "--data PATH",
        default=None,
        help="folder with tales_dialogues/, mtbench/, specbench/, gsm8k/, summarization/ "
        "(default: a dozen built-in prompts)",
    )
    categories: tuple[str, ...] | None = option(
        "--categories LIST", rare=True, default=None, help="categories or sources to use, such as tales/retell,gsm8k"
    )
    lengths: tuple[str, ...] = option(
        "--lengths LIST",
        rare=True,
        default=(),
        help="comma-separated prompt lengths in tokens: measure each with prompts of low, mixed and high entropy, "
        "instead of by category (as SPEED-Bench does)",
    )
    per_category: int = option("--per-category N", default=4, help="number of prompts per category")
    warm_up: int = option(
        "--warm-up N",
        rare=True,
        default=0,
        help="number of further prompts per category that drafters learn from first, untimed",
    )
    max_tokens: int = option("-n", "--max-tokens N", default=128, help="reply length in tokens")
    repeats: int = option(
        "--repeats N", rare=True, default=3, help="number of measurements per prompt, whose median is reported"
    )
    temperature: tuple[str, ...] = option(
        "--temp",
        "--temperature LIST",
        default=("0",),
        help="comma-separated sampling temperatures; 0 always picks the likeliest token",
    )
    verification: tuple[str, ...] = option(
        "--verification LIST",
        rare=True,
        default=("keyed",),
        help="comma-separated rules to measure each mode with, such as keyed,rejection; only keyed gives the text of "
        "plain decoding at a temperature above 0",
    )
    draft_width: tuple[str, ...] = option(
        "--draft-width LIST",
        rare=True,
        default=("1",),
        help="comma-separated widths of trees to measure each mode with",
    )
    seed: int = option("--seed N", rare=True, default=0, help="random seed for replies with a temperature above 0")
    checkpoint: Path | None = option(
        "--checkpoint PATH", default=None, group=_FILES, help="small Llama checkpoint (Hugging Face, safetensors)"
    )
    expand: str | None = option(
        "--expand SHAPE",
        default=None,
        nargs="?",
        const="qwen2.5-0.5b",
        help="measure the checkpoint expanded to the cost of this shape (qwen2.5-0.5b) instead of -m",
    )
    bits: int = option(
        "--bits", rare=True, default=4, choices=(4, 8), help="bits per weight of the bundle that --expand makes"
    )
    llamacpp: bool = option(
        "--llamacpp",
        default=False,
        help="also measure llama.cpp on the checkpoint in Q4_0, with and without its prompt lookup",
    )
    work: Path | None = option("--work PATH", rare=True, default=None, help="folder for these files")
    rebuild: bool = option("--rebuild", rare=True, default=False, help="export the bundle again")

    def __post_init__(self) -> None:
        if self.per_category < 1:
            raise UsageError(f"per_category must be at least 1, not {self.per_category}.", "See --help.")
        if not all(length.isdecimal() and int(length) > 1 for length in self.lengths):
            raise UsageError("lengths must be whole numbers of 2 or more.", "Give some, such as 512,2048.")
        if not self.temperature or not all(map(_is_temperature, self.temperature)):
            raise UsageError("temperature must be numbers of 0 or more.", "Give some, such as 0,0.7,1.")
        for rule in self.verification:
            find_method("verifiers", rule)
        if not all(width in _WIDTHS for width in self.draft_width):
            raise UsageError(f"draft_width must be whole numbers of 1 to {_WIDTHS[-1]}.", "Give some, such as 1,2,4.")
        if self.warm_up < 0:
            raise UsageError(f"warm_up must be 0 or more, not {self.warm_up}.", "See --help.")
        if (self.expand or self.llamacpp) and self.checkpoint is None:
            raise UsageError("--expand and --llamacpp need a checkpoint.", "Name a small Llama one with --checkpoint.")
        if self.llamacpp and (missing := [name for name in ("llama_cpp", "gguf") if find_spec(name) is None]):
            message = f"{' and '.join(missing)} not installed."
            raise UsageError(message, "Install the gguf extra: edgeinfer[gguf].")

    @property
    def config(self) -> SpecConfig:
        """Modes and replies; UsageError where they make no sense."""
        modes = (*self.modes, *((CONTROL,) if self.control else ()))
        temperature, *further = dict.fromkeys(map(float, self.temperature))
        replies, widths = ReplySettings(self.max_tokens, temperature, self.seed), tuple(map(int, self.draft_width))
        return SpecConfig(modes, replies, self.repeats, self.verification, widths, tuple(further))

    def artifacts(self) -> TrainedArtifacts | None:
        """Files made of the checkpoint; None where there is none."""
        if self.checkpoint is None:
            return None
        shape = find_shape(self.expand) if self.expand else None
        return TrainedArtifacts(self.work or default_folder(), self.checkpoint, shape, rebuild=self.rebuild)

    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts of the data sets, or the built-in ones: those that are timed, and those to warm up with."""
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


def _is_temperature(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False


def _items(options: SpecOptions, model: Tokenizes, prompts: list[Prompt]) -> list[TokenizedPrompt]:
    """The prompts' tokens: as they are, or made to the lengths of a grid."""
    items = tokenize_prompts(model, prompts, options.max_tokens)
    if not options.lengths:
        return items
    lengths = tuple(map(int, options.lengths))
    if max(lengths) + options.max_tokens > model.context:
        message = f"A prompt of {max(lengths)} tokens leaves no room for a reply of {options.max_tokens}."
        raise UsageError(message, "Give a larger context (-c), or shorter lengths (--lengths).")
    return grid_prompts(items, lengths, options.per_category)


def run_spec(options: SpecOptions, context: BenchContext) -> tuple[SpecResults, bool]:
    """Measures; an interrupt ends it early with the prompts done so far. Also returns whether it finished."""
    if options.expand and context.model:
        raise UsageError("A bundle cannot be expanded.", "Give a checkpoint with --checkpoint, and no -m.")
    config, skipped = options.config, dict[str, str]()
    prompts, warming = options.prompts()
    artifacts = options.artifacts()
    bundle = str(artifacts.bundle(BundleKind(bits=options.bits))) if artifacts and options.expand else context.model
    # What earlier sessions learnt would be an advantage that nothing can reproduce.
    loading = {"remember": False, **context.load}
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(context.open_model(bundle, loading))
        items = _items(options, model, prompts)
        learning = LearningModel(model)
        modes: list[Mode] = edgeinfer_modes(learning, config, skipped)
        if artifacts and options.llamacpp:
            room = -(-model.context // _LLAMACPP_CONTEXT) * _LLAMACPP_CONTEXT
            arguments = {"path": str(artifacts.gguf()), "threads": model.threads, "context": room}
            worker = stack.enter_context(Worker("llamacpp", arguments))
            modes += llamacpp_modes(worker, config, _stop_ids(artifacts.checkpoint()))
        for item in tokenize_prompts(model, warming, options.max_tokens):
            for mode in modes:
                if mode.learns:
                    mode.reply(item.ids)
                    mode.learn()
        recorded = {**loading, **asdict(config.replies), "repeats": config.repeats, "expand": options.expand}
        recorded["warm_up"] = len(warming)
        if config.temperatures:
            recorded["further temperatures"] = ",".join(f"{temperature:g}" for temperature in config.temperatures)
        if options.lengths:
            recorded["lengths"] = ",".join(options.lengths)
        setup = SpecSetup(model.threads, model.info.kernel, model.info.name, model.info.bits_per_weight, recorded)
        done: list[PromptTimes] = []
        finished = True
        try:
            done.extend(measure(items, modes, config.repeats, context.stage("replies")))
        except KeyboardInterrupt:
            if not done:
                raise
            finished = False
        shown = tuple(mode.name for mode in modes)
        return SpecResults(setup, shown, tuple(done), isinstance(learning, Learns), skipped), finished


def _stop_ids(checkpoint: Path) -> list[int]:
    """Tokens that end a reply, as the checkpoint's generation_config.json has them."""
    path = checkpoint / "generation_config.json"
    try:
        ends = json.loads(path.read_text("utf-8")).get("eos_token_id", [])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.", "Give a complete checkpoint.") from error
    return list(ends) if isinstance(ends, list) else [int(ends)]


def _run(options: SpecOptions, context: BenchContext) -> BenchResult:
    results, finished = run_spec(options, context)
    return BenchResult(results.to_dict(), finished)


SPEC = Benchmark(
    "spec", "speculation against plain decoding", _DESCRIPTION, SpecOptions, _run, spec_section, loads=True
)
