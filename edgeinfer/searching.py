"""Decoding that looks at several continuations or reweighs one: what may be asked for, and what it did.

Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgeinfer.errors import UsageError
from edgeinfer.option_checks import Range, require, require_ranges

__all__ = ["ANSWERS", "MOST_BRANCHES", "SEARCHES", "SEARCH_RANGES", "SearchOptions", "SearchUse", "SearchedText"]

# Ways of searching, as options name them; runtime/search has them, a test holds the two equal.
SEARCHES = (
    "off", "samples", "first-finish", "vote", "cautious", "lookahead", "contrast", "momentum", "beam"
)  # fmt: skip
# What of a sampled text is its answer, where answers are counted.
ANSWERS = ("text", "line", "number")
# Continuations that one pass feeds at most: each takes a row of logits.
MOST_BRANCHES = 16
# Lengths to the power of the largest penalty, and logits moved by the largest contrast, are still numbers.
SEARCH_RANGES = {
    "samples": Range(2, MOST_BRANCHES, whole=True),
    "beams": Range(1, MOST_BRANCHES, whole=True),
    "beam_groups": Range(1, MOST_BRANCHES, whole=True),
    "look_ahead": Range(1, 64, whole=True),
    "candidates": Range(2, MOST_BRANCHES, whole=True, optional=True),
    "diversity": Range(0, 100),
    "length_penalty": Range(0, 10),
    "uncertainty": Range(0, 100),
    "contrast_strength": Range(0, 100),
    "resistance_weight": Range(0, 1000),
}
_RESISTANCE = Range(0, 1e6)


@dataclass(frozen=True)
class SearchOptions:
    """How a reply is searched for.

    Attributes:
        search: one of SEARCHES:
            "samples" draws several replies side by side and answers with the first, the others are in SearchUse.texts;
            "first-finish" draws several and answers with the first to end;
            "vote" draws several and answers with one whose answer most of them have (self-consistency);
            "cautious" draws several continuations up to the next punctuation where the next token is uncertain, and
            goes on with the least perplexing (CNTP);
            "lookahead" looks a few tokens ahead behind each of the likeliest tokens where the next is uncertain
            (AdaDec);
            "contrast" moves away from what the model says to a worse prompt where the next token is uncertain (USCD);
            "momentum" is greedy, but resists repeating itself;
            "beam" keeps several of the likeliest beginnings (diverse beam search).
            All are lossy but "samples".
        samples: replies that are drawn, of "samples", "first-finish" and "vote". Number i is drawn by seed + i.
        answer: what of a text "vote" counts: one of ANSWERS, the whole, its last line or its last number.
        beams: beginnings that "beam" keeps.
        beam_groups: groups of them, each kept from what those before it chose; 1 is ordinary beam search.
        diversity: what a group's tokens lose in log-probability for each earlier group that chose them.
        length_penalty: "beam" compares replies by their log-probability divided by their length to this power.
        look_ahead: tokens that "lookahead" looks ahead.
        candidates: tokens that "lookahead" (None is 3) and "momentum" (None is 5) choose among.
        uncertainty: entropy in nats above which a token is uncertain, of "lookahead" and "contrast".
        lame_prompt: of "contrast", what the reply must not be an answer to.
        contrast_strength: how far "contrast" moves.
        resistance: of "momentum", what repeating runs of 1, 2, ... tokens costs; longer ones are never repeated.
        resistance_weight: by which that is multiplied before it is taken off a token's probability.
    """

    search: str = "off"
    samples: int = 4
    answer: str = "text"
    beams: int = 4
    beam_groups: int = 1
    diversity: float = 0.5
    length_penalty: float = 1.0
    look_ahead: int = 5
    candidates: int | None = None
    uncertainty: float = 1.5
    lame_prompt: str | None = None
    contrast_strength: float = 0.5
    resistance: tuple[float, ...] = (0.0, 0.0, 0.0, 5.0)
    resistance_weight: float = 0.2

    def check_search(self) -> None:
        """Refuses values of a wrong type or out of range.

        Raises:
            UsageError: one is.
        """
        for name, known in (("search", SEARCHES), ("answer", ANSWERS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in known:
                raise UsageError(f"Unknown {name} {value!r}.", f"Choose one of {', '.join(known)}.")
        require_ranges(self, SEARCH_RANGES)
        even = self.beams % self.beam_groups == 0
        require(even, "beam_groups", self.beam_groups, f"a divisor of beams={self.beams}")
        lame, resistance = self.lame_prompt, self.resistance
        require(isinstance(lame, str | None), "lame_prompt", lame, "a text")
        if (self.search == "contrast") != (lame is not None):
            raise UsageError("lame_prompt and search='contrast' go together.", "Give both, or neither.")
        numbers = isinstance(resistance, list | tuple) and all(map(_RESISTANCE.holds, resistance))
        fits = numbers and 1 <= len(resistance) <= 16
        require(fits, "resistance", resistance, f"1 to 16 of these: {_RESISTANCE}")
        object.__setattr__(self, "resistance", tuple(map(float, resistance)))


@dataclass(frozen=True)
class SearchedText:
    """One of several texts that were looked at to the end.

    Attributes:
        score: mean natural log-probability of its tokens by the model itself, a stop token included.
        finish_reason: "stop" where it ended by itself, else "length".
    """

    text: str
    token_ids: tuple[int, ...]
    score: float
    finish_reason: str


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
            than plainly.
        chosen: index in `texts` of the reply.
        texts: whole texts that were looked at; empty where a way only looks at a part at a time.
    """

    search: str
    lossless: bool
    passes: int = 0
    rows: int = 0
    branches: int = 0
    trials: int = 0
    chosen: int = 0
    texts: tuple[SearchedText, ...] = ()
