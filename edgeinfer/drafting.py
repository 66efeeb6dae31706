"""Speculative decoding: who may draft, how far, and how drafts are verified; options of loading and of replies."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from edgeinfer.errors import Setting, UsageError
from edgeinfer.option_groups import OptionGroup
from edgeinfer.options import option, suggestion
from edgeinfer.records import dataclass

# Who can draft, as options name them; runtime/speculation/registry.py makes them, a test holds the two equal.
DRAFTERS = (
    "forced", "copy", "ngram", "recycle", "model", "hierarchical", "exit", "skip", "bits", "experts", "bits-experts",
    "resident", "medusa", "hydra", "prompt", "eagle", "mtp", "dflash", "hydra-plus", "rapid",
)  # fmt: skip
# How drafts can be verified; runtime/speculation/verification has them. rejection: Leviathan and Chen; k-seq: SpecTr;
# typical: Medusa; judge: Bachmann.
VerificationRule = Literal["keyed", "rejection", "k-seq", "typical", "judge"]
VERIFICATIONS: tuple[str, ...] = get_args(VerificationRule)
# As a draft model: none, not even the one that a bundle brings.
NO_DRAFT_MODEL = "off"
# Tokens in a draft unless told otherwise: more rarely pay (docs/log), and each takes a row of logits.
MOST_DRAFTED = 15
# Candidates for one place.
_MOST_SIBLINGS = 8
# The heading of help.
DRAFTING_GROUP = "speculative decoding (the text stays the same)"
# Declares who drafts, which is called `speculation` where options are flat and `drafters` in a group.
SPECULATION: dict[str, Any] = {
    "help": "speculative decoding: auto uses it where it is faster; off; or drafters, such as copy,recycle, out of "
    + ", ".join(DRAFTERS)
    + " (default: auto)",
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
        return DRAFTERS
    names = tuple(dict.fromkeys(name.strip() for name in speculation.split(",")))
    for name in names:
        if name not in DRAFTERS:
            hint = suggestion(name, ("auto", "off", *DRAFTERS)) + Setting("speculation")
            hint += f" must be auto, off, or some of {', '.join(DRAFTERS)}, separated by commas."
            raise UsageError(f"Unknown drafter {name!r}.", hint)
    return names


def branching_in(draft_tree: str, verification: str) -> tuple[int, ...]:
    """Siblings at each depth that an option such as "3,2,1" names; none for "adaptive" and "beam"."""
    if draft_tree == "adaptive":
        return ()
    if verification != "rejection":
        hint = f"Add {Setting('verification', 'rejection')}, or use {Setting('draft_tree', 'adaptive')}."
        raise UsageError(f"A draft tree {draft_tree!r} is drawn at random, for verification by rejection.", hint)
    if draft_tree == "beam":
        return ()
    counts = draft_tree.split(",")
    if not all(count.isascii() and count.isdigit() and 1 <= int(count) <= _MOST_SIBLINGS for count in counts):
        hint = str(Setting("draft_tree")) + f" must be adaptive, beam, or numbers from 1 to {_MOST_SIBLINGS}."
        raise UsageError(f"Unknown draft tree {draft_tree!r}.", hint)
    return tuple(map(int, counts))


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
    verification: VerificationRule = option(
        "keyed",
        help="how drafts are verified: keyed gives the text of plain decoding, rejection and k-seq give its "
        "distribution, typical and judge are lossy (default: keyed)",
        choices=VERIFICATIONS,
        cli="--verification",
        group=DRAFTING_GROUP,
    )
    draft_tree: str = option(
        "adaptive",
        help="shape of draft trees with --verification rejection: adaptive, beam (stochastic beam search), or numbers "
        "of candidates by depth, such as 3,2,1 (default: adaptive)",
        cli="--draft-tree",
        metavar="SHAPE",
        group=DRAFTING_GROUP,
    )

    @property
    def branching(self) -> tuple[int, ...]:
        """Candidates at each depth, where `draft_tree` names them."""
        return branching_in(self.draft_tree, self.verification)

    def check_drafting(self) -> None:
        """Refuses a tree of an unknown shape, or one that the verification does not take.

        Raises:
            UsageError: it is one.
        """
        branching_in(self.draft_tree, self.verification)


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
        verification: for generate(): "keyed" gives the text of plain decoding, "rejection" and "k-seq" give its
            distribution; "typical" is lossy, and so is "judge", which keeps what `edgeinfer tune --judge` learnt to.
        draft_tree: for generate() with "rejection": "adaptive" draws where a token is likeliest to be accepted, "beam"
            keeps the `draft_width` best paths of every depth (stochastic beam search), and "3,2,1" draws so many
            candidates behind every path of each depth.
    """

    mode: ClassVar[tuple[str, str] | None] = ("drafters", "speculation")

    drafters: str = option("auto", **SPECULATION)

    def __post_init__(self) -> None:
        super().__post_init__()
        drafters_in(self.drafters)
        self.check_drafting()
