"""What drafting is worth in tokens per millisecond, to the controller of rounds and to plans that foresee them. The
rules are the renewal-reward ones (algorithms.md A4): what counts is tokens over milliseconds, both summed over rounds,
and a further guess pays while it is worth more than the rate times its milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from edgeinfer.core.records import dataclass
from edgeinfer.runtime.profile.drafting import DrafterRecord

# A drafter that costs less than this share of a pass is always asked; what it says also teaches its acceptance.
CHEAP = 0.02
# Where asking tables costs more than this share of a pass, "auto" decodes plainly: a model so small would have to be
# guessed right half of the time for drafts to pay for their own making.
_MOST_ASKING = 0.4
# Milliseconds of looking up a guess: asking three tables takes an eighth of one (docs/log/2026-11-21.md).
_LOOKUP_MS = 0.04
# The rate is a fixed point that a few steps reach from below, and steps smaller than this share end the search.
_STEPS, _STEP = 12, 1e-6


@dataclass(frozen=True)
class Prior:
    """Expectations of a drafter before anything was measured; fields as in `Prospect`. `share` is of a target's pass
    that a guess takes, 0 for tables; `model` says whether it is or runs the draft model."""

    covers: float
    accepted: float
    share: float = 0.0
    at_once: bool = False
    most: int = 0
    tables: bool = False
    model: bool = False


@dataclass(frozen=True)
class Prospect:
    """What a drafter is expected to do for a text."""

    drafter: str
    covers: float  # share of the rounds without a draft of those before it in which it drafts
    accepted: float  # rate at which a token of its drafts is accepted where those before it were
    guess_ms: float
    at_once: bool = False  # whether the first guess of a round pays for all of them
    most: int = 0  # tokens of its drafts at most; 0 is any number
    tables: bool = False  # whether it looks guesses up, so that asking costs time in every round
    model: bool = False  # whether it is the draft model, or runs it


class Ahead(NamedTuple):
    """Expected worth of further guesses in tokens, less what their time could decode otherwise (0 if none pays), and
    their tokens."""

    worth: float
    length: int
    tokens: float


def prospects_by(
    priors: Mapping[str, Prior],
    pass_ms: float,
    guess_ms: Mapping[str, float] = MappingProxyType({}),
    records: Mapping[str, DrafterRecord] = MappingProxyType({}),
) -> tuple[Prospect, ...]:
    """Combine expectations of drafters with what was measured of them."""
    found, left = [], 1.0
    for name, prior in priors.items():
        ms = guess_ms.get(name, _LOOKUP_MS if prior.tables else prior.share * pass_ms)
        covers, accepted = prior.covers, prior.accepted
        if name in guess_ms and name in records:
            record = records[name]
            seen = min(1.0, record.share / left) if left > 0 else 0.0
            left -= record.share
            covers += record.trust * (seen - covers)
            accepted += record.accepted_trust * (record.accepted - accepted)
        found.append(Prospect(name, covers, accepted, ms, prior.at_once, prior.most, prior.tables, prior.model))
    return tuple(found)


def tokens_per_ms(tokens: float, pass_ms: float, guessed_ms: float, round_ms: float) -> float:
    return tokens / (pass_ms + guessed_ms + round_ms)


def asking_ms(prospects: Sequence[Prospect], round_ms: float) -> float:
    """Milliseconds of a round besides its pass, if only the tables are asked."""
    return round_ms + sum(each.guess_ms for each in prospects if each.tables)


def asking_pays(asking_ms: float, pass_ms: float) -> bool:
    """Whether tables are worth asking, compared with a pass over one row."""
    return asking_ms <= _MOST_ASKING * pass_ms


def look_ahead(
    pass_ms: Sequence[float],
    size: int,
    most: int,
    likely: float,
    accepted: float,
    rate: float,
    guess_ms: float,
    *,
    once: bool = False,
) -> Ahead:
    """Find the best worth of further guesses behind a path; `pass_ms` is by rows from 1 on, `rate` in tokens per
    millisecond."""
    worth, length, tokens = 0.0, 0, 0.0
    gained, now = 0.0, pass_ms[size]
    for further in range(1, most + 1):
        likely *= accepted
        gained += likely
        net = gained - rate * (pass_ms[size + further] - now + (1 if once else further) * guess_ms)
        if net > worth:
            worth, length, tokens = net, further, gained
    return Ahead(worth, length, tokens)


def decoding_rate(prospects: Sequence[Prospect], pass_ms: Sequence[float], round_ms: float) -> float:
    """Tokens per millisecond of decoding that drafts wherever that pays; `pass_ms` is by rows from 1 on."""
    plain = 1 / pass_ms[0]
    asking = asking_ms(prospects, round_ms)
    if not prospects or not asking_pays(asking, pass_ms[0]):
        return plain
    rate = plain
    for _ in range(_STEPS):
        tokens, ms, left = 1.0, pass_ms[0] + asking, 1.0
        for each in prospects:
            most = min(each.most or len(pass_ms), len(pass_ms) - 1)
            ahead = look_ahead(pass_ms, 0, most, 1.0, each.accepted, rate, each.guess_ms, once=each.at_once)
            share = left * each.covers if ahead.length else 0.0
            guesses = 1 if each.at_once else ahead.length
            tokens += share * ahead.tokens
            ms += share * (pass_ms[ahead.length] - pass_ms[0] + guesses * each.guess_ms)
            left -= share
        found = tokens / ms
        if found <= rate * (1 + _STEP):
            break
        rate = found
    return rate
