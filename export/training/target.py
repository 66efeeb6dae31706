"""Brings a target into torch: a Hugging Face checkpoint, or a bundle's weights as floats; runs no code of either."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers.utils import logging

from edgeinfer.bundle import MANIFEST, open_bundle
from edgeinfer.errors import CheckpointError, ModelError, TokenizerError
from edgeinfer.export.source.bundle_checkpoint import checkpoint_config, checkpoint_tensors
from edgeinfer.export.source.checkpoint import Checkpoint, parse_object, read_bytes
from edgeinfer.export.source.hf_config import read_config

__all__ = ["Target", "load_target", "no_bars"]


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """While it is open; what the caller had switched before holds again afterwards."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the library has no types here
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


_TOKENIZER, _TEMPLATE, _GENERATION = "tokenizer.json", "chat_template.jinja", "generation_config.json"
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Target:
    """A model to learn from.

    Attributes:
        model: transformers' own, in float32 and frozen; `model.model` gives hidden states, `model.lm_head` logits.
        tokenizer: of both.
        template: of conversations; None where it has none.
        begin: token that opens a text; None where there is none.
        ends: tokens that close a reply.
        folder: of its small files.
        digest: of its weights and sizes.
    """

    model: Any
    tokenizer: Tokenizer
    template: str | None
    begin: int | None
    ends: tuple[int, ...]
    folder: Path
    digest: str

    @property
    def config(self) -> Any:
        """Sizes, as transformers has them."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        device: torch.device = self.model.device
        return device


def load_target(source: Path, device: torch.device | None = None) -> Target:
    """Loads a checkpoint folder, or a bundle.

    Raises:
        ModelError: it is missing or damaged.
        UsageError: a bundle of an architecture that cannot be multiplied out.
    """
    model, digest = _from_bundle(source) if (source / MANIFEST).is_file() else _from_checkpoint(source)
    model.requires_grad_(False)
    model.train(False)
    generation = _optional(source / _GENERATION)
    begin = generation.get("bos_token_id", model.config.bos_token_id)
    ends = generation.get("eos_token_id", model.config.eos_token_id)
    return Target(
        model.to(device or torch.device("cpu")),
        _tokenizer(source),
        _template(source),
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
        raise ModelError(f"{path} lacks weights: {', '.join(sorted({*missing, *unknown})[:3])}.", "Export it again.")
    model.tie_weights()
    return model, hashlib.sha256(read_bytes(path / MANIFEST)).hexdigest()


def _from_checkpoint(path: Path) -> tuple[Any, str]:
    config = read_config(path)
    if config.model_type not in _FAMILIES:
        hint = f"Give one of {', '.join(_FAMILIES)}."
        raise ModelError(f"{path} is a {config.model_type or 'model of no known type'}, which is not trained on.", hint)
    with Checkpoint(path):  # says plainly what is wrong with its files
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


def _template(folder: Path) -> str | None:
    path = folder / _TEMPLATE
    if path.is_file():
        return read_bytes(path).decode("utf-8", "replace")
    given = _optional(folder / "tokenizer_config.json").get("chat_template")
    return given if isinstance(given, str) else None


def _optional(path: Path) -> dict[str, Any]:
    return parse_object(read_bytes(path), str(path)) if path.is_file() else {}
