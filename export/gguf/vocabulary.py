"""A checkpoint's tokenizer in llama.cpp's terms: tokens, types, merges or scores, special ids, pre-tokenizer.

Scores are made of the merges of tokenizer.json. What llama.cpp's tokenizers lack is refused, or named as a step that
edgeinfer takes before them (edgeinfer.bundle.gguf.normalizer). A pre-tokenizer's name is found by its steps, pattern
for pattern, not by the model's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer.bundle.gguf.normalizer import NORMALIZER_KEY, PRE_TOKENIZERS, default_steps
from edgeinfer.bundle.gguf.vocabulary import BYTE, CONTROL, NORMAL, STRIP_KEYS, UNKNOWN, UNUSED, USER_DEFINED
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.gguf.architectures import ONNX_HINT
from edgeinfer.export.source.checkpoint import parse_object
from edgeinfer.export.source.hf_config import HFConfig
from edgeinfer.export.source.sidecar import read_sidecar

UNDERLINE = "\u2581"  # what stands for a space in SentencePiece's tokens
# Lower than any merge.
_NO_MERGE = -1e9
_FORMS = {"NFC": "nfc", "NFD": "nfd", "NFKC": "nfkc", "NFKD": "nfkd"}
# By pattern and replacement.
_SPACES = {(r"\A +| +\z", ""): "trim_spaces", (r" {2,}", " "): "join_spaces"}
_ENDS = ("eos", "eot", "eom")


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer's metadata of a file."""

    model: str  # "gpt2" for byte-level BPE, "llama" for SentencePiece's
    pre: str  # llama.cpp's name of the pre-tokenizer
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    ids: dict[str, int]  # special tokens by llama.cpp's names: bos, eos, eot, eom, unk, pad
    add_bos: bool
    add_eos: bool
    merges: tuple[str, ...] = ()  # of "gpt2"; others have scores
    scores: tuple[float, ...] = ()
    prefix: bool = False  # a space is put before a text; of "llama"
    steps: tuple[str, ...] = ()  # of edgeinfer.bundle.gguf.normalizer
    templates: Mapping[str, str] = field(default_factory=dict)  # chat templates by name, "default" and "tool_use"
    special: tuple[str, ...] = ()  # spellings of special and added tokens, at which texts are cut first
    # Ids of tokens that absorb white space before, and after them.
    strips: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


def read_vocabulary(folder: Path, config: HFConfig, rows: int) -> Vocabulary:
    """Reads a checkpoint's tokenizer; rows of the embedding without a token become unused tokens."""
    files = read_sidecar(folder, config).files
    tokenizer = parse_object(files["tokenizer.json"], "tokenizer.json")
    model = tokenizer.get("model") or {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise _unsupported(f"tokenizer.json of the type {model.get('type')}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(name):
            raise _unsupported(f"tokenizer.json with {name}")
    encoder = _encoder(files["tokenizer.json"])
    tokens, types = _tokens(tokenizer, rows)
    before, after = _added(encoder)
    ids = _special_ids(encoder, files, before, after)
    named = {"default": "chat_template.jinja", "tool_use": "chat_template.tool_use.jinja"}
    common = {
        "tokens": tokens,
        "ids": ids,
        "add_bos": bool(before),
        "add_eos": bool(after),
        "templates": {name: files[file].decode("utf-8") for name, file in named.items() if file in files},
        "special": tuple(entry["content"] for entry in tokenizer.get("added_tokens") or ()),
        "strips": tuple(
            tuple(entry["id"] for entry in tokenizer.get("added_tokens") or () if entry.get(side))
            for side in ("lstrip", "rstrip")
        ),
    }
    steps = byte_level_steps(tokenizer)
    make = _sentence_pieces if steps is None else _byte_level
    return make(tokenizer, types, common)


def add_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """Adds the keys of a tokenizer; `writer` is the gguf package's."""
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    if vocabulary.model == "llama":
        writer.add_token_scores(vocabulary.scores)
        writer.add_add_space_prefix(vocabulary.prefix)
    else:
        writer.add_token_merges(vocabulary.merges)
    add = {
        "bos": writer.add_bos_token_id,
        "eos": writer.add_eos_token_id,
        "eot": writer.add_eot_token_id,
        "eom": writer.add_eom_token_id,
        "unk": writer.add_unk_token_id,
        "pad": writer.add_pad_token_id,
    }
    for name, id_ in vocabulary.ids.items():
        add[name](id_)
    writer.add_add_bos_token(vocabulary.add_bos)
    writer.add_add_eos_token(vocabulary.add_eos)
    if vocabulary.steps != default_steps(vocabulary.pre):
        writer.add_array(NORMALIZER_KEY, list(vocabulary.steps) or ["none"])
    for key, ids in zip(STRIP_KEYS, vocabulary.strips, strict=True):
        writer.add_array(key, ids)  # nothing where there are none
    if vocabulary.templates:
        writer.add_chat_template([{"name": name, "template": text} for name, text in vocabulary.templates.items()])


def _byte_level(tokenizer: dict[str, Any], types: list[int], common: dict[str, Any]) -> Vocabulary:
    model, pre = tokenizer["model"], byte_level_steps(tokenizer) or []
    merges = tuple(_merge(pair) for pair in model.get("merges") or ())
    if not merges:
        raise _unsupported("tokenizer.json without merges")
    steps = [_FORMS.get(step["type"]) for step in flattened(tokenizer.get("normalizer"), "normalizers")]
    if None in steps:
        raise _unsupported(f"the normalizer {tokenizer['normalizer']}")
    if pre[-1].get("add_prefix_space"):
        if len(pre) > 1:
            raise _unsupported("a space put before each piece of a text")
        steps.append("prefix")
    ignore = bool(model.get("ignore_merges"))
    name = pre_tokenizer_name(pre, ignore, merges_matter=_merges_matter(model, merges, common["special"]))
    return Vocabulary("gpt2", name, types=tuple(types), merges=merges, steps=tuple(map(str, steps)), **common)


def _sentence_pieces(tokenizer: dict[str, Any], types: list[int], common: dict[str, Any]) -> Vocabulary:
    model, tokens = tokenizer["model"], common["tokens"]
    if not model.get("byte_fallback"):
        raise _unsupported("tokenizer.json that works on neither bytes nor SentencePiece's pieces")
    places = {token: i for i, token in enumerate(tokens)}
    for byte in range(256):
        id_ = places.get(f"<0x{byte:02X}>")
        if id_ is None:
            raise _unsupported(f"a vocabulary without the byte <0x{byte:02X}>")
        types[id_] = BYTE
    unknown = places.get(model.get("unk_token") or "")
    if unknown is not None:
        types[unknown] = UNKNOWN
    scores = [_NO_MERGE if kind == NORMAL and len(t) > 1 else 0.0 for t, kind in zip(tokens, types, strict=True)]
    ranked: set[str] = set()
    for rank, pair in enumerate(model.get("merges") or ()):
        merged = "".join(_merge(pair).split(" "))
        if merged in places and merged not in ranked:
            ranked.add(merged)
            scores[places[merged]] = -float(rank)
    prefix, steps = _space_steps(tokenizer)
    return Vocabulary(
        "llama", "default", types=tuple(types), scores=tuple(scores), prefix=prefix, steps=steps, **common
    )


def _space_steps(tokenizer: dict[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Whether llama.cpp puts a space before a text, and the steps before that."""
    prefix, steps, escapes = False, [], False
    for step in flattened(tokenizer.get("normalizer"), "normalizers"):
        kind, pattern = step["type"], step.get("pattern") or {}
        if kind in _FORMS:
            steps.append(_FORMS[kind])
        elif kind == "Prepend" and step.get("prepend") == UNDERLINE:
            prefix = True
        elif kind == "Replace" and (pattern.get("Regex"), step.get("content")) in _SPACES:
            steps.append(_SPACES[pattern["Regex"], step["content"]])
        elif kind == "Replace" and pattern.get("String") == " " and step.get("content") == UNDERLINE:
            escapes = True
        else:
            raise _unsupported(f"the normalizer {step}")
    for step in flattened(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if escapes and step["type"] == "Split" and step.get("pattern") == {"String": " "}:
            continue  # Gemma's, which finds no spaces any more
        if step["type"] != "Metaspace" or step.get("replacement") != UNDERLINE:
            raise _unsupported(f"the pre-tokenizer {step} with SentencePiece's pieces")
        escapes = True
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        prefix = prefix or scheme == "always"
        steps += {"always": ["unprefix"], "first": ["first_prefix"]}.get(scheme, [])
    if not escapes:
        raise _unsupported("a tokenizer.json that leaves spaces as they are")
    return prefix, tuple(steps)


def _tokens(tokenizer: dict[str, Any], rows: int) -> tuple[tuple[str, ...], list[int]]:
    """Spellings and types of all rows; rows without a token are unused."""
    tokens: list[str | None] = [None] * rows
    types = [UNUSED] * rows
    for token, id_ in tokenizer["model"]["vocab"].items():
        _place(tokens, id_, token)
        types[id_] = NORMAL
    for entry in tokenizer.get("added_tokens") or ():
        _place(tokens, entry["id"], entry["content"])
        types[entry["id"]] = CONTROL if entry.get("special") else USER_DEFINED
    named = [f"[PAD{i}]" if token is None else token for i, token in enumerate(tokens)]
    if len(set(named)) != rows:
        raise CheckpointError("tokenizer.json has two tokens with the same text.", "Correct its added tokens.")
    return tuple(named), types


def _place(tokens: list[str | None], id_: Any, token: str) -> None:
    if not isinstance(id_, int) or not 0 <= id_ < len(tokens):
        message = f"tokenizer.json has the token {token!r} at {id_}, but the embedding has only {len(tokens)} rows."
        raise CheckpointError(message, "Check that the tokenizer belongs to this model.")
    tokens[id_] = token


def _encoder(data: bytes) -> Any:
    from tokenizers import Tokenizer

    try:
        encoder = Tokenizer.from_buffer(data)
        encoder.encode("a")
    except Exception as error:  # the library raises plain Exception
        message = f"The checkpoint's tokenizer cannot be used: {error}."
        raise CheckpointError(message, "Download the checkpoint again.") from error
    return encoder


def _added(encoder: Any) -> tuple[list[int], list[int]]:
    """Ids put before and after a text; at most one each."""
    plain, full = encoder.encode("a", add_special_tokens=False).ids, encoder.encode("a").ids
    starts = (i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain)
    start = next(starts, None)
    if start is None or start > 1 or len(full) - start - len(plain) > 1:
        raise _unsupported(f"a post-processor that makes {full} of {plain}")
    return full[:start], full[start + len(plain) :]


def _special_ids(encoder: Any, files: dict[str, bytes], before: list[int], after: list[int]) -> dict[str, int]:
    """Special tokens by tokenizer_config.json, generation_config.json or config.json."""
    strings = json.loads(files["special_tokens.json"])
    generation = json.loads(files["generation_config.json"])
    found = {}
    for name in ("bos", "eos", "unk", "pad"):
        spelled = strings.get(f"{name}_token")
        id_ = None if spelled is None else encoder.token_to_id(spelled)
        given = generation.get(f"{name}_token_id")
        found[name] = id_ if id_ is not None or isinstance(given, list) else given
    ends = [id_ for id_ in (*after, found["eos"], *generation["eos_token_id"]) if id_ is not None]
    if not ends:
        hint = "Name its eos_token in tokenizer_config.json."
        raise CheckpointError("The checkpoint does not say which token ends a text.", hint)
    # llama.cpp takes a token of its own for the first one where none is named.
    first = before[0] if before else found["bos"] if found["bos"] is not None else ends[0]
    found |= {"bos": first} | dict(zip(_ENDS, dict.fromkeys(ends), strict=False))
    return {name: id_ for name, id_ in found.items() if id_ is not None}


def _merge(pair: Any) -> str:
    """A merge as llama.cpp has it: two parts and a space between."""
    return pair if isinstance(pair, str) else " ".join(pair)


def _merges_matter(model: dict[str, Any], merges: tuple[str, ...], special: tuple[str, ...]) -> bool:
    """Whether a whole word of the vocabulary may differ from the result of its merges."""
    from tokenizers.models import BPE

    pairs: Iterator[list[str]] = (merge.split(" ", 1) for merge in merges)
    rules = BPE(model["vocab"], [(a, b) for a, b in pairs])
    return any(len(rules.tokenize(token)) != 1 for token in model["vocab"].keys() - set(special))


def _unsupported(what: str) -> CheckpointError:
    return CheckpointError(f"llama.cpp has no tokenizer for {what}.", ONNX_HINT)


def flattened(step: dict[str, Any] | None, inner: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, with sequences flattened."""
    if step is None:
        return
    if step.get("type") == "Sequence":
        for each in step.get(inner, ()):
            yield from flattened(each, inner)
    else:
        yield step


def byte_level_steps(tokenizer: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The steps of a pre-tokenizer that ends in bytes; None for others."""
    steps = list(flattened(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    return steps if steps and steps[-1].get("type") == "ByteLevel" else None


def pre_tokenizer_name(steps: list[dict[str, Any]], ignore_merges: bool, *, merges_matter: bool) -> str:
    """llama.cpp's name of the steps; merges do not matter where they lead to every word."""
    signature = tuple(word for step in steps for word in _signature(step))
    same = [row for row in PRE_TOKENIZERS if row.steps == signature]
    fitting = [row for row in same if row.whole_words == ignore_merges] or ([] if merges_matter else same)
    if not fitting:
        shown = " then ".join(signature) + (" with ignore_merges" if ignore_merges else "")
        message = f"llama.cpp has no pre-tokenizer that splits words as this tokenizer.json does: {shown}."
        raise CheckpointError(message, "Export it to ONNX instead: leave out --format gguf.")
    return fitting[0].names.split()[0]


def _signature(step: dict[str, Any]) -> Iterator[str]:
    """A step in short, with the same words for the same effect."""
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
