"""Reading what sentence-transformers stores with a checkpoint: the modules that follow the model, prompts, lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from edgeinfer.bundle.embedding import EmbeddingUse, Pooling
from edgeinfer.bundle.parts import DenseSpec
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.source.checkpoint import parse_object, read_bytes

_MODULES = "modules.json"
_POOLINGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_NAMED: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
# Modules of torch behind the pooling.
_ACTIVATIONS: dict[str, Any] = {"Identity": "", "Tanh": "tanh", "GELU": "gelu", "SiLU": "silu"}
_HINT = "Choose a model whose vectors are pooled by mean, the first or the last token."


@dataclass(frozen=True)
class Modules:
    """How texts become vectors, and the products behind the pooling, by the folders that hold them."""

    use: EmbeddingUse
    max_tokens: int | None = None  # of a text, where that is fewer than the model has positions
    dense: tuple[tuple[str, DenseSpec], ...] = ()


def read_modules(folder: Path) -> Modules | None:
    """None where the checkpoint was not made for sentence-transformers."""
    path = folder / _MODULES
    if not path.is_file():
        return None
    listed = parse_object(b'{"modules": %b}' % read_bytes(path), str(path))["modules"]
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise CheckpointError(f"{path} is no list of modules.", "Download the checkpoint again.")
    use, dense = EmbeddingUse(normalize=False), list[tuple[str, DenseSpec]]()
    for each in listed:
        kind, place = str(each.get("type")).rpartition(".")[2], PurePosixPath(str(each.get("path", "")))
        if place.is_absolute() or ".." in place.parts:
            raise CheckpointError(f"{path} names {place}, which leaves the folder.", "Do not use this checkpoint.")
        if kind == "Pooling":
            use = replace(use, pooling=_pooling(_object(folder / place / "config.json")))
        elif kind == "Dense":
            dense.append((str(place), _dense(_object(folder / place / "config.json"))))
        elif kind == "Normalize":
            use = replace(use, normalize=True)
        elif kind != "Transformer":
            raise UnsupportedArchitectureError(f"{path}: modules of the kind {kind} are not supported.", _HINT)
    length = _object(folder / "sentence_bert_config.json").get("max_seq_length")
    most = length if isinstance(length, int) and length > 0 else None
    return Modules(replace(use, **_prompts(folder)), most, tuple(dense))


def _pooling(config: dict[str, Any]) -> Pooling:
    if config.get("pooling_mode") in _NAMED:
        return _NAMED[str(config["pooling_mode"])]
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in _POOLINGS:
        raise UnsupportedArchitectureError(f"Pooling by {' and '.join(on) or 'nothing'} is not supported.", _HINT)
    if config.get("include_prompt") is False:
        raise UnsupportedArchitectureError("Pooling without the prompt's tokens is not supported.", _HINT)
    return _POOLINGS[on[0]]


def _dense(config: dict[str, Any]) -> DenseSpec:
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedArchitectureError(f"The activation {name} behind the pooling is not supported.", _HINT)
    size = config.get("out_features")
    if not isinstance(size, int):
        raise CheckpointError("A Dense module has no out_features.", "Download the checkpoint again.")
    return DenseSpec(size, _ACTIVATIONS[name], bias=config.get("bias") is not False)


def _prompts(folder: Path) -> dict[str, Any]:
    config = _object(folder / "config_sentence_transformers.json")
    prompts, usual = config.get("prompts"), config.get("default_prompt_name")
    if not isinstance(prompts, dict):
        return {}
    named = {str(name): text for name, text in prompts.items() if isinstance(text, str)}
    return {"prompts": named, "default_prompt": usual if usual in named else None}


def _object(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path), str(path)) if path.is_file() else {}
