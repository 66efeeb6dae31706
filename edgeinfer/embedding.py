"""Embeddings and reranking: `Model.embed` and `Model.rerank`, and what encoders do with their results too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from edgeinfer.core.errors import UsageError, shown
from edgeinfer.core.options.types import Prompt
from edgeinfer.core.results import Embeddings, RankedDocument, Ranking
from edgeinfer.runtime.arrays import Floats
from edgeinfer.tokenizing import token_ids

# A `Model`, whose methods these are: it imports this module.
Own = Any
# What Qwen3-Reranker is asked to do, and what others understand.
_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


def embed_texts(
    model: Own,
    texts: str | Sequence[Prompt],
    *,
    prompt: str | None = None,
    dimensions: int | None = None,
    truncate: bool = False,
) -> Embeddings:
    """Make the vector of each text: `model.embed(["a cat", "a dog"]).vectors`. Models that are made for it are best
    at it; of others the last token's state is taken.

    Args:
        texts: one or several, as strings or token ids.
        prompt: name of the model's prompt that precedes them, such as "query"; None is its usual one, or none.
        dimensions: keep the first ones only, as Matryoshka models are trained for.
        truncate: leave out the end of longer texts than the model takes.

    Raises:
        ContextLengthError: a text is too long, and `truncate` is False.
        CapabilityError: the model makes no embeddings.
    """
    with model._replies.idle() as parts:
        embedder = parts.make_embedder()
        before = prompt_of(embedder.use.prompts, embedder.use.default_prompt, prompt)
        listed = [texts] if isinstance(texts, str) else list(texts)
        ids = [model.tokenize(before + text) if isinstance(text, str) else token_ids(text) for text in listed]
        if truncate:  # up to the last token, which may be one that ends texts
            ids = [each if len(each) <= model.context else [*each[: model.context - 1], each[-1]] for each in ids]
        shortened = cut(embedder.vectors(ids), dimensions)
        whole = normalized(shortened) if embedder.use.normalize or dimensions else shortened
        return Embeddings(whole, sum(map(len, ids)))


def rank_documents(
    model: Own,
    query: str,
    documents: Sequence[str],
    *,
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query",
    top_n: int | None = None,
    truncate: bool = False,
) -> Ranking:
    """Rank documents by how well they answer a query: `model.rerank("capital of France", texts).documents`. A model
    that generates is asked as Qwen3-Reranker is, for a yes or no.

    Args:
        instruction: what makes a document relevant; rerankers that generate nothing ignore it.
        top_n: give the best ones only.
        truncate: leave out the end of longer documents than the model takes.

    Raises:
        ContextLengthError: a document is too long, and `truncate` is False.
        CapabilityError, TemplateError: the model scores no documents.
    """
    from edgeinfer.runtime.decoding.embedding import judged  # few programs need it

    yes, no = (model.tokenize(word, add_special=False)[-1] for word in ("yes", "no"))
    asked: list[list[int]] = []
    for document in documents:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _JUDGE}, {"role": "user", "content": text}]
        ids = model.tokenize_chat(messages, variables={"enable_thinking": False})
        if truncate and len(ids) > model.context:
            kept = model.detokenize(model.tokenize(document, add_special=False)[: model.context - len(ids)])
            messages[1]["content"] = text.removesuffix(document) + kept
            ids = model.tokenize_chat(messages, variables={"enable_thinking": False})
        asked.append(ids)
    with model._replies.idle() as parts:
        scores = [judged(parts.sequence, ids, yes, no) for ids in asked]
    return ranking(scores, sum(map(len, asked)), top_n)


def normalized(vectors: Floats) -> Floats:  # (N, D) -> (N, D)
    """Vectors of the length 1; those of zeros stay as they are."""
    lengths = np.sqrt((vectors.astype(np.float64) ** 2).sum(axis=-1, keepdims=True))
    found: Floats = (vectors / np.maximum(lengths, math.ulp(1.0))).astype(np.float32)
    return found


def prompt_of(prompts: Mapping[str, str], usual: str | None, name: str | None) -> str:
    """The text of a prompt that precedes all texts, by its name; that of the usual one, if any."""
    name = usual if name is None else name
    if name is None or name == "":
        return ""
    if name not in prompts:
        known = f"Its prompts are {', '.join(prompts)}." if prompts else "It has none: leave the prompt out."
        raise UsageError(f"The model has no prompt {shown(name)}.", known)
    return prompts[name]


def cut(vectors: Floats, dimensions: int | None) -> Floats:  # (N, D) -> (N, d)
    """The first dimensions of vectors, of which Matryoshka models make do with few."""
    width = vectors.shape[1]
    if dimensions is None:
        return vectors
    if not isinstance(dimensions, int) or isinstance(dimensions, bool) or not 0 < dimensions <= width:
        raise UsageError(f"dimensions={dimensions!r} is out of range.", f"Choose 1 to {width}.")
    return vectors[:, :dimensions]


def ranking(scores: Iterable[float], tokens: int, top_n: int | None) -> Ranking:
    """Documents by falling score."""
    if top_n is not None and (not isinstance(top_n, int) or isinstance(top_n, bool) or top_n < 1):
        raise UsageError(f"top_n={top_n!r} is out of range.", "Choose 1 or more, or leave it out.")
    ranked = sorted(
        (RankedDocument(place, float(score)) for place, score in enumerate(scores)), key=lambda each: -each.score
    )
    return Ranking(tuple(ranked[:top_n]), tokens)
