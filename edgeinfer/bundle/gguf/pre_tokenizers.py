"""How pre-tokenizers that llama.cpp has a name for cut texts, as a tokenizer.json says it."""

from __future__ import annotations

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
# Further names of llama.cpp's for the same.
_ALSO = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "f2llmv2": "qwen2",
    "phi-2": "gpt-2",
}


def steps_of(name: str) -> tuple[tuple[str, ...], bool] | None:
    """The steps of a pre-tokenizer, and whether words of the vocabulary are taken whole; None of a name without any."""
    named = _ALSO.get(name, name)
    return next((steps for steps, known in PRE_TOKENIZERS.items() if known == named), None)
