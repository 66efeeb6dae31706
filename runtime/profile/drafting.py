"""What is kept of drafting on this device: what drafts came to, who drafts, and with which of the model's layers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import DrafterUse
from edgeinfer.runtime.profile.costs import DrafterRecord
from edgeinfer.runtime.profile.device_profile import DeviceProfile

# Name of its arrays in a profile.
TUNED_DRAFTING = "tuning"
DRAFTED = "drafted"
# Rounds after which what was seen counts half.
_HALF_LIFE = 2000.0
# Rounds that a reply counts for at most, however long: one text is one text. Rounds, and tokens of a drafter, that
# count as much as what is reckoned with before anything was seen.
_MOST_ROUNDS, _PRIOR_ROUNDS, _PRIOR_TOKENS = 100.0, 400.0, 100.0
_Uses = Mapping[str, DrafterUse]
# A drafter's name.
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
# Begins the names of the arrays of a drafter's tokens.
_TOKENS = "tokens."
# Steps of a bisection, which ends within a thousandth of a percent.
_HALVINGS = 16


@dataclass(frozen=True)
class TunedDrafting:
    """Drafting that pays on this device: an exit layer, and the drafters that `auto` asks; None if none."""

    exit_layer: int | None = None
    drafters: tuple[str, ...] | None = None

    def paid(self, drafter: str) -> bool:
        """Whether `edgeinfer tune --drafters` found that a drafter pays."""
        return self.drafters is not None and drafter in self.drafters

    def state(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        if self.exit_layer is not None:
            arrays["exit_layer"] = np.array([self.exit_layer])
        if self.drafters is not None:
            # Profiles keep numbers only.
            arrays["drafters"] = np.frombuffer(",".join(self.drafters).encode(), np.uint8)
        return arrays

    @classmethod
    def of(cls, profile: DeviceProfile, layers: int) -> TunedDrafting:
        """Read a profile's tuned drafting; what cannot be used is dropped and counts as untuned."""
        try:
            return cls.from_state(profile.arrays(TUNED_DRAFTING) or {}, layers)
        except StorageError:
            profile.drop(TUNED_DRAFTING)
            return cls()

    @classmethod
    def from_state(cls, state: Mapping[str, NDArray[Any]], layers: int) -> TunedDrafting:
        """Restore `state` for a model with this number of layers."""
        exits = state.get("exit_layer")
        if exits is not None and not (exits.shape == (1,) and exits.dtype == np.int64 and 1 <= int(exits[0]) < layers):
            raise StorageError("The tuned layers belong to another model.", "Run edgeinfer tune again.")
        names = state.get("drafters")
        return cls(None if exits is None else int(exits[0]), None if names is None else _names(names))


def _names(kept: NDArray[Any]) -> tuple[str, ...]:  # (N,)
    names = tuple(kept.tobytes().decode("ascii", "replace").split(",")) if kept.size else ()
    if kept.dtype != np.uint8 or not all(map(_NAME.fullmatch, names)):
        raise StorageError("The tuned drafters are not known here.", "Run edgeinfer tune --drafters again.")
    return names


class DraftHistory:
    """Counts what drafts came to over replies: rounds, and each drafter's tokens."""

    def __init__(self, kept: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._rounds: NDArray[np.float64] = np.zeros(2)  # all of them, and those with a draft
        self._tokens: defaultdict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))  # drafted and accepted
        if kept is not None and _is_sound(kept):
            self._rounds[:] = kept["rounds"]
            self._tokens |= {name: tokens.copy() for name, tokens in _tokens(kept).items()}

    def add(self, rounds: int, plain: int, drafters: _Uses) -> None:
        """Count a reply; `rounds` is 0 where other replies decided what was drafted, `plain` are without a draft."""
        if not rounds:
            return
        share = min(1.0, _MOST_ROUNDS / rounds)
        faded = 0.5 ** (share * rounds / _HALF_LIFE)
        self._rounds *= faded
        for tokens in self._tokens.values():
            tokens *= faded
        self._rounds += share * rounds, share * (rounds - plain)
        for name, use in drafters.items():
            self._tokens[name] += share * use.drafted, share * use.accepted

    def state(self) -> dict[str, NDArray[Any]]:
        tokens = {_TOKENS + name: tokens.copy() for name, tokens in self._tokens.items()}
        return {"rounds": self._rounds.copy()} | tokens


def drafter_records(kept: Mapping[str, NDArray[Any]] | None, drafters: Iterable[str]) -> dict[str, DrafterRecord]:
    """The record of each of these drafters; empty where no round was seen."""
    if kept is None or not _is_sound(kept) or not kept["rounds"][0]:
        return {}
    rounds, drafting = (float(count) for count in kept["rounds"])
    counts = _tokens(kept)
    total, trust = sum(float(drafted) for drafted, _ in counts.values()), rounds / (rounds + _PRIOR_ROUNDS)
    found = {}
    for name in drafters:
        tokens, right = counts.get(name, (0.0, 0.0))
        if not tokens:
            found[name] = DrafterRecord(0.0, 0.0, trust, 0.0)
            continue
        # A round that several drafted counts for each by its tokens.
        share, length = drafting / rounds * tokens / total, total / drafting
        rate = _rate(float(right / tokens) * length, length)
        found[name] = DrafterRecord(float(share), rate, trust, float(tokens / (tokens + _PRIOR_TOKENS)))
    return found


def _rate(accepted: float, length: float) -> float:
    """Rate per token at which this many tokens of a draft are accepted on average."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        mean = length if rate == 1 else rate * (1 - rate**length) / (1 - rate)
        low, high = (rate, high) if mean < accepted else (low, rate)
    return low


def _tokens(kept: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:  # of (2,)
    return {name.removeprefix(_TOKENS): array for name, array in kept.items() if name.startswith(_TOKENS)}


def _is_sound(kept: Mapping[str, NDArray[Any]]) -> bool:
    counts = _tokens(kept)
    if "rounds" not in kept or len(kept) != 1 + len(counts) or not all(map(_NAME.fullmatch, counts)):
        return False
    rounds = kept["rounds"]
    pairs = (rounds, *counts.values())
    if any(pair.shape != (2,) or pair.dtype != np.float64 or not np.isfinite(pair).all() for pair in pairs):
        return False
    # Sums fade alike, but each rounds on its own.
    ordered = rounds[1] <= rounds[0] + 1e-6 and all(pair[1] <= pair[0] + 1e-6 for pair in counts.values())
    return bool(ordered and all((pair >= 0).all() for pair in pairs))
