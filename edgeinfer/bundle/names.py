"""What a model's file or folder is called, as people read it, and what in the name says its type."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# How llama.cpp's tools write a type in the name of a file.
_QUANTIZATION = re.compile(
    r"(?:^|[-._:/])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|F16|F32|MXFP4(?:_MOE)?))(?=$|[-._/])", re.IGNORECASE
)
# At the end of a name: a type, bits, and words of the format.
_FORMAT = re.compile(rf"(?:{_QUANTIZATION.pattern}|[-._:](?:\d+-?bits?|gguf|imat(?:rix)?|i1|latest))$", re.IGNORECASE)
# Names that do not describe the model: model.gguf, ggml-model-q4_0.gguf, and digests.
_NAMELESS = re.compile(
    rf"(?:ggml[-_])?model|ggml|gguf|weights|(?:sha256[-:])?[0-9a-f]{{32,}}|{_QUANTIZATION.pattern}", re.IGNORECASE
)
_SIZE = re.compile(r"(?:\d+x|[ae])?\d+(?:\.\d+)?[mbk]", re.IGNORECASE)
_WORD = re.compile(r"([a-z]+)([\d.]*)")
# Families as their makers write them; a space stands where the version is a separate word.
_FAMILIES = {
    "codegemma": "CodeGemma ",
    "codellama": "CodeLlama ",
    "deepseek": "DeepSeek",
    "exaone": "EXAONE ",
    "falcon": "Falcon",
    "gemma": "Gemma ",
    "glm": "GLM",
    "gpt": "GPT",
    "granite": "Granite ",
    "internlm": "InternLM",
    "lfm": "LFM",
    "llama": "Llama ",
    "minicpm": "MiniCPM",
    "ministral": "Ministral ",
    "mistral": "Mistral ",
    "mixtral": "Mixtral ",
    "olmo": "OLMo ",
    "olmoe": "OLMoE ",
    "phi": "Phi ",
    "qwen": "Qwen",
    "qwq": "QwQ ",
    "smollm": "SmolLM",
    "stablelm": "StableLM ",
    "starcoder": "StarCoder",
    "stories": "Stories",
    "tinyllama": "TinyLlama ",
}
_WORDS = {"it": "IT", "vl": "VL", "moe": "MoE", "oss": "OSS", "dpo": "DPO", "sft": "SFT", "awq": "AWQ", "gptq": "GPTQ"}


def part_of(name: str) -> tuple[int, int]:
    """The number of a GGUF file among the parts of its model, and how many there are."""
    part = _PART.search(name)
    return (1, 1) if part is None else (int(part[1]), int(part[2]))


def stem_of(name: str) -> str:
    """The name of a GGUF model, without its part and its ending."""
    return _PART.sub("", name).removesuffix(".gguf")


def quantization_of(name: str) -> str | None:
    """The type in the name of a GGUF file, such as Q4_K_M; None where it names none."""
    found = _QUANTIZATION.findall(stem_of(name))
    return found[-1].upper() if found else None


def file_name(path: Path, named: str = "") -> str:
    """What a GGUF model is called: by its file, where that says anything, or else by its metadata or its folder.
    Metadata are what the file was made with. Many files say the name of another model, or only of its family."""
    stem = stem_of(path.name)
    if not _NAMELESS.fullmatch(_without_format(stem)):
        return stem
    return named or path.absolute().parent.name or stem


def display_name(name: str) -> str:
    """A model's name as people say it: Qwen2.5 Coder 0.5B Instruct, of qwen2.5-coder-0.5b-instruct-q4_k_m."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    parts = [part for part in re.split(r"[-_:\s]+", _without_format(stem_of(last))) if part]
    if len(parts) < 2 or not any(_SIZE.fullmatch(part) or _family(part) for part in parts):
        return last
    return " ".join(map(_written, parts))


def _without_format(name: str) -> str:
    while (shorter := _FORMAT.sub("", name)) not in ("", name):
        name = shorter
    return name


def _family(part: str) -> str | None:
    """The written form of the family that a part of a name begins with; None where it begins with none."""
    word = _WORD.fullmatch(part.lower())
    return None if word is None or word[1] not in _FAMILIES else (_FAMILIES[word[1]] + word[2]).strip()


def _written(part: str) -> str:
    if _SIZE.fullmatch(part):
        return part.upper().replace("X", "x")
    if part != part.lower():
        return part
    return _family(part) or _WORDS.get(part) or (part if re.match(r"v\d", part) else part[:1].upper() + part[1:])
