"""How a model's makers have texts become vectors: pooling, length, prompts; the file embedding.json of a bundle."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from edgeinfer.bundle.store import Bundle
from edgeinfer.bundle.strict_json import DAMAGED, MisfitError, read_whole
from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass

EMBEDDING = "embedding.json"
ENCODER = "onnx-encoder"  # the backend of bundles that give vectors or scores, and no text
# Which of a text's hidden states make its vector.
Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True)
class EmbeddingUse:
    pooling: Pooling = "mean"
    normalize: bool = True  # vectors have the length 1
    prompts: Mapping[str, str] = field(
        default_factory=dict
    )  # what precedes a text, by the purpose: "query", "document"
    default_prompt: str | None = None  # name of the one that precedes all

    def to_json(self) -> bytes:
        return (json.dumps(dataclasses.asdict(self), indent=1) + "\n").encode("utf-8")


def embedding_use(bundle: Bundle) -> EmbeddingUse:
    """What a bundle says; of one that was not made for embedding the last token's state, which saw all others."""
    if not bundle.has(EMBEDDING):
        return EmbeddingUse("last")
    try:
        return read_whole(EmbeddingUse, bundle.read_object(EMBEDDING))
    except MisfitError as misfit:
        raise BundleError(f"{EMBEDDING}: {misfit}.", DAMAGED) from misfit
