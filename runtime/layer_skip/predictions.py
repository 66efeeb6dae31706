"""What predictions say: how unsure they are, and how far they are from others; knows nothing of models."""

from __future__ import annotations

import numpy as np

from edgeinfer.runtime.arrays import Floats

__all__ = ["divergence", "entropy_bits", "likeliest"]

_LN2 = float(np.log(2))


def entropy_bits(logits: Floats) -> float:  # (V,)
    """Entropy of the next token before any temperature."""
    shifted = logits - logits.max()
    weights = np.exp(shifted)
    total = float(weights.sum())
    # Tokens that are impossible are minus infinity, and add nothing.
    shifted = np.where(weights > 0, shifted, 0)
    return max(0.0, (float(np.log(total)) - float(weights @ shifted) / total) / _LN2)


def likeliest(logits: Floats) -> tuple[int, float]:  # (V,)
    """The likeliest token and its probability."""
    best = int(logits.argmax())
    return best, 1.0 / float(np.exp(logits - logits[best]).sum())


def divergence(whole: Floats, reduced: Floats) -> float:  # (V,), (V,)
    """Kullback-Leibler divergence of the reduced model's prediction from the whole model's, in nats."""
    ours, theirs = _log_softmax(reduced), _log_softmax(whole)
    chance = np.exp(theirs)
    possible = chance > 0
    return max(0.0, float((chance[possible] * (theirs[possible] - ours[possible])).sum()))


def _log_softmax(logits: Floats) -> np.ndarray[tuple[int], np.dtype[np.float64]]:  # (V,)
    shifted = logits.astype(np.float64)
    shifted -= shifted.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted
