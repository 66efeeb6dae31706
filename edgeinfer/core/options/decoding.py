"""Options of how tokens are decoded: drafting ahead, searching among several continuations, and less compute."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal, get_args

from edgeinfer.core.errors import Setting, UsageError
from edgeinfer.core.methods import find_method, product_methods
from edgeinfer.core.options import OptionGroup, Range, documented, option, require, require_few
from edgeinfer.core.records import dataclass

# As a draft model: none, not even the one that a bundle brings.
NO_DRAFT_MODEL = "off"
# Tokens in a draft by default: more rarely pay (docs/log), and each takes a row of logits.
MOST_DRAFTED = 15
# Gives the text of plain decoding, whatever is drafted.
DEFAULT_VERIFICATION = "keyed"
# Candidates for one place of a draft.
_MOST_SIBLINGS = 8
# The part of a sampled text that is its answer, where answers are counted.
Answer = Literal["text", "line", "number"]
# Continuations that one pass feeds at most: each takes a row of logits.
MOST_BRANCHES = 16
# Characters of a passage; each of its tokens begins spans that may need a pass.
_MOST_PASSAGE = 32_000
_RESISTANCE = Range(0, 1e6)
# What fills the cache where layers were skipped and are needed after all.
SkipCache = Literal["exact", "below"]

# Declare options under the headings of help.
draft_option = partial(option, group="speculative decoding (the text stays the same)")
_search = partial(option, group="search")
_compute = partial(option, group="reduced compute (lossy)")

# The choice of drafters is called `speculation` where options are flat and `drafters` in a group; likewise `search`,
# `compute` and `method`.
speculation_option = partial(
    draft_option,
    "auto",
    "speculative decoding: auto uses it where it is faster; off; or drafters, such as copy,recycle (edgeinfer methods "
    "lists them; default: auto)",
    metavar="MODE",
    flag="--speculation",
    basic=True,
    brief="draft tokens ahead, for speed: auto, off, or drafters such as copy,ngram (default: auto)",
)
search_option = partial(
    _search,
    "off",
    "samples, several replies at once; first-finish, the first of several to end; best-of, the likeliest of several; "
    "vote, the most common answer of several; momentum, less repetition; extract, the likeliest span of a passage; "
    "aligned, replies of a form as likely as the model finds them; beam, beam search; all but samples "
    "are lossy (edgeinfer methods lists more; default: off)",
    metavar="METHOD",
    flag="--search",
)
compute_option = partial(
    _compute,
    "full",
    "how much of the model each token uses: full, all of it; entropy, the draft model writes the easy parts; "
    "calibrated, some layers are skipped; exit, a pass ends early once the first layers are sure of the token "
    "(edgeinfer methods lists more; default: full)",
    metavar="METHOD",
    flag="--compute",
)


@dataclass(frozen=True, kw_only=True)
class DraftLength:
    """How far drafts reach, for a model and for each reply."""

    # Memory is planned for this many; only `speculation="auto"` takes fewer where the budget needs it.
    draft_max: int | None = draft_option(
        None, "maximum number of draft tokens (default: 15, or fewer if memory is short)", 1, 63
    )


@dataclass(frozen=True, kw_only=True)
class LoadDrafting(DraftLength):
    """Options of drafting that apply when a model is loaded."""

    # Also of a draft model in a GGUF file, where the default is all of its experts.
    draft_experts: int | None = draft_option(
        None, "experts per token when the model drafts for itself (default: half the usual number)", 1, 4096
    )
    remember: bool = draft_option(
        True, "do not keep what drafters learn from your texts (token ids and counts) for the next session"
    )


@dataclass(frozen=True, kw_only=True)
class ReplyDrafting(DraftLength):
    """Options of drafting that each reply may have."""

    draft_width: int = draft_option(
        1, "candidates per drafter and position; more than 1 drafts a tree (default: 1)", 1, _MOST_SIBLINGS
    )
    verification: str = draft_option(
        DEFAULT_VERIFICATION,
        "how drafts are verified: keyed gives the text of plain decoding, rejection gives its distribution (edgeinfer "
        "methods lists more; default: keyed)",
        metavar="RULE",
    )


@documented
@dataclass(frozen=True)
class Speculation(LoadDrafting, ReplyDrafting, OptionGroup):
    """Speculative decoding, for a model or for one reply:
    `edgeinfer.load(speculation=Speculation("copy,ngram", draft_max=8))`.

    `draft_experts` and `remember` are for load(), `draft_width` and `verification` for generate().
    """

    mode: ClassVar[tuple[str, str] | None] = ("drafters", "speculation")

    drafters: str = speculation_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_drafters(self.drafters)
        check_verification(self.verification)


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """Options of the methods of search. Ranges keep lengths to the power of the largest penalty numbers."""

    # Number i is drawn by seed + i.
    samples: int = _search(
        4,
        "number of replies for samples, first-finish, best-of and vote, and in a round of aligned (default: 4)",
        2,
        MOST_BRANCHES,
    )
    rounds: int = _search(8, "rounds of samples that aligned learns from (default: 8)", 1, 256)
    answer: Answer = _search(
        "text",
        "what vote compares: the whole text of a reply, its last line, or its last number (default: text)",
        choices=get_args(Answer),
    )
    voters: int | None = _search(
        None, "number of replies whose answers vote counts, those of the most lines (default: all)", 1, MOST_BRANCHES
    )
    beams: int = _search(4, "number of beams (default: 4)", 1, MOST_BRANCHES)
    beam_groups: int = _search(
        1,
        "number of beam groups; each avoids the tokens of earlier ones (default: 1, ordinary beam search)",
        1,
        MOST_BRANCHES,
    )
    diversity: float = _search(
        0.5, "penalty on a token's log-probability for each earlier beam group that chose it (default: 0.5)", 0, 100
    )
    length_penalty: float = _search(
        1.0, "exponent of the length in a beam's score, log-probability / length^X (default: 1)", 0, 10
    )
    candidates: int | None = _search(None, "number of candidate tokens for momentum (default: 5)", 2, MOST_BRANCHES)
    passage: str | None = _search(
        None, "text of which extract finds the likeliest span", goes_with=("search", "extract"), metavar="FILE"
    )
    # Longer runs are never repeated.
    resistance: tuple[float, ...] = _search(
        (0.0, 0.0, 0.0, 5.0),
        "momentum's penalties for repeating 1, 2, ... tokens, comma-separated (default: 0,0,0,5)",
        metavar="X,X",
        given="Sequence[float]",
    )
    resistance_weight: float = _search(
        0.2, "weight of momentum's penalties against a token's probability (default: 0.2)", 0, 1000
    )


@documented
@dataclass(frozen=True)
class Search(SearchSettings, OptionGroup):
    """How a reply is searched for: `model.generate(prompt, search=Search("beam", beams=8))`.

    All methods but "samples" are lossy; docs/METHODS.md says what each does.
    """

    mode: ClassVar[tuple[str, str] | None] = ("method", "search")

    method: str = search_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_search(self.method, self)


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """Options of the methods that take less than the whole model. Ranges end where more is surely a mistake: a pass a
    thousand times faster, or more bits than a vocabulary has."""

    compute_speedup: float = _compute(1.5, "target speedup of a pass that skips layers (default: 1.5)", 1, 1000)
    compute_share: float = _compute(
        0.5, "share of tokens that the large model generates, for entropy (default: 0.5)", 0, 1
    )
    entropy_threshold: float | None = _compute(
        None,
        "entropy in bits above which the large model generates a token (default: derived from the share)",
        0,
        64,
        "BITS",
    )
    entropy_stay: int = _compute(4, "minimum number of tokens before the other model takes over (default: 4)", 1, 1024)
    exit_layer: int | None = _compute(
        None,
        "number of layers after which a pass may end (default: as tuned, else the bundle's exit, else two thirds)",
        1,
        2048,
    )
    exit_confidence: float = _compute(
        0.9, "probability of the likeliest token above which a pass ends early (default: 0.9)", 0, 1, "P"
    )
    skip_cache: SkipCache = _compute(
        "exact",
        "keys and values of layers that an early exit left out: computed later (exact), or copied from the layer below "
        "(default: exact)",
        choices=get_args(SkipCache),
    )
    # The mean over the reply's tokens, by sampled passes of the whole model.
    quality_floor: float | None = _compute(
        None,
        "divergence from the full model's predictions above which the full model takes over (default: not checked)",
        0,
        1000,
        "NATS",
    )


@documented
@dataclass(frozen=True)
class ReducedCompute(ComputeSettings, OptionGroup):
    """How much of the model each token takes: `model.generate(prompt, compute=ReducedCompute("exit", exit_layer=8))`.

    All methods but "full" are lossy. The whole model evaluates every prompt.
    """

    mode: ClassVar[tuple[str, str] | None] = ("method", "compute")

    method: str = compute_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_compute(self.method, self)


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


def check_verification(verification: str) -> None:
    """Refuse an unknown verification."""
    if verification != DEFAULT_VERIFICATION:
        find_method("verifiers", verification)


def check_search(method: str, settings: SearchSettings) -> None:
    """Refuse an unknown search, and options that do not go together."""
    if method != "off":
        find_method("searches", method)
    even = settings.beams % settings.beam_groups == 0
    require(even, "beam_groups", settings.beam_groups, f"a divisor of beams={settings.beams}")
    if (method == "extract") != (settings.passage is not None):
        raise UsageError("passage and search='extract' go together.", "Give both, or neither.")
    require_few("passage", settings.passage or "", _MOST_PASSAGE)
    resistance = settings.resistance
    numbers = isinstance(resistance, list | tuple) and all(map(_RESISTANCE.holds, resistance))
    fits = numbers and 1 <= len(resistance) <= 16
    require(fits, "resistance", resistance, f"1 to 16 of these: {_RESISTANCE}")
    object.__setattr__(settings, "resistance", tuple(map(float, resistance)))


def check_compute(method: str, settings: ComputeSettings) -> None:
    """Refuse an unknown method, and options that exclude each other."""
    below = settings.skip_cache != "exact"
    if method != "full":
        refused = getattr(find_method("compute", method), "refuses", ())
        given = {"skip_cache": below, "quality_floor": settings.quality_floor is not None}
        for name in refused:
            if given[name]:
                refusal = Setting(name, getattr(settings, name)) + f" does not go with compute={method!r}."
                raise UsageError(refusal, "Leave one of them out.")
    elif below:
        message = "skip_cache='below' works with early exits only."
        raise UsageError(message, "Use it with " + Setting("compute", "exit") + ", or leave it out.")
    if below and settings.quality_floor is not None:
        message = "quality_floor needs the full model's cache, which skip_cache='below' does not keep."
        raise UsageError(message, "Leave skip_cache or quality_floor out.")
