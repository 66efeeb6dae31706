"""Targets in torch, from checkpoints or bundles without running their code, and checkpoints of trained models."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers.utils import logging

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import MANIFEST, storage_errors
from edgeinfer.core.errors import CheckpointError, ModelError, StorageError, TokenizerError, UsageError
from edgeinfer.export.source.checkpoint import (
    Checkpoint,
    checkpoint_config,
    checkpoint_tensors,
    parse_object,
    read_bytes,
)
from edgeinfer.export.source.hf_config import read_config
from edgeinfer.export.source.sidecar import read_templates

_TOKENIZER, _GENERATION = "tokenizer.json", "generation_config.json"
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# Files of a tokenizer, a template and generation, by their names in checkpoints and bundles.
_SMALL = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """Hides the library's progress bars, and restores the caller's setting afterwards."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the library has no types here
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Target:
    model: Any  # in transformers, float32 and frozen; `model.model` gives hidden states, `model.lm_head` logits
    tokenizer: Tokenizer
    template: str | None  # of conversations; None where it has none
    begin: int | None  # token that opens a text; None where there is none
    ends: tuple[int, ...]  # tokens that close a reply
    folder: Path  # with the tokenizer and other small files
    digest: str  # of weights and sizes

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def logits(self, states: torch.Tensor) -> torch.Tensor:  # (..., D) -> (..., V)
        """Float32 logits of normed states, scaled and capped as the model's own code does."""
        config = self.config.get_text_config()
        logits: torch.Tensor = self.model.lm_head(states).float()
        logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        cap = getattr(config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits


def load_target(source: Path, device: torch.device | None = None, *, any_family: bool = False) -> Target:
    """Loads a checkpoint folder or a bundle, `any_family` of transformers for trainings that do not call layers one by
    one."""
    model, digest = _from_bundle(source) if (source / MANIFEST).is_file() else _from_checkpoint(source, any_family)
    model.requires_grad_(False)
    model.train(False)
    generation = _optional(source / _GENERATION)
    begin = generation.get("bos_token_id", model.config.bos_token_id)
    ends = generation.get("eos_token_id", model.config.eos_token_id)
    return Target(
        model.to(device or torch.device("cpu")),
        _tokenizer(source),
        read_templates(source).get("default"),
        begin[0] if isinstance(begin, list) and begin else begin if isinstance(begin, int) else None,
        tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
        source,
        digest,
    )


def _from_bundle(path: Path) -> tuple[Any, str]:
    bundle = open_bundle(path)
    settings = checkpoint_config(bundle)
    family = settings["architectures"][0].removesuffix("ForCausalLM")
    model = _make(family, settings)
    state = {name: torch.from_numpy(values.copy()) for name, values in checkpoint_tensors(bundle)}
    missing, unknown = model.load_state_dict(state, strict=False)
    # A tied head is the embedding.
    if unknown or set(missing) - {"lm_head.weight"}:
        raise ModelError(
            f"{path} is missing weights: {', '.join(sorted({*missing, *unknown})[:3])}.", "Export it again."
        )
    model.tie_weights()
    return model, hashlib.sha256(read_bytes(path / MANIFEST)).hexdigest()


def _from_checkpoint(path: Path, any_family: bool) -> tuple[Any, str]:
    config = read_config(path)
    if not any_family and config.model_type not in _FAMILIES:
        hint = f"Give one of {', '.join(_FAMILIES)}."
        raise ModelError(
            f"{path} is a {config.model_type or 'model of unknown type'}, which cannot be trained here.", hint
        )
    with Checkpoint(path):  # its errors are clearer than transformers'
        pass
    try:
        # Annotated, as the class is chosen by the configuration.
        with no_bars():
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32
            )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"Cannot load {path}: {reason}", "Download the checkpoint again.") from error
    digest = hashlib.sha256(read_bytes(path / "config.json"))
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return model, digest.hexdigest()


def _make(family: str, settings: dict[str, Any]) -> Any:
    theta = settings.pop("rope_theta")
    config_class, model_class = getattr(transformers, f"{family}Config"), getattr(transformers, f"{family}ForCausalLM")
    names = ("architectures", "torch_dtype", "model_type")
    plain = {name: value for name, value in settings.items() if name not in names}
    rope = {"rope_type": "default", "rope_theta": theta}
    return model_class(config_class(**plain, rope_parameters=rope))


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / _TOKENIZER
    try:
        return Tokenizer.from_buffer(read_bytes(path))
    except ValueError as error:
        raise TokenizerError(f"{path} is not a tokenizer: {error}.", "Download the model again.") from error


def _optional(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path), str(path)) if path.is_file() else {}


def hidden_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:  # (B, S) -> (B * S, D)
    """The normed states that enter the head."""
    states: torch.Tensor = model.model(tokens, use_cache=False).last_hidden_state
    return states.flatten(0, 1)


def require_plain(model: Any) -> None:
    """Refuses decoders whose layers cannot be called one by one."""
    config = model.config
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if window or getattr(config, "_attn_implementation", "sdpa") != "sdpa":
        message = f"{type(model).__name__} with sliding windows cannot be trained layer by layer."
        raise UsageError(message, "Give a Llama, Qwen2 or Qwen3 without windows.")


def layer_states(model: Any, tokens: torch.Tensor, dropped: Collection[int] = ()) -> list[torch.Tensor]:
    """States after each layer, normed for the head. (B, S) -> L of (B * S, D)"""
    inner = model.model
    states = inner.embed_tokens(tokens)  # (B, S, D)
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    rotation = inner.rotary_emb(states, positions)
    found = []
    for index, layer in enumerate(inner.layers):
        if index not in dropped:
            # Without a mask the attention is causal.
            output = layer(states, attention_mask=None, position_ids=positions, position_embeddings=rotation)
            states = output[0] if isinstance(output, tuple) else output
        found.append(inner.norm(states).flatten(0, 1))
    return found


def save_checkpoint(model: Any, target: Target, out: Path) -> None:
    """Writes a model with the target's small files as a checkpoint for `edgeinfer export`, in place of an older one."""
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            _fill(model, target, scratch / "new")
            if out.exists():
                out.rename(scratch / "old")
            (scratch / "new").rename(out)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _fill(model: Any, target: Target, folder: Path) -> None:
    try:
        with no_bars():
            model.save_pretrained(folder)
    except SafetensorError as error:  # the library's name for a full disk
        raise StorageError(f"Cannot write {folder}: {error}.", "Free some space.") from error
    for name in _SMALL:
        if (target.folder / name).is_file():
            shutil.copyfile(target.folder / name, folder / name)
    if target.template is not None:
        (folder / "chat_template.jinja").write_text(target.template, "utf-8")
    special = target.folder / "special_tokens.json"
    if special.is_file() and not (folder / "tokenizer_config.json").is_file():
        shutil.copyfile(special, folder / "tokenizer_config.json")
