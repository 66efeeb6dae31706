"""What the tests of all draft modules share: prompts, ways to draft, their logits, checkpoints that do not fit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

import edgeinfer
from edgeinfer.errors import CheckpointError
from edgeinfer.export import ExportConfig
from edgeinfer.export import export_checkpoint as export_anew
from edgeinfer.runtime.speculation.drafters.contract import DraftContext
from edgeinfer.runtime.speculation.drafters.module_drafter import ModuleDrafter
from tests.factories import make_checkpoint

__all__ = [
    "PROMPT",
    "WAYS",
    "Damage",
    "change_config",
    "change_tensors",
    "drafted_logits",
    "drafter_of",
    "export_with_module",
    "require_refused",
]

PROMPT = [5 + i % 7 for i in range(90)]
WAYS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"draft_width": 3},
    "sampled": {"temperature": 1.0, "seed": 11},
    "sampled tree": {"temperature": 1.0, "seed": 11, "draft_width": 3},
}
# What is done to a checkpoint's folder, and what the message of its refusal matches.
Damage = tuple[Callable[[Path], None], str]


def export_with_module(
    folder: Path, family: str, bits: int, make: Callable[[Path, Path], Path], **settings: Any
) -> None:
    """Makes a target of six layers, a module for it and the bundle of both, in `target`, `drafter` and `bundle`.

    Args:
        make: writes the module's checkpoint into its first folder, for the target in the second.
        settings: fields of the target's config.json.
    """
    sizes: dict[str, Any] = {"num_hidden_layers": 6, "max_position_embeddings": 512}
    make_checkpoint(folder / "target", family, seed=1, **sizes | settings)
    module = make(folder / "drafter", folder / "target")
    export_anew(folder / "target", folder / "bundle", ExportConfig(bits=bits, drafter=module, keep_small=False))


def drafter_of(model: edgeinfer.Model, name: str) -> ModuleDrafter:
    """The drafter with a module of a loaded model."""
    drafter = model._parts.speculator._drafter(name)
    assert isinstance(drafter, ModuleDrafter)
    return drafter


def drafted_logits(drafter: ModuleDrafter, text: Sequence[int], path: Sequence[int]) -> NDArray[Any] | None:  # (V,)
    """What it drafts with after a path behind a text that it has begun; None where that is too long."""
    context = DraftContext([*text], lambda logits, drafted: (int(logits.argmax()), None), lambda drafted: ())
    logits = drafter._logits(context, path)
    return None if logits is None else logits.copy()


def change_config(nested: str = "", **fields: Any) -> Callable[[Path], None]:
    """Gives fields of config.json other values.

    Args:
        nested: the field whose own fields are meant.
    """

    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config |= {nested: config[nested] | fields} if nested else fields
        (folder / "config.json").write_text(json.dumps(config))

    return change


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Edits the tensors of a checkpoint."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return change


def require_refused(target: Path, module: Path, damages: Mapping[str, Damage], scratch: Path) -> None:
    """Requires that every damaged copy of a module is refused in one line, before anything is written."""
    for name, (change, message) in damages.items():
        damaged = Path(shutil.copytree(module, scratch / name))
        change(damaged)
        with pytest.raises(CheckpointError, match=message) as refused:
            export_anew(target, scratch / "bundle", ExportConfig(drafter=damaged))
        assert "\n" not in refused.value.message and refused.value.hint
        assert not (scratch / "bundle").exists()
