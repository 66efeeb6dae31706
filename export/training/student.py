"""Small decoders with a target's vocabulary: made, multiplied, saved as checkpoints."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from edgeinfer.bundle.writing import storage_errors
from edgeinfer.errors import StorageError
from edgeinfer.export.training.sizing import StudentSize
from edgeinfer.export.training.target import Target, no_bars

__all__ = ["hidden_states", "make_student", "save_checkpoint"]

# What a tokenizer, a template and generation need, by the names that checkpoints and bundles have for them.
_SMALL = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def make_student(size: StudentSize, target: Target, seed: int) -> Any:
    """A Llama of random weights that has the target's tokens and room for its contexts.

    The embedding is the head too: it is the largest part of a tiny model.
    """
    config = transformers.LlamaConfig(
        vocab_size=target.config.vocab_size,
        hidden_size=size.width,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=target.config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=target.begin,
        eos_token_id=target.ends[0] if target.ends else None,
        pad_token_id=None,
    )
    config.architectures = ["LlamaForCausalLM"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = transformers.LlamaForCausalLM(config)
    _inherit_embedding(model, target.model)
    return model.to(target.device)


@torch.no_grad()
def _inherit_embedding(student: Any, target: Any) -> None:
    """Gives the student the target's head in the directions in which its tokens differ most.

    Which tokens are alike is most of what a tiny model would have to learn.
    """
    head = target.lm_head.weight.detach().float().cpu()  # (V, T)
    directions = torch.linalg.eigh(head.T @ head).eigenvectors  # (T, T), ascending
    width = min(student.config.hidden_size, head.shape[1])
    student.lm_head.weight[:, :width] = head @ directions[:, -width:]
    # Logits of about one, so that nothing is thought certain at first.
    student.model.norm.weight.fill_(1 / float(student.lm_head.weight.square().sum(-1).mean().sqrt()))


def hidden_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:  # (B, S) -> (B * S, D)
    """The normed states that the head multiplies."""
    states: torch.Tensor = model.model(tokens, use_cache=False).last_hidden_state
    return states.flatten(0, 1)


def save_checkpoint(model: Any, target: Target, out: Path) -> None:
    """Writes a model with the target's small files as a checkpoint folder that `edgeinfer export` takes.

    An older one there stays until this one is whole.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
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
    except SafetensorError as error:  # the library's own word for a full disk
        raise StorageError(f"Cannot write {folder}: {error}.", "Free some space.") from error
    for name in _SMALL:
        if (target.folder / name).is_file():
            shutil.copyfile(target.folder / name, folder / name)
    if target.template is not None:
        (folder / "chat_template.jinja").write_text(target.template, "utf-8")
    special = target.folder / "special_tokens.json"
    if special.is_file() and not (folder / "tokenizer_config.json").is_file():
        shutil.copyfile(special, folder / "tokenizer_config.json")
