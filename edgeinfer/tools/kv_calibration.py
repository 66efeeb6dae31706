"""Gives a model scales for quantized caches, and tells what these caches cost: texts in, scales or errors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edgeinfer.bundle import Bundle, KVScales, open_bundle
from edgeinfer.bundle.kv_scales import add_kv_scales
from edgeinfer.config import LoadConfig
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve
from edgeinfer.runtime.backends.factory import thread_count
from edgeinfer.runtime.backends.onnx.backend import OnnxBackend
from edgeinfer.runtime.kv_cache.calibration import calibrate
from edgeinfer.runtime.kv_cache.errors import AttentionError, attention_errors
from edgeinfer.runtime.profile.kv_scales import keep_kv_scales, kv_scales
from edgeinfer.runtime.text import LiteralEncoder, Tokenizer
from edgeinfer.runtime.weights.layouts import choose_layout
from edgeinfer.tokenizing import boundary_ids
from edgeinfer.tools.tuning import TUNING_PROMPTS

__all__ = ["AttentionError", "calibrate_kv", "measure_kv", "tune_kv"]

Progress = Callable[[str, int, int], None]

# Tokens of a text: as many as the texts of edgeinfer's own grow to.
_TOKENS = 256


def calibrate_kv(
    model: str | Path, texts: Sequence[str] | None = None, *, progress: Progress | None = None
) -> KVScales:
    """Finds scales for quantized caches and puts them into the bundle.

    Args:
        model: a bundle directory, which is changed.
        texts: to calibrate by; None takes a few of edgeinfer's own, which the model goes on with.
        progress: called with a stage, steps done and steps in all.

    Raises:
        UsageError: the bundle cannot have a quantized cache, or there is no text.
        ModelError, StorageError: as `edgeinfer.load`; or the bundle cannot be written.
    """
    bundle = open_bundle(model)
    scales = _calibrate(bundle, texts, progress)
    add_kv_scales(bundle.path, scales)
    return scales


def tune_kv(
    model: str | Path | None = None, texts: Sequence[str] | None = None, *, progress: Progress | None = None
) -> bool:
    """Finds scales for a model that has graphs for quantized caches but no scales, and keeps them for this user.

    Args:
        model: bundle directory or hub id, which stays as it is; None is the built-in model.
        texts, progress: as `calibrate_kv`.

    Returns:
        Whether it had to.

    Raises:
        ModelError, StorageError, UsageError: as `calibrate_kv`.
    """
    bundle = open_bundle(resolve(model))
    without = bundle.manifest.decoder is None or len(bundle.kv_types(bundle.manifest.layout)) == 1
    if without or kv_scales(bundle) is not None:
        return False
    keep_kv_scales(bundle, _calibrate(bundle, texts, progress))
    return True


def measure_kv(model: str | Path | None, texts: Sequence[str]) -> list[AttentionError]:
    """How much quantized caches change what each layer's attention gives for these texts, in plain numpy: slowly.

    Args:
        model: bundle directory or hub id; None is the built-in model.
        texts: cut at 256 tokens each.

    Raises:
        UsageError: the model has no scales, or there is no text.
        ModelError: as `edgeinfer.load`.
    """
    bundle = open_bundle(resolve(model))
    scales = kv_scales(bundle)
    if scales is None:
        raise UsageError(f"{bundle.path} has no scales for quantized KV caches.", "Run edgeinfer tune on it once.")
    ids = [text[: min(_TOKENS, bundle.manifest.geometry.max_positions)] for text in _tokens(bundle, texts)]
    if not any(ids):
        raise UsageError("There is no text to measure with.", "Give some text.")
    return attention_errors(bundle, [text for text in ids if text], scales)


def _calibrate(bundle: Bundle, texts: Sequence[str] | None, progress: Progress | None) -> KVScales:
    layout = choose_layout(bundle, None)
    decoder = bundle.manifest.decoder
    if decoder is None or len(bundle.kv_types(layout)) == 1:
        message = f"{bundle.path} has no graphs for quantized KV caches."
        raise UsageError(message, "Export the model again; exports through optimum have float32 KV caches only.")
    ids = _tokens(bundle, TUNING_PROMPTS if texts is None else texts)
    capacity = min(_TOKENS, bundle.manifest.geometry.max_positions)
    threads = thread_count(LoadConfig())
    backend = OnnxBackend(bundle, capacity, threads=threads, layout=layout, progress=progress)
    try:
        return calibrate(backend, ids, decoder.rope, reply_tokens=_TOKENS if texts is None else 0, progress=progress)
    finally:
        backend.close()


def _tokens(bundle: Bundle, texts: Sequence[str]) -> list[list[int]]:
    """Texts as tokens, after the token that begins every text, which most tokenizers put there themselves."""
    tokenizer = Tokenizer.from_file(bundle.file("tokenizer.json"))
    begin, ends = boundary_ids(bundle)
    encoder = LiteralEncoder(tokenizer, ends)
    ids = [encoder.literal(text, add_special_tokens=True) for text in texts]
    return [each if tuple(each[: len(begin)]) == begin else [*begin, *each] for each in ids]
