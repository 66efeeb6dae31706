"""A synthetic byte-level BPE tokenizer of any size, and text made of its words; knows nothing of models.

The memory of a tokenizer counts in a process's footprint, so a random checkpoint needs one as large as the real ones:
its words are drawn from syllables, and each word's prefixes become tokens, as merges from left to right.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.errors import UsageError

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "pseudo_text", "synthesize_vocabulary", "write_tokenizer"]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ONSETS = [*"bcdfghjklmnprstvwz", "br", "ch", "dr", "fl", "gr", "kl", "pl", "qu", "sh", "st", "th", "tr"]
_VOWELS = [*"aeiou", "ai", "ea", "ou"]
_CODAS = ["", "", "", "n", "r", "s", "t", "l", "nd", "st"]


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for bytes in a byte-level BPE, in byte order.

    Bytes that print stand for themselves, the others for the characters from U+0100 on (GPT-2's table).
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256))
    return [chr(byte) if byte in printing else chr(256 + next(others)) for byte in range(256)]


def _words(seed: int) -> Iterator[str]:
    """Endless pseudo-words of one to four syllables."""
    draw = random.Random(seed)
    while True:
        syllables = draw.choices((1, 2, 3, 4), weights=(4, 6, 3, 1))[0]
        parts = (draw.choice(_ONSETS) + draw.choice(_VOWELS) + draw.choice(_CODAS) for _ in range(syllables))
        yield "".join(parts)


def synthesize_vocabulary(entries: int, seed: int = 0) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of `entries` tokens without the special ones, and the merges that reach every one of them.

    Raises:
        UsageError: fewer entries than bytes.
    """
    if entries < 256:
        raise UsageError(f"A byte-level vocabulary of {entries} entries is too small.", "It needs at least 256.")
    alphabet = _byte_alphabet()
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in _words(seed):
        spelled = alphabet[ord(" ")] + word
        for end in range(2, len(spelled) + 1):
            if len(vocabulary) == entries:
                return vocabulary, merges
            if spelled[:end] not in vocabulary:
                vocabulary[spelled[:end]] = len(vocabulary)
                merges.append((spelled[: end - 1], spelled[end - 1]))
    raise AssertionError("the words are endless")


def write_tokenizer(path: Path, entries: int) -> None:
    """Write a `tokenizer.json` of exactly `entries` tokens, the last of them special."""
    vocabulary, merges = synthesize_vocabulary(entries - len(SPECIAL_TOKENS))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": len(vocabulary) + index, "content": token, **flags} for index, token in enumerate(SPECIAL_TOKENS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(merge) for merge in merges],
        },
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def pseudo_text(words: int, seed: int = 1) -> str:
    """So many pseudo-words separated by spaces."""
    source = _words(seed)
    return " ".join(next(source) for _ in range(words))
