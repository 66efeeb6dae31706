"""The small files of a bundle: tokenizer, chat template, special tokens, generation defaults."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgeinfer.bundle.tokenizer_table import TABLE, encode_table
from edgeinfer.core.errors import CheckpointError
from edgeinfer.export.source.checkpoint import parse_object, read_bytes
from edgeinfer.export.source.hf_config import HFConfig

_TOKENIZER = "tokenizer.json"
_OLDER_TOKENIZERS = {
    "tokenizer.model": "a SentencePiece",
    "vocab.json": "byte pairs in",
    "tekken.json": "Mistral's",
    "vocab.txt": "word pieces in",
}
_TEMPLATE = "chat_template.jinja"
_TOOL_TEMPLATE = "chat_template.tool_use.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
_TOKEN_STRINGS = ("bos_token", "eos_token", "unk_token", "pad_token")
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Classes of transformers that compose text, whatever a tokenizer.json says: their published ones all say so.
_COMPOSING = ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "CohereTokenizer", "GPTNeoXTokenizer")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


@dataclass(frozen=True)
class Sidecar:
    """Small files by name, ready to be written."""

    files: dict[str, bytes] = field(default_factory=dict)
    tokenizer: dict[str, Any] | None = None  # what tokenizer.json holds, where it was made and not read

    def write(self, folder: Path, *, table: bool = True) -> None:
        """Writes all files into a folder, with the tokenizer's memory-mapped `table` where it can have one."""
        made = encode_table(self.tokenizer or self.files[_TOKENIZER]) if table else None
        for name, data in (self.files | ({} if made is None else {TABLE: made})).items():
            (folder / name).write_bytes(data)


def read_sidecar(folder: Path, config: HFConfig) -> Sidecar:
    tokenizer_config = _optional(folder / "tokenizer_config.json")
    files = {
        _TOKENIZER: _tokenizer(folder, tokenizer_config),
        "special_tokens.json": _json(_special_tokens(tokenizer_config)),
    }
    templates = read_templates(folder)
    default, tool_use = templates.get("default"), templates.get("tool_use")
    if default is not None:
        files[_TEMPLATE] = _utf8(default)
    if tool_use is not None and tool_use != default:
        files[_TOOL_TEMPLATE] = _utf8(tool_use)
    files["generation_config.json"] = _json(_generation(_optional(folder / "generation_config.json"), config))
    return Sidecar(files)


def _tokenizer(folder: Path, tokenizer_config: dict[str, Any]) -> bytes:
    path = folder / _TOKENIZER
    if path.is_file():
        data = read_bytes(path)
        tokenizer = parse_object(data, str(path))
        return _lean(_completed(data, tokenizer, tokenizer_config), tokenizer)
    for older, what in _OLDER_TOKENIZERS.items():
        if (folder / older).is_file():
            hint = "Convert it once: transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            raise CheckpointError(f"{folder} has {what} {older} but no {_TOKENIZER}.", hint)
    hint = "Copy the tokenizer files of the model into the checkpoint's folder."
    raise CheckpointError(f"{folder} has no {_TOKENIZER}.", hint)


def _completed(data: bytes, tokenizer: dict[str, Any], tokenizer_config: dict[str, Any]) -> bytes:
    """A tokenizer completed from tokenizer_config.json as transformers does: Unicode composition by class, and added
    tokens."""
    given = tokenizer.get("added_tokens") or []
    if not isinstance(given, list) or not all(map(_is_added_token, given)):
        return data
    added = {each["content"]: each for each in given}
    decoder, ids = tokenizer_config.get("added_tokens_decoder"), {each["id"] for each in given}
    for id_, each in (decoder if isinstance(decoder, dict) else {}).items():
        if not (id_.isdecimal() and isinstance(each, dict) and isinstance(content := each.get("content"), str)):
            continue
        if content in added or int(id_) not in ids:
            flags = {flag: each[flag] for flag in _FLAGS if isinstance(each.get(flag), bool)}
            plain = {"id": int(id_), "content": content} | dict.fromkeys(_FLAGS, False)
            added[content] = (added.get(content) or plain) | flags
    whole = sorted(added.values(), key=lambda each: int(each["id"]))
    name, normalizer = tokenizer_config.get("tokenizer_class"), tokenizer.get("normalizer")
    if isinstance(name, str) and name.removesuffix("Fast") in _COMPOSING:
        normalizer = normalizer or {"type": "NFC"}
    if (whole, normalizer) == (given, tokenizer.get("normalizer")):
        return data
    tokenizer |= {"added_tokens": whole, "normalizer": normalizer}
    return _written(tokenizer, data)


def _is_added_token(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and isinstance(entry.get("id"), int)


def _written(tokenizer: dict[str, Any], data: bytes) -> bytes:
    """A changed tokenizer; the original bytes where it holds half of a surrogate pair."""
    try:
        return json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError:
        return data


def _lean(data: bytes, tokenizer: dict[str, Any]) -> bytes:
    """A tokenizer with merges as strings instead of pairs, which devices parse in half of the memory. Unchanged where a
    part of a pair contains a space, or there are no pairs."""
    model = tokenizer.get("model")
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(merges, list) or not merges or not all(_is_plain_pair(pair) for pair in merges):
        return data
    tokenizer["model"]["merges"] = [" ".join(pair) for pair in merges]
    return _written(tokenizer, data)


def _is_plain_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) and " " not in p for p in pair)


def read_templates(folder: Path) -> dict[str, str]:
    """Chat templates by name; files win over the configuration, and one for tools alone is also the default."""
    configs = (_optional(folder / name) for name in ("tokenizer_config.json", "chat_template.json"))
    given = next((config["chat_template"] for config in configs if config.get("chat_template")), None)
    if isinstance(given, list):
        given = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
    named = given if isinstance(given, dict) else {"default": given}
    found = {str(name): template for name, template in named.items() if isinstance(template, str)}
    paths = {path.stem: path for path in (folder / _MORE_TEMPLATES).glob("*.jinja")}
    paths |= {"default": folder / _TEMPLATE}
    paths |= {"tool_use": folder / _TOOL_TEMPLATE} if (folder / _TOOL_TEMPLATE).is_file() else {}  # as bundles have it
    found |= {name: _text(path) for name, path in paths.items() if path.is_file()}
    return ({"default": found["tool_use"]} if "tool_use" in found else {}) | found


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text.", "Download the checkpoint again.") from error


def _utf8(template: str) -> bytes:
    try:
        return template.encode("utf-8")
    except UnicodeEncodeError as error:
        message = f"The chat template is not Unicode text: lone surrogate at index {error.start}."
        raise CheckpointError(message, "Correct tokenizer_config.json.") from error


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str | None]:
    strings: dict[str, str | None] = {}
    for name in _TOKEN_STRINGS:
        value = tokenizer_config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        strings[name] = value if isinstance(value, str) else None
    return strings


def _generation(generation: dict[str, Any], config: HFConfig) -> dict[str, Any]:
    ids = {name: generation.get(name, config.get(name)) for name in _TOKEN_IDS}
    for name in ("bos_token_id", "pad_token_id"):
        value = ids[name]
        # A list of one is how some checkpoints write a single id.
        ids[name] = value[0] if isinstance(value, list) and value else value
    end = ids["eos_token_id"]
    ids["eos_token_id"] = end if isinstance(end, list) else [] if end is None else [end]
    for name, value in ids.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in values):
            message = f"{name}={value!r} is not a token id."
            raise CheckpointError(message, "Correct generation_config.json or config.json.")
    return ids | {name: generation[name] for name in _DEFAULTS if generation.get(name) is not None}


def _optional(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path), str(path)) if path.is_file() else {}


def _json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1) + "\n").encode("utf-8")
