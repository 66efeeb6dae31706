"""What `bench spec` found: its statistics, its JSON, and the section that shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgeinfer.apps.bench.cost_expanded import COST_EXPANDED
from edgeinfer.apps.bench.prompts import RETELLING, STORIES, TokenizedPrompt
from edgeinfer.apps.bench.render import Facts, Paragraph, Part, Section, Table, commands, run_facts

PLAIN = "off"
# Plain decoding measured a second time: how far it is from itself is the noise of the machine.
CONTROL = "off again"
# Fewer tokens after the first tell nothing about the time of one.
FEWEST_TIMED = 2
# Named groups of categories, and how they are called.
GROUPS = {"story categories": STORIES, "retelling dialogues": RETELLING}
# What counts as not slower: the noise of a median of three on a quiet machine is about 2%.
LEAST_SPEEDUP = 0.98
_JUDGED = "auto"


# Before the temperature in a mode's name.
_AT = " T="


def mode_name(mode: str, temperature: float | None) -> str:
    """The name of a mode at a temperature; None is that of all modes that do not say theirs."""
    return mode if temperature is None else f"{mode}{_AT}{temperature:g}"


def plain_of(mode: str) -> str:
    """The plain decoding that a mode is timed against: the one at its temperature."""
    _, at, temperature = mode.partition(_AT)
    return PLAIN + at + temperature


@dataclass(frozen=True)
class SpecReply:
    """One reply of one mode.

    Attributes:
        token_ids: of the reply.
        per_token_ms: mean time of the tokens after the first; the prompt is not in it.
        rounds: passes that these took.
        lossless: whether the mode promises the text of its plain one.
        details: the engine's own statistics.
    """

    token_ids: tuple[int, ...]
    per_token_ms: float
    rounds: int
    lossless: bool
    details: Mapping[str, Any]

    @property
    def later(self) -> int:
        """Tokens after the first."""
        return max(len(self.token_ids) - 1, 0)


@dataclass(frozen=True)
class PromptTimes:
    """All replies to one prompt.

    Attributes:
        item: the prompt.
        replies: by mode, in the order they were made.
        plain: the mode that each mode is to agree with, word for word.
    """

    item: TokenizedPrompt
    replies: Mapping[str, Sequence[SpecReply]]
    plain: Mapping[str, str]

    def timed(self, mode: str) -> bool:
        """Whether the replies are long enough to be timed."""
        return all(reply.later >= FEWEST_TIMED for reply in self.replies[mode])

    def ms(self, mode: str) -> float:
        """Median of the repeats' milliseconds per token."""
        return float(np.median([reply.per_token_ms for reply in self.replies[mode]]))

    def speedup(self, mode: str) -> float:
        """How many times faster than plain decoding."""
        return self.ms(plain_of(mode)) / self.ms(mode)

    def mismatches(self, mode: str) -> int:
        """Replies of a lossless mode that are not the plain one's."""
        expected = self.replies[self.plain[mode]][0].token_ids
        return sum(reply.lossless and reply.token_ids != expected for reply in self.replies[mode])

    def to_dict(self) -> dict[str, Any]:
        """Every sample."""
        item = self.item
        modes = {
            mode: {
                "ms_per_token": [reply.per_token_ms for reply in replies],
                "rounds": [reply.rounds for reply in replies],
                "tokens": [len(reply.token_ids) for reply in replies],
                "mismatches": self.mismatches(mode),
                "details": [dict(reply.details) for reply in replies],
            }
            for mode, replies in self.replies.items()
        }
        return {
            "name": item.prompt.name,
            "category": item.prompt.category,
            "prompt_tokens": len(item.ids),
            "cut_tokens": item.cut,
            "reply": list(self.replies[PLAIN][0].token_ids),
            "modes": modes,
        }


@dataclass(frozen=True)
class CategorySummary:
    """One mode over the timed prompts of some categories.

    Attributes:
        prompts: how many were timed.
        accepted_length: tokens per pass of the target, all prompts together; 1 is plain decoding.
        ms: mean over prompts of the median milliseconds per token.
        speedup: mean over prompts; least is the worst, that of the prompt named `worst`.
    """

    prompts: int
    accepted_length: float
    ms: float
    speedup: float
    least: float
    worst: str


@dataclass(frozen=True)
class SpecSetup:
    """What figures depend on besides the machine: recorded with them."""

    threads: int
    kernel: str
    model: str
    bits_per_weight: float
    options: Mapping[str, Any]


@dataclass(frozen=True)
class SpecResults:
    """Replies of every mode to every prompt.

    Attributes:
        modes: in the order of the tables; the first is plain decoding.
        learning: whether what drafters learnt from a reply was put back before its repeats and other modes' replies.
        skipped: modes that could not run, with the reason.
    """

    setup: SpecSetup
    modes: tuple[str, ...]
    prompts: tuple[PromptTimes, ...]
    learning: bool
    skipped: Mapping[str, str]

    @property
    def categories(self) -> tuple[str, ...]:
        """In order of appearance."""
        return tuple(dict.fromkeys(times.item.prompt.category for times in self.prompts))

    def timed(self, mode: str, categories: Sequence[str] | None = None) -> list[PromptTimes]:
        """Prompts whose replies in this mode and in plain decoding are long enough; of some categories, or all."""
        chosen = self.categories if categories is None else categories
        inside = (times for times in self.prompts if times.item.prompt.category in chosen)
        return [times for times in inside if times.timed(mode) and times.timed(plain_of(mode))]

    @property
    def untimed(self) -> int:
        """Prompts with replies that are too short."""
        return sum(not all(times.timed(mode) for mode in self.modes) for times in self.prompts)

    @property
    def cut(self) -> int:
        """Prompts that were cut at the front."""
        return sum(times.item.cut > 0 for times in self.prompts)

    def mismatches(self, mode: str) -> int:
        """Replies that a lossless mode gave otherwise than plain decoding."""
        return sum(times.mismatches(mode) for times in self.prompts)

    def summary(self, mode: str, category: str) -> CategorySummary | None:
        """None where nothing could be timed."""
        timed = self.timed(mode, (category,))
        if not timed:
            return None
        replies = [reply for times in timed for reply in times.replies[mode]]
        worst = min(timed, key=lambda times: times.speedup(mode))
        return CategorySummary(
            prompts=len(timed),
            accepted_length=sum(reply.later for reply in replies) / sum(reply.rounds for reply in replies),
            ms=float(np.mean([times.ms(mode) for times in timed])),
            speedup=float(np.mean([times.speedup(mode) for times in timed])),
            least=worst.speedup(mode),
            worst=worst.item.prompt.name,
        )

    def group_speedup(self, mode: str, categories: Sequence[str]) -> float | None:
        """Mean over categories of their mean speed-up; None where one is missing."""
        summaries = [self.summary(mode, category) for category in categories]
        known = [summary.speedup for summary in summaries if summary is not None]
        return float(np.mean(known)) if len(known) == len(categories) else None

    def overall_speedup(self, mode: str) -> float | None:
        """Geometric mean over categories of their mean speed-up; None where nothing could be timed."""
        summaries = [self.summary(mode, category) for category in self.categories]
        known = [math.log(summary.speedup) for summary in summaries if summary is not None]
        return math.exp(sum(known) / len(known)) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, samples included."""
        summaries = {
            mode: {
                category: asdict(summary) for category in self.categories if (summary := self.summary(mode, category))
            }
            for mode in self.modes
        }
        overall = {
            mode: {
                "geometric_mean_speedup": self.overall_speedup(mode),
                **{name: self.group_speedup(mode, categories) for name, categories in GROUPS.items()},
                "mismatches": self.mismatches(mode),
            }
            for mode in self.modes
        }
        return {
            "setup": asdict(self.setup),
            "modes": list(self.modes),
            "learning_put_back": self.learning,
            "skipped": dict(self.skipped),
            "untimed_prompts": self.untimed,
            "cut_prompts": self.cut,
            "categories": summaries,
            "overall": overall,
            "prompts": [times.to_dict() for times in self.prompts],
        }


def spec_section(data: Any) -> Section:
    """Drafting beside plain decoding, by category of prompts."""
    modes = [mode for mode in data["modes"] if mode != plain_of(mode)]
    categories = list(data["categories"][PLAIN])
    header = ("category", "prompts", f"{PLAIN}: ms per token", *modes)
    rows = [(name, *_plain(data, name), *(_speedup(data, mode, name) for mode in modes)) for name in categories]
    rows.append(
        ("geometric mean", "", "", *(_number(data["overall"][mode], "geometric_mean_speedup") for mode in modes))
    )
    lengths = [
        (name, *(_number(data["categories"][mode].get(name), "accepted_length") for mode in modes))
        for name in categories
    ]
    wrong = sum(found["mismatches"] for found in data["overall"].values())
    parts: tuple[Part, ...] = (
        Table("Times faster than plain decoding, mean over prompts, and the least", header, tuple(rows)),
        Table("Tokens per pass of the model", ("category", *modes), tuple(lengths)),
        Paragraph(f"{wrong} replies had other tokens than plain decoding's."),
        *(Paragraph(f"{mode}: skipped: {reason}") for mode, reason in data["skipped"].items()),
        *_costs(data),
        _details(data),
        _means(data),
        *(Paragraph(text) for text in (*_verdict(data), *_notes(data))),
    )
    return Section("Drafting ahead", (*_facts(data["setup"]), *run_facts(data)), parts, commands(data))


def _plain(data: Mapping[str, Any], category: str) -> tuple[str, str]:
    summary = data["categories"][PLAIN][category]
    return str(summary["prompts"]), f"{summary['ms']:.2f}"


def _speedup(data: Mapping[str, Any], mode: str, category: str) -> str:
    summary = data["categories"][mode].get(category)
    return "" if summary is None else f"{summary['speedup']:.2f} (least {summary['least']:.2f})"


def _number(found: Mapping[str, Any] | None, name: str) -> str:
    return "" if found is None or found[name] is None else f"{found[name]:.2f}"


def _facts(setup: Mapping[str, Any]) -> Facts:
    names = {"Model": "model", "Kernel": "kernel", "Threads": "threads"}
    return tuple((name, str(setup[key])) for name, key in names.items() if key in setup)


def _costs(data: Mapping[str, Any]) -> tuple[Table, ...]:
    """What rounds cost on the very texts, as the engine timed them; nothing where none was drafted."""
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
    return (Table("Costs on these texts", header, tuple(rows), words=("mode",)),) if rows else ()


def _details(data: Mapping[str, Any]) -> Table:
    """Every mode in every category, and the prompt on which it was slowest."""
    rows = [
        (name, mode, str(found["prompts"]), f"{found['ms']:.2f}", found["worst"])
        for name in dict.fromkeys(prompt["category"] for prompt in data["prompts"])
        for mode in data["modes"]
        if (found := data["categories"][mode].get(name))
    ]
    header = ("category", "mode", "prompts", "ms per token", "slowest on")
    return Table("Means over the prompts of a category", header, tuple(rows), words=("mode", "slowest on"))


def _means(data: Mapping[str, Any]) -> Table:
    names = {"geometric_mean_speedup": "geometric, all categories"} | {name: name for name in GROUPS}
    rows = [(mode, *(_number(data["overall"][mode], name) for name in names)) for mode in data["modes"]]
    return Table(f"Mean speed-up over {PLAIN}", ("mode", *names.values()), tuple(rows))


def _speedups(data: Mapping[str, Any], mode: str) -> dict[str, float]:
    """How many times faster than plain decoding, by prompt; of those whose replies in both are long enough."""
    found = {}
    for prompt in data["prompts"]:
        pair = [prompt["modes"][each] for each in (plain_of(mode), mode)]
        if all(tokens - 1 >= FEWEST_TIMED for each in pair for tokens in each["tokens"]):
            plain, ms = (float(np.median(each["ms_per_token"])) for each in pair)
            found[prompt["name"]] = plain / ms
    return found


def _verdict(data: Mapping[str, Any]) -> list[str]:
    """Whether the governor's choice is never slower than plain decoding, and where it is."""
    if _JUDGED not in data["modes"]:
        return []
    timed = _speedups(data, _JUDGED)
    slower = sorted((speedup, name) for name, speedup in timed.items() if speedup < LEAST_SPEEDUP)
    claim = f"{_JUDGED} >= {LEAST_SPEEDUP} x {PLAIN} on every prompt"
    if not slower:
        return [f"{claim}: yes, on {len(timed)} of {len(timed)}."]
    where = "".join(f"\n  {name}: {speedup:.3f}" for speedup, name in slower)
    return [f"{claim}: no, on {len(timed) - len(slower)} of {len(timed)}. Slower on:{where}"]


def _notes(data: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    wrong = {mode: data["overall"][mode]["mismatches"] for mode in data["modes"]}
    notes = [f"{mode}: {count} replies differ from those of plain decoding." for mode, count in wrong.items() if count]
    if not notes:
        notes.append("Every lossless mode gave the tokens of its plain one in every reply.")
    if CONTROL in data["modes"] and (ratios := sorted(_speedups(data, CONTROL).values())):
        notes.append(f"Noise: {PLAIN} is {ratios[0]:.3f} to {ratios[-1]:.3f} times as fast as itself.")
    if data["cut_prompts"]:
        notes.append(f"{data['cut_prompts']} prompts were cut at the front to leave room for the reply.")
    if data["untimed_prompts"]:
        short = "prompts had replies of fewer than 3 tokens in some mode: not timed there."
        notes.append(f"{data['untimed_prompts']} {short}")
    if not data["learning_put_back"]:
        notes.append("What drafters learn was not put back between replies: repeats profit from each other.")
    if COST_EXPANDED in data["setup"]["model"]:
        notes.append(f"The model is {COST_EXPANDED}: text of a small trained model, time and memory of a large one.")
    options = ", ".join(f"{name}={value}" for name, value in data["setup"]["options"].items())
    return [*notes, f"Options: {options}"]
