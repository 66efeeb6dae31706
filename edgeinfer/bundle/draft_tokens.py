"""The file that says which of the target's tokens a draft module with a vocabulary of its own can draft."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.array_file import ArrayFileError, decode_arrays, encode_arrays
from edgeinfer.bundle.store import Bundle, reading
from edgeinfer.errors import BundleError

DRAFT_TOKENS = "draft_tokens.safetensors"
_FORMAT, _NAME = "edgeinfer-draft-tokens", "tokens"
_AGAIN = "Export the model with its drafter again."


def draft_tokens_fault(tokens: NDArray[np.integer], vocabulary: int) -> str:  # (Vd,)
    """What is wrong with the tokens that a module can draft, to be read behind "the tokens"; empty where nothing is."""
    if tokens.ndim != 1 or not len(tokens):
        return f"are of shape {tokens.shape}"
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        return f"name {int(outside[0])}, which is outside a vocabulary of {vocabulary}"
    return "name a token twice" if len(np.unique(tokens)) < len(tokens) else ""


def encode_draft_tokens(tokens: NDArray[np.integer]) -> bytes:  # (Vd,)
    """The file of the tokens that a module can draft."""
    return encode_arrays({_NAME: np.ascontiguousarray(tokens, np.int32)}, {"format": _FORMAT})


def read_draft_tokens(bundle: Bundle) -> NDArray[np.int64] | None:  # (Vd,)
    """The tokens that a bundle's module can draft; None where these are all of the target's."""
    manifest = bundle.manifest
    if manifest.module is None or not manifest.module.vocab_size:
        return None
    path = bundle.file(DRAFT_TOKENS)
    with reading(path):
        data = path.read_bytes()
    try:
        arrays, _ = decode_arrays(data, ("I32",))
    except ArrayFileError as error:
        raise BundleError(f"{path} {error}.", _AGAIN) from error
    found = arrays.get(_NAME)
    wrong = "lacks its tokens" if found is None else draft_tokens_fault(found, manifest.geometry.vocab_size)
    if found is None or wrong or len(found) != manifest.module.vocab_size:
        raise BundleError(f"The tokens in {path} {wrong or 'are too few or too many'}.", _AGAIN)
    return found.astype(np.int64)
