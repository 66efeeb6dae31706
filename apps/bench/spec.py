"""`edgeinfer bench spec`: speculation against plain decoding, on the same prompts, model and process.

Plain decoding is the same model with drafting off. Modes take turns on each prompt, so that a machine that slows down
slows all of them; a prompt's figure is the median of its repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

import edgeinfer
from edgeinfer.apps.bench.benchmark import BenchContext, Benchmark, BenchResult, StageProgress, option, rotated
from edgeinfer.apps.bench.render import Facts, Paragraph, Part, Section, Table, commands, run_facts
from edgeinfer.apps.bench.texts import Prompt, TokenizedPrompt, builtin_prompts, load_prompts, tokenize_prompts
from edgeinfer.core.errors import EdgeInferError, UsageError

PLAIN = "off"
# Plain decoding measured a second time, which shows the noise of the machine.
CONTROL = "off again"
# The mode that must not be slower than plain decoding; the noise of a median of three is about 2%.
_JUDGED, LEAST_SPEEDUP = "auto", 0.98
# Fewer tokens after the first say nothing about the time of a token.
FEWEST_TIMED = 2
# The name of models made by `tests.tools.cost_expanded`.
_COST_EXPANDED = "cost-expanded"
_KEYED = "keyed"
_DESCRIPTION = """\
Compare speculation with plain decoding: the same prompts, model and process, mode after mode in turns.

examples:
  edgeinfer bench spec --modes off,copy,copy+recycle,auto -t 1
  edgeinfer bench spec --data DATA --per-category 10 --json spec.json
"""
PromptFigures = dict[str, Any]


@dataclass(frozen=True)
class SpecOptions:
    """Modes and prompts; `warm_up` prompts of a category only teach drafters and are not timed."""

    modes: tuple[str, ...] = option(
        "--modes LIST",
        default=(PLAIN, "auto"),
        group="workload",
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
    temperature: float = option(
        "--temp", "--temperature T", default=0.0, help="sampling temperature; 0 always picks the most likely token"
    )
    verification: str = option(
        "--verification RULE",
        rare=True,
        default=_KEYED,
        help="rule by which drafts are accepted; only keyed gives the text of plain decoding at a temperature above 0",
    )
    draft_width: int = option("--draft-width N", rare=True, default=1, help="guesses per drafter and place")
    seed: int = option("--seed N", rare=True, default=0, help="random seed for replies with a temperature above 0")

    def __post_init__(self) -> None:
        for name, least in (("per_category", 1), ("warm_up", 0), ("repeats", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}.", "See --help.")
        if self.max_tokens <= FEWEST_TIMED:
            raise UsageError("Replies of fewer than 3 tokens cannot be timed.", "Ask for more (-n).")
        if not 0 <= self.temperature < math.inf:
            raise UsageError("temperature must be 0 or more.", "Give a number such as 0.7.")
        control = (CONTROL,) if self.control else ()
        object.__setattr__(self, "modes", tuple(dict.fromkeys((PLAIN, *self.modes, *control))))

    @property
    def replies(self) -> dict[str, Any]:
        """Options of every reply."""
        return {name: getattr(self, name) for name in ("max_tokens", "temperature", "seed")}

    @property
    def drafts(self) -> dict[str, Any]:
        """Further options of replies with drafts."""
        return {name: getattr(self, name) for name in ("verification", "draft_width")}

    def prompts(self) -> tuple[list[Prompt], list[Prompt]]:
        """Prompts to time, and prompts to warm up with."""
        count = self.per_category + self.warm_up
        data, chosen = self.data, self.categories
        found = load_prompts(data, count, chosen) if data else builtin_prompts(count, chosen)
        groups = [list(prompts) for _, prompts in groupby(found, key=lambda prompt: prompt.category)]
        timed = [prompt for prompts in groups for prompt in prompts[: self.per_category]]
        return timed, [prompt for prompts in groups for prompt in prompts[self.per_category :]]


class Mode:
    """A model with some drafters. Every reply begins with an empty cache, of draft models too, and with drafters that
    know what earlier prompts taught them in this mode: neither repeats nor other modes' replies to the same prompt."""

    def __init__(self, model: edgeinfer.Model, name: str, options: SpecOptions) -> None:
        self.name = name
        self._model = model
        drafters = PLAIN if name in (PLAIN, CONTROL) else name.replace("+", ",")
        self.drafts = drafters != PLAIN
        self._options = {**options.replies, "speculation": drafters, **(options.drafts if self.drafts else {})}
        self._lossless = options.verification == _KEYED
        self._known = self._latest = edgeinfer.tools.drafting_state(model)

    def reply(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Continue a prompt with the knowledge at the last call of `learn`."""
        other = prompt[0] - 1 if prompt[0] else 1  # leaves nothing of the prompt in any cache
        self._model.generate([other], **{**self._options, "max_tokens": 2, "ignore_eos": True})
        edgeinfer.tools.restore_drafting(self._model, self._known)
        result = self._model.generate(list(prompt), **self._options)
        self._latest = edgeinfer.tools.drafting_state(self._model)
        return {
            "token_ids": result.token_ids,
            "ms_per_token": result.timings.per_token_ms,
            "rounds": result.speculation.rounds or max(len(result.token_ids) - 1, 0),
            # Other rules draw from the same distribution, but not the same tokens.
            "lossless": result.speculation.lossless and self._lossless,
            "details": asdict(result.speculation) | {"timings": asdict(result.timings)},
        }

    def learn(self) -> None:
        """Keep what the last reply taught."""
        self._known = self._latest


def make_modes(model: edgeinfer.Model, options: SpecOptions, skipped: dict[str, str]) -> list[Mode]:
    """The modes that run; each is tried once, and `skipped` gets the reasons of the others."""
    runnable = []
    # All are made before any is tried, as each starts from what drafters know now.
    for mode in [Mode(model, name, options) for name in options.modes]:
        try:
            mode.reply([1])
        except EdgeInferError as error:
            if mode.name == PLAIN:
                raise
            skipped[mode.name] = str(error)
            continue
        runnable.append(mode)
    return runnable


def measure(
    prompts: Sequence[TokenizedPrompt], modes: Sequence[Mode], repeats: int, progress: StageProgress
) -> Iterator[PromptFigures]:
    """Replies of every mode to each prompt, in turns."""
    done, total = 0, len(prompts) * len(modes) * repeats
    for number, item in enumerate(prompts):
        replies: dict[str, list[dict[str, Any]]] = {mode.name: [] for mode in modes}
        for repeat in range(repeats):
            for mode in rotated(modes, number + repeat):
                progress(done, total)
                replies[mode.name].append(mode.reply(item.ids))
                done += 1
        for mode in modes:
            mode.learn()
        yield prompt_figures(item, replies)


def prompt_figures(item: TokenizedPrompt, replies: Mapping[str, Sequence[dict[str, Any]]]) -> PromptFigures:
    """The JSON of one prompt; mismatches are replies of a lossless mode whose tokens are not plain decoding's."""
    plain = replies[PLAIN][0]["token_ids"]
    modes = {
        name: {key: [each[key] for each in found] for key in ("ms_per_token", "rounds", "details")}
        | {"tokens": [len(each["token_ids"]) for each in found]}
        | {"mismatches": sum(each["lossless"] and each["token_ids"] != plain for each in found)}
        for name, found in replies.items()
    }
    names = {"name": item.prompt.name, "category": item.prompt.category}
    return names | {"prompt_tokens": len(item.ids), "cut_tokens": item.cut, "reply": list(plain), "modes": modes}


def _run(options: SpecOptions, context: BenchContext) -> BenchResult:
    skipped: dict[str, str] = {}
    timed, warming = options.prompts()
    # What earlier sessions learnt would be an advantage that nothing can reproduce.
    loading = {"remember": False, **context.load}
    done: list[PromptFigures] = []
    finished = True
    with context.open_model(context.model, loading) as model:
        items = tokenize_prompts(model, timed, options.max_tokens)
        modes = make_modes(model, options, skipped)
        for item in tokenize_prompts(model, warming, options.max_tokens):
            for mode in (mode for mode in modes if mode.drafts):
                mode.reply(item.ids)
                mode.learn()
        recorded = {**loading, **options.replies, **options.drafts, "repeats": options.repeats}
        recorded["warm_up"] = len(warming)
        info = model.info
        setup = {"threads": model.threads, "kernel": info.kernel, "model": info.name, "options": recorded}
        try:
            done.extend(measure(items, modes, options.repeats, context.stage("replies")))
        except KeyboardInterrupt:
            if not done:
                raise
            finished = False
    found = {"setup": setup, "modes": [mode.name for mode in modes], "skipped": skipped, "prompts": done}
    return BenchResult(found, finished)


def speedups(prompts: Sequence[PromptFigures], mode: str) -> dict[str, float]:
    """How many times faster than plain decoding, by prompt; of prompts with replies long enough to be timed."""
    return {each["name"]: _ms(each, PLAIN) / _ms(each, mode) for each in prompts if _timed(each, mode)}


def _timed(prompt: PromptFigures, mode: str) -> bool:
    return all(tokens > FEWEST_TIMED for name in (PLAIN, mode) for tokens in prompt["modes"][name]["tokens"])


def _ms(prompt: PromptFigures, mode: str) -> float:
    return float(median(prompt["modes"][mode]["ms_per_token"]))


def tokens_per_pass(prompts: Sequence[PromptFigures], mode: str) -> float:
    """Mean accepted length over all timed prompts; 1 is plain decoding."""
    found = [prompt["modes"][mode] for prompt in prompts if _timed(prompt, mode)]
    later = sum(sum(each["tokens"]) - len(each["tokens"]) for each in found)
    return float(later / sum(sum(each["rounds"]) for each in found))


def spec_section(data: Any) -> Section:
    """Drafting against plain decoding, by category of prompts."""
    modes, prompts = [mode for mode in data["modes"] if mode != PLAIN], data["prompts"]
    # Categories with a prompt that is long enough in plain decoding.
    categories = {
        name: found
        for name in dict.fromkeys(prompt["category"] for prompt in prompts)
        if speedups(found := [prompt for prompt in prompts if prompt["category"] == name], PLAIN)
    }
    rows, lengths, details = [], [], []
    for name, found in categories.items():
        plain = [_ms(prompt, PLAIN) for prompt in found if _timed(prompt, PLAIN)]
        rows.append(
            (name, str(len(plain)), f"{fmean(plain):.2f}", *(_speedup(speedups(found, mode)) for mode in modes))
        )
        per_pass = {mode: tokens_per_pass(found, mode) for mode in modes if speedups(found, mode)}
        lengths.append((name, *(f"{per_pass[mode]:.2f}" if mode in per_pass else "" for mode in modes)))
        for mode in (PLAIN, *per_pass):
            faster = speedups(found, mode)
            ms = fmean(_ms(prompt, mode) for prompt in found if prompt["name"] in faster)
            details.append((name, mode, str(len(faster)), f"{ms:.2f}", min(faster, key=lambda each: faster[each])))
    rows.append(("geometric mean", "", "", *(_mean(categories, mode) for mode in modes)))
    wrong = {mode: sum(prompt["modes"][mode]["mismatches"] for prompt in prompts) for mode in data["modes"]}
    parts: tuple[Part, ...] = (
        Table(
            "Times faster than plain decoding, mean over prompts, and the least",
            ("category", "prompts", f"{PLAIN}: ms per token", *modes),
            tuple(rows),
        ),
        Table("Tokens per pass of the model", ("category", *modes), tuple(lengths)),
        Paragraph(f"{sum(wrong.values())} replies had other tokens than plain decoding's."),
        *(Paragraph(f"{mode}: skipped: {reason}") for mode, reason in data["skipped"].items()),
        *_costs(data),
        Table(
            "Means over the prompts of a category",
            ("category", "mode", "prompts", "ms per token", "slowest on"),
            tuple(details),
            words=("mode", "slowest on"),
        ),
        *map(Paragraph, _notes(data, wrong)),
    )
    facts: Facts = tuple((name.capitalize(), str(data["setup"][name])) for name in ("model", "kernel", "threads"))
    return Section("Drafting ahead", (*facts, *run_facts(data)), parts, commands(data))


def _speedup(faster: Mapping[str, float]) -> str:
    return f"{fmean(faster.values()):.2f} (least {min(faster.values()):.2f})" if faster else ""


def _mean(categories: Mapping[str, Sequence[PromptFigures]], mode: str) -> str:
    """The geometric mean over categories of their mean speed-ups."""
    means = [fmean(found.values()) for each in categories.values() if (found := speedups(each, mode))]
    return f"{geometric_mean(means):.2f}" if means else ""


def _costs(data: Mapping[str, Any]) -> list[Table]:
    """Costs of rounds as the engine timed them; none if nothing was drafted."""
    rows = []
    for mode in data["modes"]:
        found = [reply for prompt in data["prompts"] for reply in prompt["modes"][mode]["details"]]
        drafted, accepted, draft_ms, verify_ms, rounds = (
            sum(reply.get(name, 0) for reply in found)
            for name in ("drafted", "accepted", "draft_ms", "verify_ms", "rounds")
        )
        if drafted:
            row = (drafted / rounds, accepted / drafted, verify_ms / rounds, draft_ms / drafted)
            rows.append((mode, *(f"{value:.2f}" for value in row)))
    header = ("mode", "drafted per pass", "of these accepted", "ms per pass", "ms per guess")
    return [Table("Costs on these texts", header, tuple(rows), words=("mode",))] if rows else []


def _notes(data: Mapping[str, Any], wrong: Mapping[str, int]) -> Iterator[str]:
    """Whether auto is never slower than plain decoding, and what else a reader has to know."""
    prompts = data["prompts"]
    if _JUDGED in data["modes"]:
        timed = speedups(prompts, _JUDGED)
        slower = sorted((speedup, name) for name, speedup in timed.items() if speedup < LEAST_SPEEDUP)
        where = " Slower on:" + "".join(f"\n  {name}: {speedup:.3f}" for speedup, name in slower) if slower else ""
        verdict = f"{'no' if slower else 'yes'}, on {len(timed) - len(slower)} of {len(timed)}."
        yield f"{_JUDGED} >= {LEAST_SPEEDUP} x {PLAIN} on every prompt: {verdict}{where}"
    yield from (f"{mode}: {n} replies differ from those of plain decoding." for mode, n in wrong.items() if n)
    if not any(wrong.values()):
        yield "Every lossless mode gave the tokens of plain decoding in every reply."
    if CONTROL in data["modes"] and (ratios := sorted(speedups(prompts, CONTROL).values())):
        yield f"Noise: {PLAIN} is {ratios[0]:.3f} to {ratios[-1]:.3f} times as fast as itself."
    if cut := sum(prompt["cut_tokens"] > 0 for prompt in prompts):
        yield f"{cut} prompts were cut at the front to leave room for the reply."
    if short := sum(not all(_timed(prompt, mode) for mode in data["modes"]) for prompt in prompts):
        yield f"{short} prompts had replies of fewer than 3 tokens in some mode: not timed there."
    if _COST_EXPANDED in data["setup"]["model"]:
        yield f"The model is {_COST_EXPANDED}: text of a small trained model, time and memory of a large one."
    yield "Options: " + ", ".join(f"{name}={value}" for name, value in data["setup"]["options"].items())


SPEC = Benchmark(
    "spec", "speculation against plain decoding", _DESCRIPTION, SpecOptions, _run, spec_section, loads=True
)
