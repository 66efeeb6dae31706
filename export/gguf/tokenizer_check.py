"""Checks that llama.cpp tokenizes texts as the tokenizer.json that a file was made from."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgeinfer.bundle.gguf.library import llama_library
from edgeinfer.bundle.gguf.normalizer import GgufNormalizer
from edgeinfer.errors import BackendError, CheckpointError
from edgeinfer.export.gguf.architectures import ONNX_HINT
from edgeinfer.export.gguf.vocabulary import Vocabulary

# What every text is made of; a difference here is a wrong tokenizer.
ORDINARY = (
    "Once upon a time, there was a little dog named Max. He didn't like the rain!",
    "She said: \"I'll be there at 10:45, won't I?\" They've gone; we're late - it's 3.14159% of 1,000,000.",
    "def main(args):\n    for i in range(10):\n\tprint(f'{i:>4}', end='\\n')\n\n\nreturn {\"a\": [1, 2]}",
    "# Title\n\n* one\n* two\n\n1. three\r\n2. four\r\n",
    "x = (a+b)*c != d && e <= f || !g; // http://example.com/path?q=1&r=2#s",
    "CamelCase snake_case SHOUTING kebab-case O'Brien I'M HE'S WE'LL",
    "Die Straße heißt „Größe“ – où naïve café coûte 5 € à Noël, señor.",
    "12345678901234567890 007 1st 2nd 3rd v1.2.3 0xDEADBEEF",
)
# What texts may hold; differences are counted, as versions of Unicode's tables differ.
RARE = (
    "  two spaces before,   three between  and two after  ",
    "tabs\t\tand\n\n\n \n spaces \t\n",
    " ",
    "\n",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6211\u6709\uff13\u4e2a\u82f9\u679c\u3002",
    "\u3053\u3093\u306b\u3061\u306f\u4e16\u754c\u3001\u30ab\u30bf\u30ab\u30ca \uc548\ub155\ud558\uc138\uc694",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31",
    "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f \U0001f44d\U0001f3fd",
    "e\u0301 n\u0303 \u212b \ufb01 \u00bd \u2460 \u2167 \uff21\uff22",
    "\u00a0no\u2009break\u3000wide\u200bzero\ufeffmark\u2028line",
    "\u2581 under \u2581\u2581 line \u0120 \u010a byte letters",
    "\ud7ff\ue000\ufffd\U00010000\U0010fffd",
    "'s 't 're 've 'm 'll 'd 'S 'RE \u2019s \u2019ll",
    "a" * 60 + "!" * 30 + " " * 40 + "\n" * 9,
)
# Of special tokens that are tried; some vocabularies have thousands.
_MOST_SPECIAL = 16


@dataclass(frozen=True)
class TokenizerCheck:
    """How many texts were compared, and those that llama.cpp tokenizes differently."""

    texts: int
    different: tuple[str, ...]


def check_tokenizer(model: Path, tokenizer: bytes, vocabulary: Vocabulary) -> TokenizerCheck:
    """Compares the two tokenizers on texts of many kinds, special tokens among them."""
    from tokenizers import Tokenizer

    expected = Tokenizer.from_buffer(tokenizer)
    normalize = GgufNormalizer(vocabulary.steps, vocabulary.special)
    texts = [*ORDINARY, *RARE, *_with_special(vocabulary.special)]
    with llama_encoder(model) as encode:
        different = [text for text in texts if encode(normalize(text)) != expected.encode(text).ids]
    wrong = next((text for text in different if text in ORDINARY), None)
    if wrong is not None:
        message = f"llama.cpp tokenizes text such as {wrong!r} differently from tokenizer.json."
        raise CheckpointError(message, ONNX_HINT)
    return TokenizerCheck(len(texts), tuple(different))


def _with_special(special: Iterable[str]) -> Iterator[str]:
    for token in list(special)[:_MOST_SPECIAL]:
        yield f"{token}a dog{token}{token} a cat {token} \n{token}\nthe end{token}"


@contextmanager
def llama_encoder(model: Path) -> Iterator[Any]:
    """A function from a text to llama.cpp's tokens, with those added before and after it."""
    lib = llama_library()
    params = lib.llama_model_default_params()
    params.vocab_only = True
    handle = lib.llama_model_load_from_file(str(model).encode(), params)
    if not handle:
        raise BackendError(f"llama.cpp cannot load the vocabulary of {model}.", "Export the model again.")
    vocab = lib.llama_model_get_vocab(handle)

    def encode(text: str) -> list[int]:
        data = text.encode("utf-8")
        # A token is a byte at least, and two may be put around the text; a prefix is one more.
        ids = (ctypes.c_int32 * (len(data) + 4))()
        count = lib.llama_tokenize(vocab, data, len(data), ids, len(ids), True, True)
        return list(ids[:count])

    try:
        yield encode
    finally:
        lib.llama_model_free(handle)
