"""Decoding that looks at several continuations or reweighs one: what may be asked for, and what it did."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

from edgeinfer.errors import UsageError
from edgeinfer.methods import find_method
from edgeinfer.option_groups import OptionGroup
from edgeinfer.options import Range, option, options_of, require, require_few
from edgeinfer.records import dataclass

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
    "several; vote, the most common answer of several; momentum, less repetition; extract, the likeliest span of a "
    "passage; aligned, replies of a form as likely as the model finds them; beam, beam search; anchored, replies that "
    "stay near the draft model's distribution; all but samples are lossy (edgeinfer methods lists more; default: off)",
    "metavar": "METHOD",
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
        help="number of replies for samples, first-finish, best-of and vote, and in a round of aligned (default: 4)",
        low=2,
        high=MOST_BRANCHES,
        cli="--samples",
        metavar="N",
        group=_SEARCH,
    )
    rounds: int = option(
        8,
        help="rounds of samples that aligned learns from (default: 8)",
        low=1,
        high=256,
        cli="--rounds",
        metavar="N",
        group=_SEARCH,
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
    candidates: int | None = option(
        None,
        help="number of candidate tokens for momentum (default: 5)",
        low=2,
        high=MOST_BRANCHES,
        cli="--candidates",
        metavar="N",
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

    search: str = option("off", **_METHOD)

    def check_search(self) -> None:
        """Refuse an unknown search, and options that do not go together."""
        _check(self.search, self)


@dataclass(frozen=True)
class Search(SearchSettings, OptionGroup):
    """How a reply is searched for: `model.generate(prompt, search=Search("beam", beams=8))`.

    All methods but "samples" are lossy.

    Attributes:
        method: "samples" draws several replies side by side and answers with the first, the others are in
            `result.search.texts`; "first-finish" draws several and answers with the first to end; "best-of" draws
            several and answers with the one of the highest mean log-probability; "vote" draws several and answers with
            one whose answer most of them have (self-consistency); "momentum" is greedy, but resists repeating itself;
            "extract" answers with the span of a passage that the model finds likeliest, word for word; "aligned" draws
            replies that follow a schema, a grammar or choices as often as the model writes them, which masking alone
            does not (ASAp); "beam" keeps several of the likeliest beginnings (diverse beam search); "anchored" draws
            from a mean of the model's distribution and the draft model's, within a budget of divergence from the latter
            (Anchored Decoding); others are research.
        samples: number of replies that are drawn; number i is drawn with seed + i.
        rounds: for "aligned": rounds of so many samples, of which each makes the next truer.
        answer: what "vote" compares: the whole "text" of a reply, its last "line", or its last "number".
        voters: of "vote": only so many replies are counted, those of the most lines (complexity-based consistency).
        beams, beam_groups, diversity, length_penalty: for "beam": number of beams, groups of them that avoid the tokens
            of earlier groups, how much they avoid them, and the exponent of the length that divides scores.
        candidates: number of candidate tokens for "momentum"; None means 5.
        passage: for "extract": the text of which the reply is a span.
        anchor_budget, anchor_debt: for "anchored": nats that each token adds to the budget, and how many of the
            prompt's log-ratios tell what it owes before its first token (0: nothing).
        resistance, resistance_weight: for "momentum": penalties for repeating 1, 2, ... tokens, and their weight.
    """

    mode: ClassVar[tuple[str, str] | None] = ("method", "search")

    method: str = option("off", **_METHOD)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.method, self)


def _check(method: str, settings: SearchSettings) -> None:
    if method != "off":
        find_method("searches", method)
    even = settings.beams % settings.beam_groups == 0
    require(even, "beam_groups", settings.beam_groups, f"a divisor of beams={settings.beams}")
    partners = {name: each.goes_with[1] for name, each in options_of(type(settings)).items() if each.goes_with}
    for name, needed in partners.items():
        if (method == needed) != (getattr(settings, name) is not None):
            raise UsageError(f"{name} and search={needed!r} go together.", "Give both, or neither.")
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
        trials: continuations among which was chosen; of searches token by token, tokens that were chosen differently
            from plain decoding.
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
