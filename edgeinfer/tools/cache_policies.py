"""How much each policy for full contexts loses: on later text, copied passages and recalled pieces; keeps the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api import load
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import UsageError
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.types import LoadDict
from edgeinfer.core.records import dataclass
from edgeinfer.loading import located
from edgeinfer.model import Model
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES
from edgeinfer.runtime.profile.kept import KEPT_POLICIES, MeasuredPolicy, files_digest
from edgeinfer.tools.tuning import TUNING_PROMPTS

_STOP, _WINDOW = "stop", "window"
# Texts are this long where the model holds more.
_LONGEST = 2048
# Shorter ones leave a quarter of the context no room for a policy.
_SHORTEST = 256
# Share of a text that is a passage, which is read again after the rest.
_PASSAGE = 0.1
# Tokens of a passage or a needle that are given before the model has to predict the rest, and of a needle's rest.
_HINT, _NEEDLE = 8, 16
# Tokens of a text for each needle; places of the first and the last, as shares of the text between the passages.
_PER_NEEDLE, _FIRST, _LAST = 128, 0.02, 0.92
# Tokens of one reply where the model writes the text itself.
_REPLY = 512


@dataclass(frozen=True)
class Foreseen:
    """How well tokens were predicted.

    Attributes:
        tokens: that were to be predicted.
        share: of the tokens that were the most likely ones.
    """

    tokens: int
    perplexity: float
    share: float


@dataclass(frozen=True)
class CacheLoss:
    """One policy in a context of one size, over the same text.

    Attributes:
        policy: as the option `overflow` names it; "stop" is a context that holds all of the text.
        context: tokens that the cache holds.
        text: the second half of the text.
        copying: a passage that is read again behind the text, but for its first tokens.
        needles: pieces from all over the text whose beginnings are repeated at its end.
    """

    policy: str
    context: int
    text: Foreseen
    copying: Foreseen
    needles: Foreseen

    @property
    def kinds(self) -> tuple[Foreseen, Foreseen, Foreseen]:
        """All three, in order."""
        return self.text, self.copying, self.needles


@dataclass(frozen=True)
class CacheTuning:
    """The losses of all policies, and the one that "auto" uses from now on.

    Attributes:
        whole: the loss with a context that holds all of the text.
        losses: of every policy in every smaller context, the larger ones first.
        kept: the policy that beats "window" on all three kinds, over all contexts, and loses least; else "window".
        unusable: why other policies cannot make room in this model's cache, by name.
    """

    whole: CacheLoss
    losses: tuple[CacheLoss, ...]
    kept: MeasuredPolicy
    unusable: dict[str, str]


def tune_cache(
    model: str | Path | None = None,
    text: str | None = None,
    *,
    shares: Sequence[float] = (0.5, 0.25),
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[LoadDict],
) -> CacheTuning:
    """Measures each policy for full contexts on a text that outgrows them; overflow="auto" takes the best from then on.

    The text is read, then a passage of it again, then the beginnings of pieces from all over it, in one sequence.

    Args:
        model: bundle directory, GGUF file or hub id; None is the built-in model.
        text: at least 300 tokens typical of the model's use; None has the model write one.
        shares: of the text's length, contexts to measure with.
        progress: called with readings done and to do.
        options: as `load` takes them; `context` is the text's length, at most 2,048 tokens if left out.

    Raises:
        UsageError: the text or the context is too short, a share is impossible, or no policy can make room.
        ModelError: as `load`.
        StorageError: the result cannot be kept.
    """
    if not shares or not all(0 < share < 1 for share in shares):
        raise UsageError("Contexts must be smaller than the text.", "Give shares between 0 and 1.")
    if (options.get("overflow") or _STOP) != _STOP:
        raise UsageError("Every overflow policy is measured.", "Leave overflow out.")
    bundle = open_bundle(located(model, LoadOptions.of(**options)))
    given: dict[str, Any] = {**options, "overflow": _STOP, "speculation": "off", "remember": False}
    length = options.get("context") or min(_LONGEST, bundle.manifest.geometry.max_positions)
    with load(model, **given | {"context": length}) as loaded:
        reading = _Reading.of(loaded, _tokens(loaded, text, length), length)
        whole = CacheLoss(_STOP, length, *reading.foreseen(loaded))
    contexts = [round(share * len(reading.ids)) for share in sorted(shares, reverse=True)]
    losses, unusable = list[CacheLoss](), dict[str, str]()
    ways = [(context, policy) for context in contexts for policy in POLICIES]
    for done, (context, policy) in enumerate(ways):
        if progress is not None:
            progress(done, len(ways))
        try:
            with load(model, **given | {"context": context, "overflow": policy}) as loaded:
                losses.append(CacheLoss(policy, context, *reading.foreseen(loaded)))
        except UsageError as error:
            unusable[policy] = error.message
    if not losses:
        raise UsageError(next(iter(unusable.values())), "Use this model with overflow='stop'.")
    kept = _best(whole, losses, len(reading.ids))
    KEPT_POLICIES.keep(files_digest(bundle), kept)
    return CacheTuning(whole, tuple(losses), kept, unusable)


def _best(whole: CacheLoss, losses: Sequence[CacheLoss], tokens: int) -> MeasuredPolicy:
    """The policy that loses least among those that beat the window on every kind; without any, the window."""
    full = np.log([each.perplexity for each in whole.kinds])
    means = {}
    for policy in dict.fromkeys(loss.policy for loss in losses):
        logs = [np.log([each.perplexity for each in loss.kinds]) for loss in losses if loss.policy == policy]
        means[policy] = np.mean(logs, axis=0) - full  # (3,)
    window = means.get(_WINDOW, np.full(3, np.inf))
    better = [policy for policy, lost in means.items() if (lost < window).all()]
    best = min(better, key=lambda policy: float(means[policy].sum()), default=_WINDOW)
    return MeasuredPolicy(best, tokens, *(float(nats) for nats in means[best]))


def _tokens(model: Model, text: str | None, length: int) -> list[int]:
    """The tokens of the text, or of a text that the model writes itself."""
    if text is not None:
        return model.tokenize(text, parse_special=False)
    written = list[int]()
    for seed in range(length):
        prompt = model.tokenize(TUNING_PROMPTS[seed % len(TUNING_PROMPTS)])
        most = min(_REPLY, length - len(prompt))
        if len(written) > (1 + _PASSAGE) * length or most < 1:
            break
        # Sampled at temperature 1: the likeliest texts repeat themselves, and forgive more.
        reply = model.generate(prompt, max_tokens=most, ignore_eos=True, temperature=1.0, seed=seed)
        written += [*prompt[len(model.prefix_ids) :], *reply.token_ids]
    return written


@dataclass(frozen=True)
class _Reading:
    """Tokens to read, and those whose predictions count."""

    ids: list[int]  # a beginning, a passage, the rest of the text, the passage again, needles
    kinds: tuple[NDArray[np.bool_], ...]  # of the text, of the passage and of needles, those that count. (S,) each

    @classmethod
    def of(cls, model: Model, tokens: Sequence[int], length: int) -> _Reading:
        """A reading of at most `length` tokens."""
        begin = model.prefix_ids
        length = min(length, len(begin) + int(len(tokens) / (1 + _PASSAGE)))
        if length < _SHORTEST:
            message = f"{len(tokens)} tokens in a context of {model.context} are too few to measure policies with."
            raise UsageError(message, f"Give a text and a context of over {_SHORTEST} tokens.")
        size, count = int(_PASSAGE * length), length // _PER_NEEDLE
        rest = length - len(begin) - 2 * size - count * (_HINT + _NEEDLE)
        before = length // 8
        passage = list(tokens[rest : rest + size])
        ids = [*begin, *tokens[:before], *passage, *tokens[before:rest]]
        text, copying, needles = (np.zeros(length, np.bool_) for _ in range(3))
        first = len(begin) + before + size
        text[(first + len(ids)) // 2 : len(ids)] = True
        copying[len(ids) + _HINT : len(ids) + size] = True
        places = np.linspace(_FIRST, _LAST, count) * (len(ids) - first) + first
        ids += passage
        # The oldest and the latest alternate, so that no policy is asked only for tokens that it just dropped.
        for place in np.concatenate([places[::2], places[1::2]]).astype(int).tolist():
            needles[len(ids) + _HINT : len(ids) + _HINT + _NEEDLE] = True
            ids += ids[place : place + _HINT + _NEEDLE]
        return cls(ids, (text, copying, needles))

    def foreseen(self, model: Model) -> tuple[Foreseen, ...]:
        """How well a model predicts the tokens of each kind."""
        targets, wanted = np.array(self.ids), np.logical_or.reduce(self.kinds)
        logprobs, hits = np.zeros(len(targets)), np.zeros(len(targets), np.bool_)
        start = 1  # of the token that the next row of logits foresees
        for logits in model.logits(self.ids):  # (R, V)
            places = start + np.flatnonzero(wanted[start : start + len(logits)])
            rows = logits[places - start].astype(np.float64)
            rows -= rows.max(axis=1, keepdims=True)
            chosen = rows[np.arange(len(places)), targets[places]]
            logprobs[places] = chosen - np.log(np.exp(rows).sum(axis=1))
            hits[places] = chosen == 0
            start += len(logits)
        return tuple(
            Foreseen(int(kind.sum()), float(np.exp(-logprobs[kind].mean())), float(hits[kind].mean()))
            for kind in self.kinds
        )
