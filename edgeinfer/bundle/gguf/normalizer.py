"""Pre-tokenizers by llama.cpp's names, and the steps that a text needs before llama.cpp tokenizes it.

llama.cpp's own tokenizers lack some steps of a model's. They are named in the metadata of a file, or are those of all
published models with its pre-tokenizer. They apply to each run of text between special tokens by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

from edgeinfer.bundle.gguf.metadata import Metadata
from edgeinfer.errors import BundleError

_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2 = _CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
QWEN35 = _CASES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = f"{_LOWER}|{_UPPER}" + r"|\p{N}" + _SLASHES
GPT4O = f"{_LOWER}{_CASES}?|{_UPPER}{_CASES}?" + r"|\p{N}{1,3}" + _SLASHES
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, "digits")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# By the steps of the tokenizer and whether words of the vocabulary are taken whole, without regard to merges.
PRE_TOKENIZERS: dict[tuple[tuple[str, ...], bool], str] = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((LLAMA3,), True): "llama-bpe",
    ((LLAMA3,), False): "dbrx",
    ((QWEN2,), False): "qwen2",
    ((QWEN35,), False): "qwen35",
    ((TEKKEN,), True): "tekken",
    ((GPT4O,), False): "gpt-4o",
    (DEEPSEEK_CODER, False): "deepseek-coder",
    (DEEPSEEK_V3, False): "deepseek-v3",
}
# Other names that llama.cpp has for them.
_ALSO = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "f2llmv2": "qwen2",
    "phi-2": "gpt-2",
}


def steps_of(name: str) -> tuple[tuple[str, ...], bool] | None:
    """The steps of a pre-tokenizer, and whether words of the vocabulary are taken whole; None for unknown names."""
    named = _ALSO.get(name, name)
    return next((steps for steps, known in PRE_TOKENIZERS.items() if known == named), None)


# An array of strings: names of steps in their order.
NORMALIZER_KEY = "edgeinfer.tokenizer.normalizer"
# GGUF has no key for the normalizer of a tokenizer.json. All models with these pre-tokenizers compose text: Qwen's and
# its descendants, Cohere's, and GPT-NeoX's (MPT, OLMo).
_COMPOSING = (
    *("qwen2", "qwen35", "deepseek-r1-qwen", "f2llmv2", "command-r", "tiny_aya", "cohere2moe", "mpt", "olmo"),
)


def default_steps(pre: str) -> tuple[str, ...]:
    """The steps of a file with this pre-tokenizer that names none."""
    return ("nfc",) if pre in _COMPOSING else ()


def normalizer_steps(metadata: Metadata) -> tuple[str, ...]:
    if NORMALIZER_KEY in metadata:
        return tuple(metadata.array(NORMALIZER_KEY, "string").strings())
    return default_steps(metadata.text("tokenizer.ggml.pre", ""))


# A space, and its replacement in SentencePiece's tokens.
_SPACES = (" ", "\u2581")


def _without_prefix(run: str) -> str:
    return run[1:] if run[0] in _SPACES and len(run) > 1 else run


def _with_prefix(run: str) -> str:
    return run if run[0] == " " else " " + run


def _with_first_prefix(run: str) -> str:
    return run if run[0] in _SPACES else " " + run


def _composed(form: str, run: str) -> str:
    # By the library's tables, not Python's: versions of Unicode differ, and the ids must be the checkpoint's.
    return run if run.isascii() else str(_form(form).normalize_str(run))


@cache
def _form(name: str) -> Any:
    from tokenizers import normalizers

    return getattr(normalizers, name)()


# Each takes a run of text that is not empty. "none" says that there are no others; "prefix" adds a missing space,
# "first_prefix" only before the first run; "unprefix" removes one where llama.cpp always adds another.
STEPS: dict[str, Callable[[str], str]] = {
    "none": lambda run: run,
    **{form.lower(): partial(_composed, form) for form in ("NFC", "NFD", "NFKC", "NFKD")},
    "trim_spaces": lambda run: run.strip(" "),
    "join_spaces": partial(re.compile(" {2,}").sub, " "),
    "prefix": _with_prefix,
    "first_prefix": _with_first_prefix,
    "unprefix": _without_prefix,
}


class GgufNormalizer:
    """The steps of a file, by their names in STEPS, on the runs of a text between spellings of special tokens."""

    def __init__(self, steps: Sequence[str], special: Iterable[str] = ()) -> None:
        unknown = [step for step in steps if step not in STEPS]
        if unknown:
            message = f"The file's tokenizer needs a step {unknown[0]!r} that this edgeinfer does not know."
            raise BundleError(message, "Update edgeinfer, or export the model again.")
        self._steps = tuple(steps)
        self._between = _any_of(special)

    def __call__(self, text: str) -> str:
        """A text as llama.cpp's tokenizer needs it, special tokens included."""
        parts = self._between.split(text) if self._between is not None else [text]
        # Every second part is a special token.
        return "".join(part if i % 2 else self.run(part, first=i == 0) for i, part in enumerate(parts))

    def run(self, run: str, *, first: bool = True) -> str:
        """Normalizes a run between special tokens."""
        for step in self._steps:
            if run and (first or step != "first_prefix"):
                run = STEPS[step](run)
        return run


def _any_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    # The longest first, as tokens may begin with others.
    longest = sorted(filter(None, spellings), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest))})") if longest else None
