"""llama.cpp's name of a pre-tokenizer, by the structure of a tokenizer.json.

A name is found by what a tokenizer does, not by what its model is called: the same steps, pattern for pattern.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from edgeinfer.bundle.gguf.pre_tokenizers import PRE_TOKENIZERS
from edgeinfer.errors import CheckpointError


def flattened(step: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, sequences taken apart."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for each in step.get(inner, ()):
            yield from flattened(each, inner)
    else:
        yield step


def byte_level_steps(tokenizer: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The steps of a pre-tokenizer that ends in bytes; None where it does not."""
    steps = list(flattened(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    return steps if steps and steps[-1].get("type") == "ByteLevel" else None


def pre_tokenizer_name(steps: list[dict[str, Any]], ignore_merges: bool, *, merges_matter: bool) -> str:
    """llama.cpp's name of the steps.

    Args:
        merges_matter: False where that changes nothing, because merges lead to every word.
    """
    signature = tuple(word for step in steps for word in _signature(step))
    found = PRE_TOKENIZERS.get((signature, ignore_merges))
    if found is None and not merges_matter:
        found = PRE_TOKENIZERS.get((signature, not ignore_merges))
    if found is None:
        shown = " then ".join(signature) + (" with ignore_merges" if ignore_merges else "")
        message = f"llama.cpp has no pre-tokenizer that splits words as this tokenizer.json does: {shown}."
        raise CheckpointError(message, "Export it to ONNX instead: leave out --format gguf.")
    return found


def _signature(step: dict[str, Any]) -> Iterator[str]:
    """A step in short, in the same words for what does the same."""
    kind = step.get("type")
    if kind == "ByteLevel":
        if step.get("use_regex", True):
            yield "words"
    elif kind == "Digits" and step.get("individual_digits"):
        yield "digits"
    elif kind == "Split" and (step.get("behavior"), bool(step.get("invert"))) in (
        ("Isolated", False),
        # What the pattern does not match is removed, and these patterns match everything.
        ("Removed", True),
    ):
        pattern = step.get("pattern") or {}
        # Line ends are written out in some files, and as characters in others.
        regex = str(pattern.get("Regex", pattern)).replace("\r", r"\r").replace("\n", r"\n")
        yield "digits" if regex == r"\p{N}" else regex
    else:
        yield str(step)
