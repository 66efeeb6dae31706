"""What a speculation benchmark found, with its statistics and its JSON; knows nothing of measuring or printing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgeinfer.apps.bench.prompts import RETELLING, STORIES, TokenizedPrompt

__all__ = ["CONTROL", "GROUPS", "PLAIN", "CategorySummary", "PromptTimes", "Reply", "Setup", "SpecResults"]

PLAIN = "off"
# Plain decoding measured a second time: how far it is from itself is the noise of the machine.
CONTROL = "off again"
# Fewer tokens after the first tell nothing about the time of one.
FEWEST_TIMED = 2
# Named groups of categories, and how they are called.
GROUPS = {"story categories": STORIES, "retelling dialogues": RETELLING}


@dataclass(frozen=True)
class Reply:
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
    replies: Mapping[str, Sequence[Reply]]
    plain: Mapping[str, str]

    def timed(self, mode: str) -> bool:
        """Whether the replies are long enough to be timed."""
        return all(reply.later >= FEWEST_TIMED for reply in self.replies[mode])

    def ms(self, mode: str) -> float:
        """Median of the repeats' milliseconds per token."""
        return float(np.median([reply.per_token_ms for reply in self.replies[mode]]))

    def speedup(self, mode: str, over: str = PLAIN) -> float:
        """How many times faster than another mode."""
        return self.ms(over) / self.ms(mode)

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
class Setup:
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

    setup: Setup
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
        return [times for times in inside if times.timed(mode) and times.timed(PLAIN)]

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

    def slower(self, mode: str, least: float) -> list[PromptTimes]:
        """Prompts on which a mode has less than this speed-up, the slowest first."""
        below = [times for times in self.timed(mode) if times.speedup(mode) < least]
        return sorted(below, key=lambda times: times.speedup(mode))

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
