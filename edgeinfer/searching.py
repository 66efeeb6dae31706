"""Decoding that looks at several continuations or reweighs one: what may be asked for, and what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args

from edgeinfer.errors import UsageError
from edgeinfer.option_groups import OptionGroup
from edgeinfer.options import Range, option, options_of, require, require_few
from edgeinfer.records import dataclass

# Ways of searching, as options name them; runtime/search has them, a test holds the two equal.
SearchMethod = Literal[
    "off", "samples", "first-finish", "best-of", "vote", "cautious", "lookahead", "contrast", "momentum",
    "extract", "aligned", "particles", "astar", "beam", "anchored",
]  # fmt: skip
SEARCHES: tuple[str, ...] = get_args(SearchMethod)
# What of a sampled text is its answer, where answers are counted.
Answer = Literal["text", "line", "number"]
ANSWERS: tuple[str, ...] = get_args(Answer)
# Continuations that one pass feeds at most: each takes a row of logits.
MOST_BRANCHES = 16
# Characters of a passage; each of its tokens begins spans that may need a pass.
_MOST_PASSAGE = 32_000
_RESISTANCE = Range(0, 1e6)
# The heading of help.
_SEARCH = "search"


# The choice of a method is called `search` where options are flat and `method` in a group.
_METHOD: dict[str, Any] = {
    "help": "samples, several replies at once; first-finish, the first of several to end; best-of, the likeliest of "
    "several; vote, the most common answer of several; cautious, lookahead or contrast, more care where the next token "
    "is uncertain; momentum, less repetition; extract, the likeliest span of a passage; aligned, replies of a form as "
    "likely as the model finds them; particles, replies by the model's probability to a power and a scorer; astar, the "
    "best beginnings grow by drawn lines; beam, beam search; anchored, replies that stay near the draft model's "
    "distribution; all but samples are lossy (default: off)",
    "choices": SEARCHES,
    "cli": "--search",
    "group": _SEARCH,
}


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """What the methods of searching go by.

    Ranges keep lengths to the power of the largest penalty, and logits moved by the largest contrast, numbers.
    """

    # Number i is drawn by seed + i.
    samples: int = option(
        4,
        help="number of replies for samples, first-finish, best-of and vote, in a round of aligned, of particles, and "
        "of lines that astar draws behind a beginning (default: 4)",
        low=2,
        high=MOST_BRANCHES,
        cli="--samples",
        metavar="N",
        group=_SEARCH,
    )
    rounds: int = option(
        8,
        help="rounds of samples that aligned learns from, or beginnings that astar expands (default: 8)",
        low=1,
        high=256,
        cli="--rounds",
        metavar="N",
        group=_SEARCH,
    )
    power: float = option(
        2.0,
        help="power to which particles raise the model's probabilities (default: 2)",
        low=0,
        high=32,
        above=True,
        cli="--power",
        metavar="X",
        group=_SEARCH,
    )
    resample_every: int = option(
        16,
        help="number of tokens after which particles are weighed and resampled (default: 16)",
        low=1,
        high=4096,
        cli="--resample-every",
        metavar="N",
        group=_SEARCH,
    )
    # A program's own code, so that neither requests nor bundles can give one.
    scorer: Callable[[str, bool], float] | None = option(
        None,
        help="function of a text and whether it has ended, which gives the logarithm of particles' weight, or what "
        "astar prefers",
        wire=False,
    )
    answer: Answer = option(
        "text",
        help="what vote compares: the whole text of a reply, its last line, or its last number (default: text)",
        choices=ANSWERS,
        cli="--answer",
        group=_SEARCH,
    )
    voters: int | None = option(
        None,
        help="number of replies whose answers vote counts, those of the most lines (default: all)",
        low=1,
        high=MOST_BRANCHES,
        cli="--voters",
        metavar="N",
        group=_SEARCH,
    )
    beams: int = option(
        4,
        help="number of beams (default: 4)",
        low=1,
        high=MOST_BRANCHES,
        cli="--beams",
        metavar="N",
        group=_SEARCH,
    )
    beam_groups: int = option(
        1,
        help="number of beam groups; each avoids the tokens of earlier ones (default: 1, ordinary beam search)",
        low=1,
        high=MOST_BRANCHES,
        cli="--beam-groups",
        metavar="N",
        group=_SEARCH,
    )
    diversity: float = option(
        0.5,
        help="penalty on a token's log-probability for each earlier beam group that chose it (default: 0.5)",
        low=0,
        high=100,
        cli="--diversity",
        metavar="X",
        group=_SEARCH,
    )
    length_penalty: float = option(
        1.0,
        help="exponent of the length in a beam's score, log-probability / length^X (default: 1)",
        low=0,
        high=10,
        cli="--length-penalty",
        metavar="X",
        group=_SEARCH,
    )
    look_ahead: int = option(
        5,
        help="number of tokens that lookahead evaluates ahead (default: 5)",
        low=1,
        high=64,
        cli="--look-ahead",
        metavar="N",
        group=_SEARCH,
    )
    candidates: int | None = option(
        None,
        help="number of candidate tokens for lookahead and momentum (default: 3 and 5)",
        low=2,
        high=MOST_BRANCHES,
        cli="--candidates",
        metavar="N",
        group=_SEARCH,
    )
    uncertainty: float | None = option(
        None,
        help="entropy in nats above which lookahead and contrast treat a token as uncertain (default for lookahead: "
        "what edgeinfer tune --uncertainty learnt, else 1.5; for contrast: its paper's own measure)",
        low=0,
        high=100,
        cli="--uncertainty",
        metavar="X",
        group=_SEARCH,
    )
    lame_prompt: str | None = option(
        None,
        help="worse prompt, from whose reply contrast steers away",
        goes_with=("search", "contrast"),
        cli="--lame-prompt",
        metavar="TEXT",
        group=_SEARCH,
    )
    contrast_strength: float = option(
        0.7,
        help="how strongly contrast steers away from the worse prompt (default: 0.7)",
        low=0,
        high=100,
        cli="--contrast-strength",
        metavar="X",
        group=_SEARCH,
    )
    passage: str | None = option(
        None,
        help="text of which extract finds the likeliest span",
        goes_with=("search", "extract"),
        cli="--passage",
        metavar="FILE",
        group=_SEARCH,
    )
    # The authors' defaults, of prompts and replies in tokens.
    anchor_budget: float = option(
        0.15,
        help="nats by which each token of anchored adds to how far the reply may diverge from the draft model "
        "(default: 0.15)",
        low=0,
        high=1000,
        cli="--anchor-budget",
        metavar="NATS",
        group=_SEARCH,
    )
    anchor_debt: int = option(
        5,
        help="number of the prompt's tokens, those that the model finds likelier than the draft model by most, whose "
        "mean log-ratio anchored takes from the budget; 0 takes none (default: 5)",
        low=0,
        high=1024,
        cli="--anchor-debt",
        metavar="N",
        group=_SEARCH,
    )
    # Longer runs are never repeated.
    resistance: tuple[float, ...] = option(
        (0.0, 0.0, 0.0, 5.0),
        help="momentum's penalties for repeating 1, 2, ... tokens, comma-separated (default: 0,0,0,5)",
        cli="--resistance",
        metavar="X,X",
        group=_SEARCH,
    )
    resistance_weight: float = option(
        0.2,
        help="weight of momentum's penalties against a token's probability (default: 0.2)",
        low=0,
        high=1000,
        cli="--resistance-weight",
        metavar="X",
        group=_SEARCH,
    )


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SearchSettings):
    """How a reply is searched for, as one of its options; `Search` tells of the methods."""

    search: SearchMethod = option("off", **_METHOD)

    def check_search(self) -> None:
        """Refuses options that do not go together.

        Raises:
            UsageError: there are such.
        """
        _check(self.search, self)


@dataclass(frozen=True)
class Search(SearchSettings, OptionGroup):
    """How a reply is searched for: `model.generate(prompt, search=Search("beam", beams=8))`.

    All methods but "samples" are lossy.

    Attributes:
        method: "samples" draws several replies side by side and answers with the first, the others are in
            `result.search.texts`; "first-finish" draws several and answers with the first to end; "best-of" draws
            several and answers with the one of the highest mean log-probability; "vote" draws several and answers with
            one whose answer most of them have (self-consistency); "cautious" draws several continuations up to the
            next punctuation where the next token is uncertain, and goes on with the least perplexing (CNTP);
            "lookahead" looks a few tokens ahead behind each of the likeliest tokens where the next is uncertain
            (AdaDec); "contrast" moves away from what the model says to a worse prompt where the next token is
            uncertain (USCD); "momentum" is greedy, but resists repeating itself; "extract" answers with the span of a
            passage that the model finds likeliest, word for word; "aligned" draws replies that follow a schema, a
            grammar or choices as often as the model writes them, which masking alone does not (ASAp); "particles" draws
            several replies by p(reply)**power * exp(scorer(reply)) and answers with one by its weight (Power-SMC,
            reward-guided SMC); "astar" draws several next lines behind the best beginning so far, and goes on so
            until the best one is whole; "beam" keeps several of the likeliest beginnings (diverse beam search);
            "anchored" draws from a mean of the model's distribution and the draft model's, within a budget of
            divergence from the latter (Anchored Decoding).
        samples: number of replies for "samples", "first-finish", "best-of" and "vote", where number i is drawn with
            seed + i; number of "particles", and of lines that "astar" draws at once.
        rounds: for "aligned": rounds of so many samples, of which each makes the next truer; for "astar": beginnings
            that it expands at most.
        power, resample_every: for "particles": the power, and after how many tokens those of little weight are
            replaced.
        scorer: for "particles": function of a text and whether it has ended, which gives the logarithm of a weight: 0
            for what is as welcome as any, -inf for what is never to be chosen; for "astar": gives how good it is, else
            that is the mean log-probability of the tokens.
        answer: what "vote" compares: the whole "text" of a reply, its last "line", or its last "number".
        voters: of "vote": only so many replies are counted, those of the most lines (complexity-based consistency).
        beams, beam_groups, diversity, length_penalty: for "beam": number of beams, groups of them that avoid the tokens
            of earlier groups, how much they avoid them, and the exponent of the length that divides scores.
        look_ahead: number of tokens that "lookahead" evaluates ahead.
        candidates: number of candidate tokens for "lookahead" and "momentum"; None means 3 and 5.
        uncertainty: entropy in nats above which "lookahead" and "contrast" treat a token as uncertain; None means for
            "lookahead" what `tools.tune_uncertainty` learnt of the model, else 1.5, for "contrast" that the same token
            is drawn twice with a chance of at most 0.8.
        lame_prompt, contrast_strength: for "contrast": the worse prompt, in a chat instead of the user's last message,
            and how strongly to steer away from it.
        passage: for "extract": the text of which the reply is a span.
        anchor_budget, anchor_debt: for "anchored": nats that each token adds to the budget, and how many of the
            prompt's log-ratios tell what it owes before its first token (0: nothing).
        resistance, resistance_weight: for "momentum": penalties for repeating 1, 2, ... tokens, and their weight.
    """

    mode: ClassVar[tuple[str, str] | None] = ("method", "search")

    method: SearchMethod = option("off", **_METHOD)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.method, self)


def _check(method: str, settings: SearchSettings) -> None:
    even = settings.beams % settings.beam_groups == 0
    require(even, "beam_groups", settings.beam_groups, f"a divisor of beams={settings.beams}")
    partners = {name: each.goes_with[1] for name, each in options_of(type(settings)).items() if each.goes_with}
    for name, needed in partners.items():
        if (method == needed) != (getattr(settings, name) is not None):
            raise UsageError(f"{name} and search={needed!r} go together.", "Give both, or neither.")
    require(settings.scorer is None or callable(settings.scorer), "scorer", settings.scorer, "a function")
    if settings.scorer is not None and method not in ("particles", "astar"):
        raise UsageError("A scorer needs search='particles' or 'astar'.", "Give both, or leave out the scorer.")
    require_few("passage", settings.passage or "", _MOST_PASSAGE)
    resistance = settings.resistance
    numbers = isinstance(resistance, list | tuple) and all(map(_RESISTANCE.holds, resistance))
    fits = numbers and 1 <= len(resistance) <= 16
    require(fits, "resistance", resistance, f"1 to 16 of these: {_RESISTANCE}")
    object.__setattr__(settings, "resistance", tuple(map(float, resistance)))


@dataclass(frozen=True)
class SearchedText:
    """One of several texts that were looked at to the end.

    Attributes:
        score: mean natural log-probability of its tokens by the model itself, a stop token included.
        finish_reason: "stop" where it ended by itself, else "length".
        weight: its share of the weight of all particles; None where texts have none.
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: str
    weight: float | None = None


@dataclass(frozen=True)
class SearchUse:
    """What searching did in a reply.

    Attributes:
        search: as it was asked for.
        lossless: whether the text is the one that plain decoding with these options and this seed gives.
        passes: over the model, those of the prompt not counted.
        rows: tokens that were fed in them.
        branches: continuations that were begun.
        trials: continuations among which was chosen; of "momentum" and "contrast", tokens that were chosen otherwise
            than plainly; of "anchored", tokens drawn from another distribution than the model's.
        chosen: index in `texts` of the reply.
        texts: whole texts that were looked at; empty where a way only looks at a part at a time.
        divergence: of "anchored": nats by which the distributions that tokens were drawn from diverge from the draft
            model's, added up.
        divergence_allowed: nats that they might have diverged by.
    """

    search: str
    lossless: bool
    passes: int = 0
    rows: int = 0
    branches: int = 0
    trials: int = 0
    chosen: int = 0
    texts: tuple[SearchedText, ...] = ()
    divergence: float | None = None
    divergence_allowed: float | None = None
