"""Tokenizers of every kind that GGUF files have, and checkpoints that consist of little else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from edgeinfer.bundle.gguf import normalizer as names
from edgeinfer.export.gguf.route import ORDINARY, RARE

ROWS = 900
UNDERLINE = "\u2581"
SPECIAL = ["<s>", "</s>", "<|user|>"]


def byte_level(*steps: Any, use_regex: bool = False, normalizer: Any = None, prefix: bool = False) -> Tokenizer:
    """A byte-level tokenizer trained on the texts that exports are checked with."""
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last]) if steps else last
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*ORDINARY, *RARE] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def whole_words(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer that takes words of the vocabulary whole, one of which no merges lead to."""
    parsed = json.loads(tokenizer.to_str())
    parsed["model"]["vocab"]["\u0120doing"] = 850
    parsed["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(parsed))


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def pieces(normalizer: Any = None, pre_tokenizer: Any = None) -> Tokenizer:
    """A tokenizer like SentencePiece's: pieces with underlines for spaces, and bytes for what has none."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator((UNDERLINE + word for text in ORDINARY * 3 for word in text.split()), trainer)
    parsed = json.loads(tokenizer.to_str())
    parsed["added_tokens"] = [token for token in parsed["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(parsed))
    if pre_tokenizer is None:
        escape = normalizers.Replace(" ", UNDERLINE)
        normalizer = normalizer or normalizers.Sequence([normalizers.Prepend(UNDERLINE), escape])
    else:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    steps = [decoders.Replace(UNDERLINE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefixed = getattr(pre_tokenizer, "prepend_scheme", "always" if pre_tokenizer is None else "never") != "never"
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace(scheme: str) -> Any:
    return pre_tokenizers.Metaspace(replacement=UNDERLINE, prepend_scheme=scheme, split=False)


def sentence_piece_spaces() -> Any:
    """The normalizer of tokenizers whose models drop spaces that say nothing."""
    trim = normalizers.Replace(Regex(r"\A +| +\z"), "")
    steps = [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Prepend(UNDERLINE)]
    return normalizers.Sequence([trim, *steps, normalizers.Replace(" ", UNDERLINE)])


_DEEPSEEK_CODER = (*map(split, names.DEEPSEEK_CODER[:-1]), pre_tokenizers.Digits(individual_digits=True))
# By llama.cpp's name of the pre-tokenizer and what is special about it.
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "gpt-2 nfc": lambda: byte_level(use_regex=True, normalizer=normalizers.NFC()),
    "gpt-2 prefix": lambda: byte_level(use_regex=True, prefix=True),
    "smollm": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "dbrx": lambda: byte_level(split(names.LLAMA3)),
    "llama-bpe": lambda: whole_words(byte_level(split(names.LLAMA3))),
    "qwen2": lambda: byte_level(split(names.QWEN2), normalizer=normalizers.NFC()),
    "qwen35": lambda: byte_level(split(names.QWEN35)),
    "tekken": lambda: whole_words(byte_level(split(names.TEKKEN))),
    "gpt-4o": lambda: byte_level(split(names.GPT4O)),
    "deepseek-coder": lambda: byte_level(*_DEEPSEEK_CODER),
    "deepseek-v3": lambda: byte_level(*map(split, names.DEEPSEEK_V3)),
    "default": pieces,
    "default first": lambda: pieces(pre_tokenizer=metaspace("first")),
    "default always": lambda: pieces(pre_tokenizer=metaspace("always")),
    "default never": lambda: pieces(pre_tokenizer=metaspace("never")),
    "default gemma": lambda: pieces(
        normalizers.Replace(" ", UNDERLINE), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "default spaces": lambda: pieces(normalizer=sentence_piece_spaces()),
}


def write_words(folder: Path, tokenizer: Tokenizer) -> Path:
    """A checkpoint without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder
