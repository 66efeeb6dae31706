"""How much types of KV caches cost a model: texts in, errors of its attention out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve
from edgeinfer.runtime.kv_cache.errors import AttentionError, attention_errors
from edgeinfer.runtime.text.control_marks import LiteralEncoder
from edgeinfer.runtime.text.tokenizer import Tokenizer
from edgeinfer.tokenizing import boundary_ids

_TOKENS = 256


def measure_kv(model: str | Path | None, texts: Sequence[str]) -> list[AttentionError]:
    """How much smaller caches change what each layer's attention gives for these texts, in plain numpy: slowly.

    Args:
        model: bundle directory or hub id; None is the built-in model.
        texts: cut at 256 tokens each.

    Raises:
        UsageError: the model has float32 caches alone, or there is no text.
        ModelError: as `edgeinfer.load`.
    """
    bundle = open_bundle(resolve(model))
    if not bundle.manifest.paged:
        hint = "Export it again, or renew it: edgeinfer convert BUNDLE OUT --renew."
        raise UsageError(f"{bundle.path} has no smaller KV cache than float32.", hint)
    ids = [text[: min(_TOKENS, bundle.manifest.geometry.max_positions)] for text in _tokens(bundle, texts)]
    if not any(ids):
        raise UsageError("There is no text to measure with.", "Give some text.")
    return attention_errors(bundle, [text for text in ids if text])


def _tokens(bundle: Bundle, texts: Sequence[str]) -> list[list[int]]:
    """Texts as tokens."""
    tokenizer = Tokenizer.from_file(bundle.file("tokenizer.json"))
    _, ends = boundary_ids(bundle)
    encoder = LiteralEncoder(tokenizer, ends)
    return [encoder.literal(text, add_special_tokens=True) for text in texts]
