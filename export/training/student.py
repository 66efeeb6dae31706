"""Small decoders with a target's vocabulary: made, multiplied, saved as checkpoints; knows nothing of training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

from edgeinfer.bundle.store import storage_errors
from edgeinfer.errors import StorageError
from edgeinfer.export.training.sizing import StudentSize
from edgeinfer.export.training.target import Target

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

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    with storage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        try:
            model.save_pretrained(out)
        except OSError:
            raise
        except Exception as error:  # the library's own type, by which it says that a disk is full
            raise StorageError(f"Cannot write {out}: {error}.", "Free some space.") from error
        for name in _SMALL:
            if (target.folder / name).is_file():
                shutil.copyfile(target.folder / name, out / name)
        if target.template is not None:
            (out / "chat_template.jinja").write_text(target.template, "utf-8")
        special = target.folder / "special_tokens.json"
        if special.is_file() and not (out / "tokenizer_config.json").is_file():
            shutil.copyfile(special, out / "tokenizer_config.json")
