"""Learns steering vectors: numbers added to a model's logits that move its text towards texts like a given one.

The form in logit space of Steering Vector Decoding (Hu et al. 2025, arXiv 2509.15888): a few steps down the gradient of
the divergence from the text's distribution. The paper takes the gradient at each token, between the model and a copy
that was trained a little; here it is the mean over the text, so that no copy is needed and a reply costs no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api import load
from edgeinfer.bundle.additions import MOST_STEERED, SteeringVector, add_steering, require_steering_name
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.types import LoadDict
from edgeinfer.core.records import dataclass
from edgeinfer.loading import located
from edgeinfer.runtime.arrays import Floats
from edgeinfer.tools.evaluation import Predictor

# The most tokens of a text, tokens of a piece, and how often a piece is kept for validation: every fifth.
_MOST, _PIECE, _EVERY = 8192, 512, 5
_FEWEST = 256
_STEPS = 12
# Occurrences added to every token, so that rare ones move little.
_PRIOR = 4.0

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class SteeringGain:
    """The gain of a steering vector on the validation part of its text.

    Attributes:
        name: of the vector.
        entries: tokens whose logits it changes.
        tokens: of the validation.
        plain, steered: nats of each of them, without the vector and with it at scale 1.
    """

    name: str
    entries: int
    tokens: int
    plain: float
    steered: float


@dataclass(frozen=True)
class _Read:
    """Predictions of a text's tokens, as far as a vector can change them."""

    logits: Floats  # of the tokens that may be steered, less the logarithm of the sum over all tokens. (S, K)
    rest: Doubles  # probability of all other tokens. (S,)
    targets: NDArray[np.int64]  # index of each text token among the steered; -1 is another. (S,)
    others: Doubles  # log-probability of each text token that is not among them; 0 elsewhere. (S,)

    def predicted(self, vector: Doubles) -> tuple[Doubles, Doubles]:  # (K,) -> (S, K), (S,)
        """Probabilities of the steered tokens with a vector, and the logarithm of the sum over all tokens."""
        raised = np.exp(self.logits + vector)
        total = self.rest + raised.sum(axis=1)
        return raised / total[:, None], np.log(total)

    def nats(self, vector: Doubles) -> float:  # (K,)
        """Nats of a text token with a vector, on average."""
        _, totals = self.predicted(vector)
        own = np.where(self.targets >= 0, self.logits[np.arange(len(totals)), self.targets], self.others)
        moved = np.where(self.targets >= 0, vector[self.targets], 0.0)
        return float((totals - own - moved).mean())


def tune_steering(
    model: str | Path | None,
    name: str,
    text: str,
    *,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[LoadDict],
) -> SteeringGain:
    """Learns a steering vector from a text, and puts it into the model's bundle; replies take it by `steering`.

    Args:
        model: bundle directory; None is the built-in model.
        name: of the vector.
        text: of the kind that replies are to be like; up to 8,192 tokens are read, of which every fifth piece is kept
            for validation, which tells what the vector gains.
        progress: called with tokens read and to read.
        options: as `load` takes them.

    Raises:
        UsageError: the text is too short, or the name is none of a file.
        ModelError: as `load`.
        StorageError: the bundle cannot be written.
    """
    require_steering_name(name)
    path = located(model, LoadOptions.of(**options))
    given: dict[str, Any] = {"speculation": "off", "remember": False, **options}
    with load(path, **given) as loaded:
        ids, begin = loaded.tokenize(text, parse_special=False)[:_MOST], loaded.prefix_ids
        if len(ids) < _FEWEST:
            message = f"{len(ids)} tokens are too few to learn from."
            raise UsageError(message, f"Give a text of at least {_FEWEST} tokens.")
        size = min(_PIECE, loaded.context - len(begin), len(ids) // _EVERY)
        pieces = [[*begin, *ids[start : start + size]] for start in range(0, len(ids), size)]
        steered, parts = _steered(ids), list[_Read]()
        for index, piece in enumerate(pieces):
            if progress is not None:
                progress(index * size, len(ids))
            if len(piece) > 1:
                parts.append(_read(loaded, piece, steered))
    tested = [part for index, part in enumerate(parts) if index % _EVERY == _EVERY - 1]
    kept = [part for index, part in enumerate(parts) if index % _EVERY != _EVERY - 1]
    vector = learn_steering(kept)
    plain, moved = (_mean(tested, values) for values in (np.zeros(len(steered)), vector))
    tokens = sum(len(part.rest) for part in tested)
    notes = {"learnt from": f"{sum(len(part.rest) for part in kept)} tokens"}
    notes |= {"validation": f"{plain:.4f} nats a token, {moved:.4f} with the vector"}
    add_steering(open_bundle(path).path, name, SteeringVector(steered, vector.astype(np.float32), notes))
    return SteeringGain(name, len(steered), tokens, plain, moved)


def learn_steering(parts: list[_Read]) -> Doubles:  # (K,)
    """The vector after a few steps down the gradient: how often tokens occur, less how often they were predicted. Each
    step is scaled by the token's own curvature, which is at most how often it is predicted, so that no step leads up.
    The first one is a difference of means."""
    size, tokens = parts[0].logits.shape[1], sum(len(part.rest) for part in parts)
    counts = np.zeros(size)
    for part in parts:
        counts += np.bincount(part.targets[part.targets >= 0], minlength=size)
    vector = np.zeros(size)
    for _ in range(_STEPS):
        predicted = sum((part.predicted(vector)[0].sum(axis=0) for part in parts), np.zeros(size))
        slope = (counts - predicted - _PRIOR * vector) / tokens
        bend = (predicted + _PRIOR) / tokens
        vector = vector + np.clip(slope / bend, -1.0, 1.0)
    return vector


def _mean(parts: list[_Read], vector: Doubles) -> float:  # (K,)
    tokens = sum(len(part.rest) for part in parts)
    return math.fsum(part.nats(vector) * len(part.rest) for part in parts) / tokens


def _steered(ids: list[int]) -> NDArray[np.int32]:  # (K,)
    """The commonest tokens of a text."""
    found, counts = np.unique(np.array(ids, np.int32), return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MOST_STEERED]
    tokens: NDArray[np.int32] = np.sort(found[order])
    return tokens


def _read(model: Predictor, ids: list[int], steered: NDArray[np.int32]) -> _Read:  # (K,)
    """A model's predictions for a piece of text: for all tokens but the first."""
    logits, rest, others = list[Floats](), list[float](), list[float]()
    place = {int(token): index for index, token in enumerate(steered)}
    targets = [place.get(token, -1) for token in ids[1:]]
    for rows in model.logits(ids):  # (R, V)
        for row in rows[: len(targets) - len(rest)].astype(np.float64):
            best = float(row.max())
            row -= best + math.log(float(np.exp(row - best).sum()))
            chosen = row[steered]
            others.append(float(row[ids[1 + len(rest)]]) if targets[len(rest)] < 0 else 0.0)
            rest.append(max(1.0 - float(np.exp(chosen).sum()), 0.0))
            logits.append(chosen.astype(np.float32))
    return _Read(np.stack(logits), np.array(rest), np.array(targets), np.array(others))
