"""Which texts were seen before: a reply that is made again says nothing of the next one's drafts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

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
    """Remembers prompts and replies by fingerprints of them.

    Args:
        kept: what `fingerprints` was in an earlier session.
    """

    def __init__(self, kept: NDArray[np.uint64] | None = None) -> None:
        self._seen = np.zeros(0, np.uint64) if kept is None else kept[-MOST_SEEN:].copy()

    @property
    def fingerprints(self) -> NDArray[np.uint64]:  # (N,)
        """What is kept, from the oldest to the latest."""
        return self._seen

    def observe(self, prompt: Sequence[int], reply: Sequence[int]) -> bool:
        """Remembers a reply; whether it is new: its prompt was never answered, and hardly any of it was seen before,
        in other replies or earlier in this one, which goes round in circles then."""
        asked = np.frombuffer(hashlib.sha256(np.array(prompt, np.int64).tobytes()).digest()[:8], np.uint64)
        windows = _windows([*prompt[-(_WINDOW - 1) :], *reply])
        different = np.unique(windows)
        chosen = different[different % _ONE_IN == 0]
        looked_up = chosen if len(chosen) else different
        least, known = 1 - _MOST_REPEATED, np.isin(looked_up, self._seen)
        repeats = len(different) < least * len(windows) or np.count_nonzero(~known) < least * len(looked_up)
        is_new = not (repeats or np.isin(asked, self._seen).any())
        kept = chosen if len(windows) >= _FEW else different
        self._seen = np.concatenate([self._seen[~np.isin(self._seen, kept)], asked, kept])[-MOST_SEEN:]
        return is_new


def _windows(tokens: Sequence[int]) -> NDArray[np.uint64]:  # (N,)
    """Fingerprints of the windows of a text."""
    text = np.array(tokens, np.uint64)
    if len(text) < _WINDOW:
        return np.zeros(0, np.uint64)
    hashes = ((sliding_window_view(text, _WINDOW) + np.uint64(1)) * _POWERS).sum(1, dtype=np.uint64) * _MIX
    mixed: NDArray[np.uint64] = hashes ^ (hashes >> np.uint64(33))
    return mixed
