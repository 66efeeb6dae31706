"""Whether token ids mean the same to two models, by what their bundles say of their tokenizers; encodes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from edgeinfer.bundle.store import Bundle

if TYPE_CHECKING:
    from edgeinfer.bundle.gguf.reader import GgufFile
    from edgeinfer.bundle.gguf.vocabulary import GgufVocabulary


_TOKENIZER = "tokenizer.json"
_MERGES = "tokenizer.ggml.merges"
# llama.cpp's number of tokens that stand for nothing, by which vocabularies are padded to the rows of an embedding.
_UNUSED = 5


def vocabulary_difference(target: Bundle, other: Bundle) -> str | None:
    """Say why token ids of the target differ in another model; None if they mean the same."""
    if target.has(_TOKENIZER) and other.has(_TOKENIZER):
        return _between_tokenizers(target, other)
    ours, theirs = _gguf(target), _gguf(other)
    if ours is not None and theirs is not None:
        return _between_ggufs(ours, theirs)
    gguf, bundle = (ours, other) if ours is not None else (theirs, target)
    # Whichever has none is asked for its tokenizer.json, which says that it is missing.
    tokenizer = bundle.read_object(_TOKENIZER)
    if gguf is None:
        other.read_object(_TOKENIZER)
        return None
    tokens = _by_id(tokenizer)
    if _spellings(gguf) != tokens:
        return "tokenizers with different vocabulary"
    return _too_few(max(tokens, default=-1), target, other)


def _between_tokenizers(target: Bundle, other: Bundle) -> str | None:
    same = target.manifest.files[_TOKENIZER] == other.manifest.files.get(_TOKENIZER)
    if same and other.manifest.geometry.vocab_size >= target.manifest.geometry.vocab_size:
        return None
    theirs = target.read_object(_TOKENIZER)
    ours = theirs if same else other.read_object(_TOKENIZER)
    for what, part in (("vocabulary", _vocabulary), ("merges", _merges), ("special tokens", _added)):
        if part(theirs) != part(ours):
            return f"tokenizers with different {what}"
    return _too_few(max(_ids(theirs), default=-1), target, other)


def _too_few(last: int, target: Bundle, other: Bundle) -> str | None:
    """Say that the other model has no logits for some tokens, of which this is the last."""
    known = min(target.manifest.geometry.vocab_size, 1 + last)
    if other.manifest.geometry.vocab_size < known:
        return f"{known} tokens and {other.manifest.geometry.vocab_size} logits"
    return None


def _gguf(bundle: Bundle) -> GgufFile | None:
    """The model file, where it holds a vocabulary."""
    return bundle.gguf if bundle.manifest.gguf_files else None


def _between_ggufs(ours: GgufFile, theirs: GgufFile) -> str | None:
    from edgeinfer.bundle.gguf.vocabulary import read_vocabulary

    mine, other = read_vocabulary(ours), read_vocabulary(theirs)
    if mine.model != other.model or _spellings(ours) != _spellings(theirs):
        return "tokenizers with different vocabulary"
    if any(a != b for a, b in zip_longest(_merge_lines(ours, mine), _merge_lines(theirs, other))):
        return "tokenizers with different merges"
    # Padding is of no consequence here.
    return None


def _merge_lines(gguf: GgufFile, vocabulary: GgufVocabulary) -> Iterator[bytes]:
    return gguf.metadata.array(_MERGES, "string").spellings() if vocabulary.merges else iter(())


def _spellings(gguf: GgufFile) -> dict[int, str]:
    """Tokens by id, without those that only fill up the embedding."""
    from edgeinfer.bundle.gguf.vocabulary import read_vocabulary

    vocabulary = read_vocabulary(gguf)
    types = None if vocabulary.token_types is None else vocabulary.token_types.numbers()
    tokens = enumerate(vocabulary.tokens.strings())
    return {id_: token for id_, token in tokens if types is None or types[id_] != _UNUSED}


def _part(tokenizer: dict[str, Any], name: str) -> Any:
    model = tokenizer.get("model")
    return model.get(name) if isinstance(model, dict) else None


def _vocabulary(tokenizer: dict[str, Any]) -> Any:
    """Ids by token; of a unigram model the pieces in the order of their ids, with scores."""
    return _part(tokenizer, "vocab")


def _merges(tokenizer: dict[str, Any]) -> list[Any]:
    """Pairs in order, whether written as pairs or as strings."""
    merges = _part(tokenizer, "merges")
    pairs = merges if isinstance(merges, list) else []
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in pairs]


def _added(tokenizer: dict[str, Any]) -> list[tuple[Any, Any, Any]]:
    """Id, spelling and whether it is special, of added tokens."""
    added = tokenizer.get("added_tokens")
    tokens = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return sorted(((token.get("id"), token.get("content"), token.get("special")) for token in tokens), key=repr)


def _ids(tokenizer: dict[str, Any]) -> list[int]:
    vocabulary = _vocabulary(tokenizer)
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary or ()))
    return [id_ for id_ in (*ids, *(id_ for id_, _, _ in _added(tokenizer))) if isinstance(id_, int)]


def _by_id(tokenizer: dict[str, Any]) -> dict[int, str]:
    vocabulary = _vocabulary(tokenizer)
    if isinstance(vocabulary, dict):
        found = {id_: token for token, id_ in vocabulary.items() if isinstance(id_, int)}
    else:
        pieces = vocabulary if isinstance(vocabulary, list) else []
        found = {id_: piece[0] for id_, piece in enumerate(pieces) if isinstance(piece, list) and piece}
    return found | {id_: token for id_, token, _ in _added(tokenizer) if isinstance(id_, int)}
