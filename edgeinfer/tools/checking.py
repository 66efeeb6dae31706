"""Measures, right after a conversion, how far the bundle is from the float model, on text that it was not made for; and
says what a conversion chose and what that costs."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.api import load
from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.manifest import CacheQuality, Manifest, QualityRecord
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import EdgeInferError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import KvType
from edgeinfer.core.results import Progress
from edgeinfer.export.source.calibration_text import read_builtin_text
from edgeinfer.export.weights.float_model import FloatModel
from edgeinfer.model import Model
from edgeinfer.nn.arithmetic import log_softmax
from edgeinfer.runtime.arrays import Floats
from edgeinfer.runtime.native.library import is_usable

_log = logging.getLogger("edgeinfer")

# A dozen seconds of two slow cores, for the float model's products; at most and at least so many tokens.
_OPERATIONS = 1e12
_MOST_TOKENS, _FEWEST_TOKENS = 1024, 192
# Of a text: short ones are of many kinds.
_LENGTH = 128
# Smaller caches are compared on every third text.
_CACHES: tuple[KvType, ...] = ("int8", "int4")
_EVERY = 3
# Rows of logits that are compared at a time.
_ROWS = 32
# What divergence does to replies, the worst first (docs/limits.md).
_FAR = (
    (0.3, "That is too far for a model to be itself: such models get plain questions wrong and repeat themselves."),
    (0.1, "Expect other words than the float model's, and wrong answers now and then."),
)
_CLOSE_BITS = 5
# Greedy replies of so many tokens; one repeats itself where this share of the runs in its second half was there before.
_ASKED = ("Write a short story about a fox.", "Explain why the sky is blue.", "Give me three tips for better sleep.")
_REPLY, _RUN, _REPEATED = 80, 4, 0.5
_LAYER = re.compile(r"^layers\.\d+\.|(?<=\.experts)\.\d+")
# Matrices are called wider from so many bits on, and so many kinds are named.
_WIDER, _MOST_NAMES = 0.25, 4


def measure_quality(path: Path, model: FloatModel, progress: Progress | None = None) -> QualityRecord | None:
    """Compares a bundle with the float model that it was made of; None where that cannot be computed here."""
    try:
        return _measured(path, model, progress or (lambda *_: None))
    except EdgeInferError as error:
        _log.warning("The bundle is not compared with the float model: %s", error.message)
        return None


def _measured(path: Path, model: FloatModel, progress: Progress) -> QualityRecord | None:
    manifest = open_bundle(path).manifest
    if manifest.layout == NATIVE and not is_usable():  # a copy for this machine would stay in the user's cache
        return None
    tokens = int(np.clip(_OPERATIONS / (2 * model.parameters), _FEWEST_TOKENS, _MOST_TOKENS))
    length = min(_LENGTH, manifest.geometry.max_positions)
    texts = read_builtin_text("held_out", (path / "tokenizer.json").read_bytes(), tokens, length).texts
    # The float model takes about as long as all that follows.
    states = model.states(texts, lambda done, total: progress("float model", done, 2 * total))
    caches = _CACHES if manifest.capabilities.paged else ()
    costs, added = list[Floats](), {kind: list[Floats]() for kind in caches}
    same = 0
    with contextlib.ExitStack() as opened:
        plain = _opened(opened, path, length, "float32")
        others = {kind: _opened(opened, path, length, kind) for kind in caches}
        for index, (ids, state) in enumerate(zip(texts, states, strict=True)):
            theirs, ours = model.logits(state), _logits(plain, ids)
            cost = _divergences(theirs, ours)
            costs.append(cost)
            same += int((theirs.argmax(axis=1) == ours.argmax(axis=1)).sum())
            for kind, other in others.items() if index % _EVERY == 0 else ():
                # Any other rounding moves a quantized model by as much again: what counts is whether it is further off.
                added[kind].append(_divergences(theirs, _logits(other, ids)) - cost)
            progress("bundle", len(texts) + index + 1, 2 * len(texts))
        repeating = _repeating(plain)
    read = sum(map(len, costs))
    cached = tuple(CacheQuality(kind, _mean(values)) for kind, values in added.items())
    return QualityRecord(read, _mean(costs), same / read, cached, repeating)


def _opened(opened: contextlib.ExitStack, path: Path, length: int, kv: KvType) -> Model:
    return opened.enter_context(
        load(path, context=length, kv=kv, speculation="off", draft_model="off", remember=False, device="cpu")
    )


def _repeating(model: Model) -> float | None:
    """The share of greedy replies that repeat themselves; None of a model that does not chat."""
    loops = 0
    for text in _ASKED:
        try:
            reply = model.chat().send(text, max_tokens=_REPLY, temperature=0, repetition_penalty=1.0)
        except EdgeInferError:
            return None
        loops += repeated(reply.token_ids) > _REPEATED
    return loops / len(_ASKED)


def repeated(tokens: Sequence[int]) -> float:
    """Share of the runs of four tokens in a reply's second half that it had before."""
    runs = [tuple(tokens[start : start + _RUN]) for start in range(len(tokens) - _RUN + 1)]
    half = len(runs) // 2
    again = [run in runs[:place] for place, run in enumerate(runs) if place >= half]
    return sum(again) / len(again) if again else 0.0


def _logits(model: Model, ids: NDArray[np.int64]) -> Floats:  # (N,) -> (N, V)
    return np.concatenate([block.copy() for block in model.logits(ids.tolist())])


def _divergences(theirs: Floats, ours: Floats) -> Floats:  # (N, V) each -> (N,)
    values = np.empty(len(theirs), np.float32)
    for start in range(0, len(theirs), _ROWS):
        rows = slice(start, start + _ROWS)
        wanted, found = (log_softmax(logits[rows], np.float32) for logits in (theirs, ours))
        np.subtract(wanted, found, out=found)
        np.einsum("nv,nv->n", np.exp(wanted), found, out=values[rows])
    return values


def _mean(values: Sequence[Floats]) -> float:
    return max(float(np.concatenate(values).mean(dtype=np.float64)), 0.0)


def described(manifest: Manifest) -> list[str]:
    """What a conversion chose, what that was expected to cost, and what was measured; nothing of a GGUF file."""
    quality, plan = manifest.quality, manifest.plan
    if quality is None and not manifest.tensors:
        return []
    size = f"{manifest.bits_per_weight:.2f} bits a weight, {format_size(manifest.weight_bytes)}"
    lines = [f"{manifest.name} has {size}{_wider(manifest)}."]
    if quality is not None:
        expected = None if plan is None else plan.predicted_kl
        known = "" if expected is None else f" ({expected:.2g} were expected)"
        lines.append(
            f"From the float model it is {quality.divergence:.2g} nats a token away{known} on other text, and its "
            f"likeliest next token is the same {quality.top1:.0%} of the time."
        )
        lines += [text for least, text in _FAR if quality.divergence > least][:1]
        if len(lines) > 2:
            close = format_size(manifest.parameters * _CLOSE_BITS // 8)
            lines[-1] += f" {_CLOSE_BITS} bits a weight would take {close}; without --bits it gets as many as it needs."
        if quality.repeating is not None and quality.repeating > _REPEATED:
            loops = round(quality.repeating * len(_ASKED))
            lines.append(f"{loops} of {len(_ASKED)} greedy replies of {_REPLY} tokens repeat themselves.")
    return lines


def _wider(manifest: Manifest) -> str:
    """The kinds of matrices that have more bits than most weights."""
    if manifest.plan is None:
        return ""
    sizes, weights = {tensor.name: tensor.size for tensor in manifest.tensors}, Counter[float]()
    bits: dict[str, list[float]] = {}
    for tensor in manifest.plan.tensors:
        weights[tensor.bits] += sizes[tensor.name]
        bits.setdefault(_LAYER.sub("", tensor.name), []).append(tensor.bits)
    usual = weights.most_common(1)[0][0]
    means = {name: sum(each) / len(each) for name, each in bits.items()}
    wider = sorted((name for name in means if means[name] > usual + _WIDER), key=lambda name: -means[name])
    more = ", ".join(f"{name} ({means[name]:.3g})" for name in wider[:_MOST_NAMES])
    return f", most at {usual:g}" + (f" and more in {more}" if wider else "")
