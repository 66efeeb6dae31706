"""What is kept of drafting on this device: what drafts came to, who drafts, and with which of the model's layers."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgeinfer.core.errors import StorageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.results import DrafterUse
from edgeinfer.runtime.profile.costs import DrafterRecord
from edgeinfer.runtime.profile.device_profile import DeviceProfile

# Tokens of a window: texts of their own seldom share so many in a row.
_WINDOW = 16
# Of long texts one window in so many is kept, chosen by what it holds, so that they are the same wherever it begins; of
# texts of fewer than so many all are.
_ONE_IN, _FEW = np.uint64(8), 32
# Fingerprints that are kept, the latest: of some 30,000 tokens, in 32 KB.
MOST_SEEN = 4096
# Of the windows of a new text, what was seen at most: set phrases come again.
_MOST_REPEATED = 0.125
_POWERS = np.array([pow(0x9E3779B97F4A7C15, place, 1 << 64) for place in range(1, _WINDOW + 1)], np.uint64)
_MIX = np.uint64(0xFF51AFD7ED558CCD)


class SeenTexts:
    """Remembers prompts and replies by fingerprints of them, which may be `kept` from an earlier session."""

    def __init__(self, kept: NDArray[np.uint64] | None = None) -> None:
        self.fingerprints = np.zeros(0, np.uint64) if kept is None else kept[-MOST_SEEN:].copy()

    def observe(self, prompt: Sequence[int], reply: Sequence[int]) -> bool:
        """Remembers a reply; whether it is new: its prompt was never answered, and hardly any of it was seen before,
        in other replies or earlier in this one, which goes round in circles then."""
        asked = np.frombuffer(hashlib.sha256(np.array(prompt, np.int64).tobytes()).digest()[:8], np.uint64)
        windows = _windows([*prompt[-(_WINDOW - 1) :], *reply])
        different = np.unique(windows)
        chosen = different[different % _ONE_IN == 0]
        looked_up = chosen if len(chosen) else different
        least, known = 1 - _MOST_REPEATED, np.isin(looked_up, self.fingerprints)
        repeats = len(different) < least * len(windows) or np.count_nonzero(~known) < least * len(looked_up)
        is_new = not (repeats or np.isin(asked, self.fingerprints).any())
        kept = chosen if len(windows) >= _FEW else different
        self.fingerprints = np.concatenate([self.fingerprints[~np.isin(self.fingerprints, kept)], asked, kept])[
            -MOST_SEEN:
        ]
        return is_new


def _windows(tokens: Sequence[int]) -> NDArray[np.uint64]:  # (N,)
    text = np.array(tokens, np.uint64)
    if len(text) < _WINDOW:
        return np.zeros(0, np.uint64)
    hashes = ((sliding_window_view(text, _WINDOW) + np.uint64(1)) * _POWERS).sum(1, dtype=np.uint64) * _MIX
    mixed: NDArray[np.uint64] = hashes ^ (hashes >> np.uint64(33))
    return mixed


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
    """Drafting that pays on this device: an exit layer, blocks that run (2 L,), and the drafters that `auto` asks; None
    if none."""

    exit_layer: int | None = None
    layer_mask: NDArray[np.bool_] | None = None
    drafters: tuple[str, ...] | None = None

    def paid(self, drafter: str) -> bool:
        """Whether `edgeinfer tune --drafters` found that a drafter pays."""
        return self.drafters is not None and drafter in self.drafters

    def state(self) -> dict[str, NDArray[Any]]:
        arrays: dict[str, NDArray[Any]] = {}
        if self.exit_layer is not None:
            arrays["exit_layer"] = np.array([self.exit_layer])
        if self.layer_mask is not None:
            arrays["layer_mask"] = self.layer_mask
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
        mask, exits = state.get("layer_mask"), state.get("exit_layer")
        fits = mask is None or (mask.dtype == np.bool_ and mask.shape == (2 * layers,))
        if exits is not None:
            fits = fits and exits.shape == (1,) and exits.dtype == np.int64 and 1 <= int(exits[0]) < layers
        if not fits:
            raise StorageError("The tuned layers belong to another model.", "Run edgeinfer tune again.")
        names = state.get("drafters")
        return cls(None if exits is None else int(exits[0]), mask, None if names is None else _names(names))


def _names(kept: NDArray[Any]) -> tuple[str, ...]:  # (N,)
    names = tuple(kept.tobytes().decode("ascii", "replace").split(",")) if kept.size else ()
    if kept.dtype != np.uint8 or not all(map(_NAME.fullmatch, names)):
        raise StorageError("The tuned drafters are not known here.", "Run edgeinfer tune --drafters again.")
    return names


class DraftHistory:
    """Counts what drafts came to over replies of new texts: rounds, and each drafter's tokens. A repeated text is
    predicted by what drafters remember of it, which no new one is."""

    def __init__(self, kept: Mapping[str, NDArray[Any]] | None = None) -> None:
        self._rounds: NDArray[np.float64] = np.zeros(2)  # all of them, and those with a draft
        self._tokens: defaultdict[str, NDArray[np.float64]] = defaultdict(lambda: np.zeros(2))  # drafted and accepted
        self.fingerprints = SeenTexts()
        if kept is not None and _is_sound(kept):
            self._rounds[:], self.fingerprints = kept["rounds"], SeenTexts(kept["seen"])
            self._tokens |= {name: tokens.copy() for name, tokens in _tokens(kept).items()}

    def add(self, prompt: Sequence[int], reply: Sequence[int], rounds: int, plain: int, drafters: _Uses) -> None:
        """Count a reply of a new text; `rounds` is 0 where other replies decided what was drafted, `plain` are without
        a draft."""
        if not self.fingerprints.observe(prompt, reply) or not rounds:
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
        return {"rounds": self._rounds.copy(), "seen": self.fingerprints.fingerprints} | tokens


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
    if not {"rounds", "seen"} <= kept.keys() or len(kept) != 2 + len(_tokens(kept)):
        return False
    rounds, seen, counts = kept["rounds"], kept["seen"], _tokens(kept)
    if seen.dtype != np.uint64 or seen.ndim != 1 or len(seen) > MOST_SEEN or not all(map(_NAME.fullmatch, counts)):
        return False
    pairs = (rounds, *counts.values())
    if any(pair.shape != (2,) or pair.dtype != np.float64 or not np.isfinite(pair).all() for pair in pairs):
        return False
    # Sums fade alike, but each rounds on its own.
    ordered = rounds[1] <= rounds[0] + 1e-6 and all(pair[1] <= pair[0] + 1e-6 for pair in counts.values())
    return bool(ordered and all((pair >= 0).all() for pair in pairs))
