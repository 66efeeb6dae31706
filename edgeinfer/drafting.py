"""Drafting ahead: who may draft, how far, and how drafts are verified; options of loading and of replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from edgeinfer.errors import UsageError
from edgeinfer.option_groups import OptionGroup
from edgeinfer.options import option, suggestion
from edgeinfer.wording import Setting

__all__ = [
    "DRAFTERS",
    "DRAFTING_GROUP",
    "MOST_DRAFTED",
    "NO_DRAFT_MODEL",
    "SPECULATION",
    "VERIFICATIONS",
    "LoadDrafting",
    "ReplyDrafting",
    "Speculation",
    "VerificationRule",
    "drafters_in",
]

# Who can draft, as options name them; runtime/speculation/registry.py makes them, a test holds the two equal.
DRAFTERS = (
    "forced", "copy", "ngram", "recycle", "model", "hierarchical", "exit", "skip", "bits", "experts", "resident",
    "medusa", "hydra", "prompt",
)  # fmt: skip
# How drafts can be verified; runtime/speculation/verification has them. rejection: Leviathan and Chen; k-seq: SpecTr;
# typical: Medusa.
VerificationRule = Literal["keyed", "rejection", "k-seq", "typical"]
VERIFICATIONS: tuple[str, ...] = get_args(VerificationRule)
# As a draft model: none, not even the one that a bundle brings.
NO_DRAFT_MODEL = "off"
# Tokens in a draft unless told otherwise: more rarely pay (docs/LOG.md), and each takes a row of logits.
MOST_DRAFTED = 15
# The heading of help.
DRAFTING_GROUP = "drafting ahead (the text stays the same)"
# Declares who drafts, which is called `speculation` where options are flat and `drafters` in a group.
SPECULATION: dict[str, Any] = {
    "help": "auto: draft tokens ahead where that is faster; off; or drafters such as copy,recycle: "
    + ", ".join(DRAFTERS),
    "cli": "--speculation",
    "formerly": "--spec",
    "metavar": "MODE",
    "group": DRAFTING_GROUP,
    "basic": True,
    "brief": "draft tokens ahead, for speed: auto, off, or drafters such as copy,ngram (default: auto)",
}


def drafters_in(speculation: str) -> tuple[str, ...]:
    """The drafters that an option such as "copy,ngram" names; none for "off", all that a model has for "auto".

    Raises:
        UsageError: an unknown name.
    """
    if speculation == "off":
        return ()
    if speculation == "auto":
        return DRAFTERS
    names = tuple(dict.fromkeys(name.strip() for name in speculation.split(",")))
    for name in names:
        if name not in DRAFTERS:
            hint = suggestion(name, ("auto", "off", *DRAFTERS)) + Setting("speculation")
            hint += f" must be auto, off, or some of {', '.join(DRAFTERS)}, separated by commas."
            raise UsageError(f"Unknown drafter {name!r}.", hint)
    return names


@dataclass(frozen=True, kw_only=True)
class DraftLength:
    """How far drafts reach, of a model and of each reply."""

    # Memory is planned for this many; only `speculation="auto"` takes fewer where the budget needs it.
    draft_max: int | None = option(
        None,
        help="tokens in a draft at most (default: 15, or fewer where memory is short)",
        low=1,
        high=63,
        cli="--draft-max",
        formerly="--spec-draft-n-max",
        metavar="N",
        group=DRAFTING_GROUP,
    )


@dataclass(frozen=True, kw_only=True)
class LoadDrafting(DraftLength):
    """Drafting as a model is loaded for it."""

    # Also of a draft model in a GGUF file, where the default is all of its experts.
    draft_experts: int | None = option(
        None,
        help="experts per token where the model itself drafts with fewer (default: half of its own number)",
        low=1,
        high=4096,
        cli="--draft-experts",
        metavar="N",
        group=DRAFTING_GROUP,
    )
    remember: bool = option(
        True,
        help="keep nothing of what drafters learn from your texts (token ids and counts) for the next session",
        cli="--no-remember",
        group=DRAFTING_GROUP,
    )


@dataclass(frozen=True, kw_only=True)
class ReplyDrafting(DraftLength):
    """Drafting as a reply asks for it."""

    draft_width: int = option(
        1,
        help="guesses per drafter and place; above 1 drafts are trees (default: 1)",
        low=1,
        high=8,
        cli="--draft-width",
        formerly="--spec-tree-width",
        metavar="N",
        group=DRAFTING_GROUP,
    )
    verification: VerificationRule = option(
        "keyed",
        help="keyed: the text of plain decoding; rejection, k-seq: its distribution; typical: lossy (default: keyed)",
        choices=VERIFICATIONS,
        cli="--verification",
        formerly="--spec-verify",
        group=DRAFTING_GROUP,
    )


@dataclass(frozen=True)
class Speculation(LoadDrafting, ReplyDrafting, OptionGroup):
    """How tokens are drafted ahead, of a model or of one reply:
    `edgeinfer.load(speculation=Speculation("copy,ngram", draft_max=8))`.

    Attributes:
        drafters: "auto" drafts where that is faster; "off" never; or some drafters, separated by commas.
        draft_max: tokens in a draft at most.
        draft_experts: of loading: experts per token where the model itself drafts with fewer.
        remember: of loading: whether what drafters learn (token ids and counts) is kept for the next session.
        draft_width: of a reply: guesses per drafter and place; above 1 drafts are trees.
        verification: of a reply: "keyed" gives the text of plain decoding, "rejection" and "k-seq" its distribution;
            "typical" is lossy.
    """

    mode: ClassVar = ("drafters", "speculation")

    drafters: str = option("auto", **SPECULATION)

    def __post_init__(self) -> None:
        super().__post_init__()
        drafters_in(self.drafters)
