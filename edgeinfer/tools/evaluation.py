"""Has a model read given texts, alone or beside a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Unpack

from edgeinfer.api import Model, load
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import ModelError, UsageError
from edgeinfer.hub import resolve
from edgeinfer.option_types import LoadOptionsButContext
from edgeinfer.runtime.text.vocabularies import vocabulary_difference
from edgeinfer.tools.predictions import Evaluation, Predictor, compare_predictions, read_predictions

# Windows are this long where the models hold more: longer ones say little more about the weights.
_LONGEST = 2048


def evaluate(
    model: str | Path | Predictor | None,
    texts: Sequence[str] | Sequence[Sequence[int]],
    *,
    reference: str | Path | Predictor | None = None,
    context: int | None = None,
    tokens: int | None = None,
    top: int = 10,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Unpack[LoadOptionsButContext],
) -> Evaluation:
    """Reads texts with a model, and side by side with a reference, a few tokens at a time.

    Args:
        model: a bundle directory or hub id, None for the built-in model; or what is loaded already.
        texts: read in windows, each after the begin token if the tokenizer adds one; or token ids, each text one window
            as it is.
        reference: what the predictions are compared with, usually the same model unquantized: as `model`.
        context: tokens of a window; None is what the models hold, at most 2048.
        tokens: most to read in all.
        top: most likely tokens whose overlap is counted.
        progress: called with a stage, tokens read and tokens to read.
        options: of `load` for `model`; the reference takes the defaults.

    Raises:
        ModelError: as `edgeinfer.load`; or the tokens of the two models are not the same.
        UsageError: an option is out of range, or there is no text.
    """
    if top < 1 or (tokens is not None and tokens < 2) or (context is not None and context < 2):
        raise UsageError(
            "There is nothing to measure.", "Use a top of at least 1, and tokens and context of at least 2."
        )
    bundle = _bundle(model)
    compared = None if reference is None else _bundle(reference)
    if bundle is not None and compared is not None:
        _check_same_tokens(bundle, compared)
    length = context or min([_LONGEST, *(each.manifest.geometry.max_positions for each in (bundle, compared) if each)])
    plain: dict[str, Any] = {"context": length, "speculation": "off", "remember": False}
    with ExitStack() as opened:
        ours = _loaded(opened, model, bundle, {**plain, **options})
        windows = _first(_windows(ours, texts, length), tokens)
        if not windows:
            raise UsageError("There is no text to read.", "Use a text of at least two tokens.")
        told = _counter(progress, sum(map(len, windows)))
        divergence = None
        if reference is None:
            logprobs = read_predictions(ours, windows, told)
        else:
            theirs = _loaded(opened, reference, compared, plain)
            logprobs, divergence = compare_predictions(ours, theirs, windows, top, told)
    if bundle is None or not bundle.manifest.tensors:
        return Evaluation(logprobs, len(windows), divergence)
    manifest = bundle.manifest
    return Evaluation(logprobs, len(windows), divergence, manifest.weight_bytes, manifest.bits_per_weight)


def _bundle(model: str | Path | Predictor | None) -> Bundle | None:
    """The bundle that is to be loaded; None where it is loaded already."""
    return open_bundle(resolve(model)) if model is None or isinstance(model, str | Path) else None


def _check_same_tokens(bundle: Bundle, reference: Bundle) -> None:
    difference = vocabulary_difference(bundle, reference)
    if difference is not None:
        message = f"{bundle.manifest.name} cannot be compared with {reference.manifest.name}: {difference}."
        raise ModelError(message, "Choose a reference with the same tokenizer, such as the model unquantized.")


def _loaded(
    opened: ExitStack, model: str | Path | Predictor | None, bundle: Bundle | None, options: dict[str, Any]
) -> Predictor:
    if bundle is not None:
        assert model is None or isinstance(model, str | Path), "only what is not loaded has one"
        return opened.enter_context(load(model, **options))
    assert model is not None and not isinstance(model, str | Path), "only what is loaded has no bundle"
    return model


def _windows(model: Predictor, texts: Sequence[str] | Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """Token ids of every window that has a token to predict."""
    windows: list[list[int]] = []
    for text in texts:
        if not isinstance(text, str):
            windows.append(list(text))
            continue
        if not isinstance(model, Model):
            raise UsageError("Only edgeinfer's own models take text.", "Give token ids.")
        if text:
            windows += _cut(model.tokenize(text, parse_special=False), model.prefix_ids, min(length, model.context))
    return [ids for ids in windows if len(ids) > 1]


def _cut(ids: list[int], begin: list[int], length: int) -> list[list[int]]:
    """A text in windows, each after what the tokenizer puts before the first."""
    ids = ids[len(begin) :]
    step = length - len(begin)
    return [begin + ids[start : start + step] for start in range(0, len(ids), step)]


def _first(windows: list[list[int]], tokens: int | None) -> list[list[int]]:
    """The windows up to so many tokens, the last one shortened."""
    if tokens is None:
        return windows
    kept: list[list[int]] = []
    for ids in windows:
        ids = ids[:tokens]
        if len(ids) < 2:
            break
        kept.append(ids)
        tokens -= len(ids)
    return kept


def _counter(progress: Callable[[str, int, int], None] | None, total: int) -> Callable[[int], None]:
    done = 0

    def told(read: int) -> None:
        nonlocal done
        done += read
        if progress is not None:
            progress("reading", done, total)

    return told
