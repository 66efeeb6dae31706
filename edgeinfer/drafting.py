"""Speculative decoding: who may draft, how far, and how drafts are verified; options of loading and of replies."""

from __future__ import annotations

from typing import Any, ClassVar

from edgeinfer.methods import find_method, product_methods
from edgeinfer.option_groups import OptionGroup
from edgeinfer.options import option
from edgeinfer.records import dataclass

# As a draft model: none, not even the one that a bundle brings.
NO_DRAFT_MODEL = "off"
# Tokens in a draft unless told otherwise: more rarely pay (docs/log), and each takes a row of logits.
MOST_DRAFTED = 15
# Gives the text of plain decoding, whatever is drafted.
DEFAULT_VERIFICATION = "keyed"
# Candidates for one place.
_MOST_SIBLINGS = 8
# The heading of help.
DRAFTING_GROUP = "speculative decoding (the text stays the same)"
# Declares who drafts, which is called `speculation` where options are flat and `drafters` in a group.
SPECULATION: dict[str, Any] = {
    "help": "speculative decoding: auto uses it where it is faster; off; or drafters, such as copy,recycle (edgeinfer "
    "methods lists them; default: auto)",
    "cli": "--speculation",
    "metavar": "MODE",
    "group": DRAFTING_GROUP,
    "basic": True,
    "brief": "draft tokens ahead, for speed: auto, off, or drafters such as copy,ngram (default: auto)",
}


def drafters_in(speculation: str) -> tuple[str, ...]:
    """The drafters that an option such as "copy,ngram" names; none for "off", all that a model has for "auto"."""
    if speculation == "off":
        return ()
    if speculation == "auto":
        return tuple(product_methods("drafters"))
    names = tuple(dict.fromkeys(name.strip() for name in speculation.split(",")))
    for name in names:
        find_method("drafters", name)
    return names


def check_drafters(speculation: str) -> None:
    """Refuse an option that names an unknown drafter."""
    if speculation != "auto":
        drafters_in(speculation)


@dataclass(frozen=True, kw_only=True)
class DraftLength:
    """How far drafts reach, of a model and of each reply."""

    # Memory is planned for this many; only `speculation="auto"` takes fewer where the budget needs it.
    draft_max: int | None = option(
        None,
        help="maximum number of draft tokens (default: 15, or fewer if memory is short)",
        low=1,
        high=63,
        cli="--draft-max",
        metavar="N",
        group=DRAFTING_GROUP,
    )


@dataclass(frozen=True, kw_only=True)
class LoadDrafting(DraftLength):
    """Drafting as a model is loaded for it."""

    # Also of a draft model in a GGUF file, where the default is all of its experts.
    draft_experts: int | None = option(
        None,
        help="experts per token when the model drafts for itself (default: half the usual number)",
        low=1,
        high=4096,
        cli="--draft-experts",
        metavar="N",
        group=DRAFTING_GROUP,
    )
    remember: bool = option(
        True,
        help="do not keep what drafters learn from your texts (token ids and counts) for the next session",
        cli="--no-remember",
        group=DRAFTING_GROUP,
    )


@dataclass(frozen=True, kw_only=True)
class ReplyDrafting(DraftLength):
    """Drafting as a reply asks for it."""

    draft_width: int = option(
        1,
        help="candidates per drafter and position; more than 1 drafts a tree (default: 1)",
        low=1,
        high=_MOST_SIBLINGS,
        cli="--draft-width",
        metavar="N",
        group=DRAFTING_GROUP,
    )
    verification: str = option(
        DEFAULT_VERIFICATION,
        help="how drafts are verified: keyed gives the text of plain decoding, rejection gives its distribution "
        "(edgeinfer methods lists more; default: keyed)",
        cli="--verification",
        metavar="RULE",
        group=DRAFTING_GROUP,
    )

    def check_drafting(self) -> None:
        """Refuse an unknown verification."""
        if self.verification != DEFAULT_VERIFICATION:
            find_method("verifiers", self.verification)


@dataclass(frozen=True)
class Speculation(LoadDrafting, ReplyDrafting, OptionGroup):
    """Speculative decoding, for a model or for one reply:
    `edgeinfer.load(speculation=Speculation("copy,ngram", draft_max=8))`.

    Attributes:
        drafters: "auto" drafts where that is faster, "off" never; or a comma-separated list of drafters.
        draft_max: maximum number of draft tokens.
        draft_experts: for load(): experts per token when the model drafts for itself.
        remember: for load(): whether what drafters learn (token ids and counts) is kept for the next session.
        draft_width: for generate(): candidates per drafter and position; more than 1 drafts a tree, except where text
            is exact and attention is ONNX Runtime's own, whose side branches would not be.
        verification: for generate(): "keyed" gives the text of plain decoding, "rejection" its distribution; those of
            research are lossy.
    """

    mode: ClassVar[tuple[str, str] | None] = ("drafters", "speculation")

    drafters: str = option("auto", **SPECULATION)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drafters(self.drafters)
        self.check_drafting()
