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
from edgeinfer.core.errors import BundleError
from edgeinfer.core.records import dataclass

_CASES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
LLAMA3 = f"{_CASES}|{_WORD}" + r"|\p{N}{1,3}" + _REST
QWEN2 = f"{_CASES}|{_WORD}" + r"|\p{N}" + _REST
QWEN35 = _CASES + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
SEED = f"{_CASES}|{_WORD}" + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _LINES
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = (
    _CASES + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
MINICPM5 = (r"\p{N}{1,3}", f"{_CASES}|{_WORD}" + r"|\p{N}+" + _REST)
_LOWER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
TEKKEN = f"{_LOWER}|{_UPPER}" + r"|\p{N}" + _SLASHES
_CASED = f"{_LOWER}{_CASES}?|{_UPPER}{_CASES}?"
GPT4O = _CASED + r"|\p{N}{1,3}" + _SLASHES
TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
_KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|" + _KANA,
    _CASED + r"|\p{N}" + _SLASHES,
)
_CJK = "[一-龥\u0800-一가-\ud7ff]+"
DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, "digits")
_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM = (
    *(r"[\r\n]", rf"\s?[{_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    *(r"\s+$", _CJK, "digits"),
)
_MARKED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_MARKED += r"| ?[\p{P}\p{S}]+[\r\n]*" + _LINES
DEEPSEEK_V3 = (r"\p{N}{1,3}", _KANA, _MARKED)
AFMOE = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
    _MARKED,
)
PORO = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split text into words, under llama.cpp's names."""

    names: str  # separated by spaces; a file that is written has the first
    # Patterns in their order; "digits" stands for single digits, "words" for GPT-2's pattern.
    steps: tuple[str, ...]
    whole_words: bool = False  # words of the vocabulary are taken whole, without regard to merges
    # GGUF has no key for the normalizer of a tokenizer.json: these compose text in all published models.
    composes: bool = False


# Of rows with the same steps a checkpoint gets the first.
PRE_TOKENIZERS = (
    PreTokenizer("gpt-2 phi-2 exaone4 jais trillion granite-docling gigachat a.x-4.0 mellum", ("words",)),
    PreTokenizer("mpt olmo", ("words",), composes=True),
    PreTokenizer("smollm starcoder refact codeshell exaone minerva-7b mellum2", ("digits", "words")),
    PreTokenizer("command-r", ("digits", "words"), composes=True),
    PreTokenizer("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 glm5", (LLAMA3,), True),
    PreTokenizer("dbrx smaug-bpe chatglm-bpe", (LLAMA3,)),
    PreTokenizer("qwen2 deepseek-r1-qwen f2llmv2", (QWEN2,), composes=True),
    PreTokenizer("stablelm2 hunyuan megrez kormo solar-open grok-2", (QWEN2,)),
    PreTokenizer("qwen35", (QWEN35,), composes=True),
    PreTokenizer("tekken", (TEKKEN,), True),
    PreTokenizer("gpt-4o llama4 kanana2 minimax-m2", (GPT4O,)),
    PreTokenizer("deepseek-coder", DEEPSEEK_CODER),
    PreTokenizer("deepseek-llm", DEEPSEEK_LLM),
    PreTokenizer("deepseek-v3 hunyuan-dense joyai-llm hy_v4", DEEPSEEK_V3),
    PreTokenizer("tiny_aya cohere2moe", TINY_AYA, composes=True),
    PreTokenizer("seed-coder", (SEED,)),
    PreTokenizer("bailingmoe bailingmoe2 llada-moe", (BAILING,)),
    PreTokenizer("exaone-moe", (EXAONE_MOE,)),
    PreTokenizer("minicpm5", MINICPM5, True),
    PreTokenizer("youtu", YOUTU, True),
    PreTokenizer("afmoe", AFMOE),
    PreTokenizer("poro-chat bloom gpt3-finnish", (PORO,)),
    PreTokenizer("viking", (PORO, "digits")),
)


def pre_tokenizer(name: str) -> PreTokenizer | None:
    """The row of a name; None for unknown ones."""
    return next((row for row in PRE_TOKENIZERS if name in row.names.split()), None)


# An array of strings: names of steps in their order.
NORMALIZER_KEY = "edgeinfer.tokenizer.normalizer"


def default_steps(pre: str) -> tuple[str, ...]:
    """The steps of a file with this pre-tokenizer that names none."""
    known = pre_tokenizer(pre)
    return ("nfc",) if known is not None and known.composes else ()


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
