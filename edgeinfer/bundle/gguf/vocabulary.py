"""The vocabulary in a GGUF file's metadata: its parts checked against each other; turns no text into tokens.

llama.cpp decides by the spelling of tokens which of them end a reply, which is repeated here but for tokens that the
file calls text: those of normal type, and a tag `</s>` among the user's. It ends the whole process where two tokens are
spelled alike, or where a SentencePiece vocabulary has no token for a byte of a text: such files are refused.
"""

from __future__ import annotations

import re
from array import array

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.gguf.metadata import GgufArray, Metadata, damaged
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass

# Our own keys: ids of special tokens that take the white space before them, and after them.
STRIP_KEYS = ("edgeinfer.tokenizer.lstrip", "edgeinfer.tokenizer.rstrip")

_PREFIX = "tokenizer.ggml."
_MAX_TOKENS = 1_000_000
_NO_VOCABULARY = ("no_vocab", "none")
# Kinds of byte-pair vocabularies, and the pre-tokenizer that needs no merges.
_BYTE_PAIRS = ("gpt2", "hybriddna", "whitespace")
_MERGED = (*_BYTE_PAIRS, "gemma4")
_UNMERGED = "kimi-k2"
_TOKEN_TYPES = range(7)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Phi-3's special tokens take the white space behind them, but for these. Files do not say so; llama.cpp knows them by
# the model's name.
_PHI3, _PHI3_KEEPS = re.compile(r"phi-?3|phi 3\.5", re.IGNORECASE), (b"<unk>", b"<s>", b"<|endoftext|>")
_SENTENCE_PIECE = "llama"
_SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "sep": "seperator_token_id",  # as the format spells it
    "pad": "padding_token_id",
    "mask": "mask_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
# Without these a text begins or ends wrongly. For the others, some published files have numbers that are no tokens.
_ESSENTIAL = ("bos", "eos", "eot", "eom")
# Special tokens of files that name none, by the kind of vocabulary.
_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
    "plamo2": {"bos": 1, "eos": 2, "unk": 0, "pad": 3},
    **{kind: {"bos": 11, "eos": 11} for kind in _BYTE_PAIRS},
}
_NO_BOS_PRE = ("chatglm-bpe", "glm4", "glm5")
_BOS_KINDS = ("llama", "bert")
_BOS_PRE = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    *("tekken", "chameleon"),
)
# Spellings that end a reply wherever they are tokens, and those that do where the metadata name no such token.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
_FILL_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# (spelling, others): the spelling ends no reply where all of one of the groups of others are among the ends.
_NOT_ENDS = (
    ("<|end|>", tuple((call, other) for call in ("<|call|>", "<|calls|>") for other in ("<|return|>", "<|flush|>"))),
    ("</s>", (("<|tool_response>",), ("<|plamo:eos|>",))),
)


@dataclass(frozen=True)
class GgufVocabulary:
    """A vocabulary whose parts agree."""

    model: str  # its kind: "gpt2" for byte pairs, "llama" for SentencePiece and so on
    pre: str  # how byte pairs are kept from crossing words; empty where the file does not say
    tokens: GgufArray  # their spellings
    token_types: GgufArray | None  # normal, control and so on, as llama.cpp numbers them; None where the file has none
    scores: GgufArray | None  # None where the file has none
    merges: int  # their number
    # Ids by what they are for: bos, eos, eot, eom, unk, sep, pad, mask, and three of fill-in-the-middle.
    special: dict[str, int]
    special_texts: dict[str, str]  # their spellings
    ends: tuple[int, ...]  # tokens that end a reply, ascending
    add_bos: bool  # a text begins with the token bos
    add_eos: bool  # and ends with eos
    # Ids of tokens that take the white space before them, and of those that take what is behind.
    strips: tuple[frozenset[int], frozenset[int]]
    chat_template: str | None  # jinja text, not trusted
    tool_template: str | None = None  # the same of conversations with tools, where they have a template of their own

    @property
    def size(self) -> int:
        return self.tokens.count

    @property
    def bos(self) -> int | None:
        """The token that every text begins with, if there is one."""
        return self.special.get("bos") if self.add_bos else None


def read_vocabulary(gguf: GgufFile) -> GgufVocabulary:
    data, path = gguf.metadata, gguf.path
    model = data.text("tokenizer.ggml.model", "none")
    if model in _NO_VOCABULARY:
        raise BundleError(f"{path} has no vocabulary.", "Take another GGUF file of the model.")
    pre = data.text(f"{_PREFIX}pre", "")
    tokens = data.array(f"{_PREFIX}tokens", "string")
    if not 1 <= tokens.count <= _MAX_TOKENS:
        raise damaged(path, f"it has {tokens.count} tokens, not 1 to {_MAX_TOKENS}")
    special = _special(gguf, model, pre, tokens.count)
    found, texts = _scan(gguf, tokens, special)
    types = _types(gguf, tokens.count)
    if types is not None:
        # Tokens of these kinds are text; `</s>` is a tag of HTML, too.
        numbers = types.numbers()
        text = {spelling for spelling, token in found.items() if numbers[token] == NORMAL}
        text |= {"</s>"} if "</s>" in found and numbers[found["</s>"]] == USER_DEFINED else set()
        found = {spelling: token for spelling, token in found.items() if spelling not in text}
    if model == _SENTENCE_PIECE and not _has_all_bytes(tokens):
        raise damaged(path, "its SentencePiece vocabulary has no token for some bytes")
    add_bos = data.flag(f"{_PREFIX}add_bos_token", model in _BOS_KINDS or (model in _BYTE_PAIRS and pre in _BOS_PRE))
    template, tool_template = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
    tool_use = data.text(tool_template) if tool_template in data else None
    return GgufVocabulary(
        model=model,
        pre=pre,
        tokens=tokens,
        token_types=types,
        scores=_scores(gguf, tokens.count),
        merges=_merges(data, model, pre),
        special=special,
        special_texts={name: texts[token] for name, token in special.items()},
        ends=_ends(special, found, texts),
        # llama.cpp overrules files of this kind that say otherwise.
        add_bos=add_bos or model == "gemma4",
        add_eos=data.flag(f"{_PREFIX}add_eos_token", False),
        strips=_strips(gguf, model, tokens, types),
        chat_template=data.text(template) if template in data else tool_use,
        tool_template=tool_use,
    )


def _types(gguf: GgufFile, count: int) -> GgufArray | None:
    types = _per_token(gguf, "token_type", count, "int32")
    if types is not None and not np.isin(types.numbers(), _TOKEN_TYPES).all():
        raise damaged(gguf.path, "a token has an unknown type")
    return types


def _scores(gguf: GgufFile, count: int) -> GgufArray | None:
    scores = _per_token(gguf, "scores", count, "float32", "int32")
    if scores is not None and not np.isfinite(scores.numbers()).all():
        raise damaged(gguf.path, "a token's score is not finite")
    return scores


def _per_token(gguf: GgufFile, name: str, count: int, *item_types: str) -> GgufArray | None:
    """An array that has an item for each token, if it is there."""
    if _PREFIX + name not in gguf.metadata:
        return None
    items = gguf.metadata.array(_PREFIX + name, *item_types)
    if items.count != count:
        raise damaged(gguf.path, f"it has {count} tokens and {items.count} items of {_PREFIX}{name}")
    return items


def _merges(data: Metadata, model: str, pre: str) -> int:
    name = f"{_PREFIX}merges"
    if model not in _MERGED or (pre == _UNMERGED and name not in data):
        return 0
    return data.array(name, "string").count


def _special(gguf: GgufFile, model: str, pre: str, count: int) -> dict[str, int]:
    """Ids of the tokens that have a purpose."""
    special = {name: token for name, token in _DEFAULTS.get(model, {}).items() if token < count}
    if pre in _NO_BOS_PRE:
        special.pop("bos", None)
    for name, key in _SPECIAL.items():
        if _PREFIX + key not in gguf.metadata:
            continue
        token = gguf.metadata[_PREFIX + key]
        if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < count:
            special[name] = token
        elif name in _ESSENTIAL:
            raise damaged(gguf.path, f"{_PREFIX}{key} is not one of its {count} tokens")
    return special


def _scan(gguf: GgufFile, tokens: GgufArray, special: dict[str, int]) -> tuple[dict[str, int], dict[int, str]]:
    """Ids of the known spellings, and spellings of these and of the special ids; refuses equal spellings."""
    wanted = {text.encode() for text in (*_ENDS, *(text for texts in _FILL_ENDS.values() for text in texts))}
    chosen = set(special.values())
    found: dict[str, int] = {}
    texts: dict[int, str] = {}
    hashes = array("q")  # a set of the spellings themselves would take ten times as much
    for token, spelling in enumerate(tokens.spellings()):
        hashes.append(hash(spelling or b"[EMPTY_%d]" % token))
        if spelling in wanted:
            found[spelling.decode()] = token
        if spelling in wanted or token in chosen:
            texts[token] = spelling.decode("utf-8", "replace")
    ordered: NDArray[np.int64] = np.sort(np.frombuffer(hashes, np.int64))  # (V,)
    if (ordered[1:] == ordered[:-1]).any():
        raise damaged(gguf.path, "two of its tokens are spelled alike")
    return found, texts


def _strips(
    gguf: GgufFile, model: str, tokens: GgufArray, types: GgufArray | None
) -> tuple[frozenset[int], frozenset[int]]:
    before, behind = (_ids(gguf, key, tokens.count) for key in STRIP_KEYS)
    name = gguf.metadata.get("general.name")
    if model == _SENTENCE_PIECE and not behind and isinstance(name, str) and _PHI3.search(name) and types is not None:
        special = np.isin(types.numbers(), (UNKNOWN, CONTROL, USER_DEFINED))
        pairs = enumerate(zip(tokens.spellings(), special, strict=True))
        behind = frozenset(id_ for id_, (text, marked) in pairs if marked and text not in _PHI3_KEEPS)
    return before, behind


def _ids(gguf: GgufFile, key: str, count: int) -> frozenset[int]:
    if key not in gguf.metadata:
        return frozenset()
    ids = frozenset(gguf.metadata.array(key, "int32").numbers().tolist())
    if not all(0 <= id_ < count for id_ in ids):
        raise damaged(gguf.path, f"{key} names an id that is not one of its {count} tokens")
    return ids


def _has_all_bytes(tokens: GgufArray) -> bool:
    """Whether every byte is a token, as "<0x41>" or as the character itself."""
    names = {b"<0x%02X>" % byte: byte for byte in range(256)} | {bytes([byte]): byte for byte in range(128)}
    return len({names[spelling] for spelling in tokens.spellings() if spelling in names}) == 256


def _ends(special: dict[str, int], found: dict[str, int], texts: dict[int, str]) -> tuple[int, ...]:
    """The tokens that end a reply, as llama.cpp finds them."""
    ends = {special[name] for name in ("eos", "eot", "eom", *_FILL_ENDS) if name in special}
    ends |= {token for text, token in found.items() if text in _ENDS}
    for name, spellings in _FILL_ENDS.items():
        if name not in special:
            ends |= {found[text] for text in spellings if text in found}
    spelled = {texts[token]: token for token in ends}
    for text, groups in _NOT_ENDS:
        if text in spelled and any(all(other in spelled for other in group) for group in groups):
            ends.discard(spelled[text])
    return tuple(sorted(ends))
