"""The state of an interrupted training on disk: written beside, synced, renamed; knows nothing of what is trained.

A folder `step-N` holds `state.safetensors` (weights and what the optimizer keeps of them) and `state.json` (step, loss
of every step, configuration and its digest). No pickles. An older folder is removed once the newer one is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from edgeinfer.bundle.writing import storage_errors
from edgeinfer.errors import StorageError, UsageError

__all__ = ["Kept", "configuration_digest", "load_kept", "remove_kept", "save_kept"]

_FORMAT = "edgeinfer-training"
_TENSORS, _TABLE = "state.safetensors", "state.json"
_NAME = re.compile(r"step-(\d+)")
_ANOTHER = "Give another working folder, or remove this one to begin anew."


@dataclass(frozen=True)
class Kept:
    """A training after some steps.

    Attributes:
        losses: of every step so far.
        tensors: by name, on the CPU.
    """

    step: int
    losses: list[float]
    tensors: dict[str, torch.Tensor]


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """Tells configurations apart; the order of their names is of no consequence."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()


def save_kept(folder: Path, kept: Kept, configuration: Mapping[str, Any]) -> None:
    """Keeps a state in the place of an older one, which stays until this one is whole.

    Raises:
        StorageError: the folder cannot be written, or the disk is full.
    """
    target = folder / f"step-{kept.step}"
    if target.exists():
        return
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".step-"))
        try:
            _write(scratch, kept, configuration)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    for step, path in _found(folder):
        if step != kept.step:
            shutil.rmtree(path, ignore_errors=True)


def load_kept(folder: Path, configuration: Mapping[str, Any]) -> Kept | None:
    """The newest state in a folder; None where there is none.

    Raises:
        UsageError: it is of another configuration; what differs is named.
        StorageError: it cannot be read.
    """
    found = _found(folder)
    if not found:
        return None
    step, path = max(found)
    try:
        table = json.loads((path / _TABLE).read_text("utf-8"))
        if table["format"] != _FORMAT or table["step"] != step:
            raise ValueError("it is of another program")
        _compare(folder, table["configuration"], configuration)
        return Kept(step, list(map(float, table["losses"])), load_file(path / _TENSORS))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise StorageError(f"Cannot read the training kept in {path}: {error}.", _ANOTHER) from error


def remove_kept(folder: Path) -> None:
    """Drops what is kept in a folder."""
    for _, path in _found(folder):
        shutil.rmtree(path, ignore_errors=True)


def _found(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return [(int(match[1]), path) for match, path in matches if match is not None]


def _write(folder: Path, kept: Kept, configuration: Mapping[str, Any]) -> None:
    try:
        save_file(kept.tensors, folder / _TENSORS)
    except SafetensorError as error:  # the library's own word for a full disk
        raise StorageError(f"Cannot write {folder / _TENSORS}: {error}.", "Free some space.") from error
    table = {
        "format": _FORMAT,
        "step": kept.step,
        "digest": configuration_digest(configuration),
        "configuration": dict(configuration),
        "losses": kept.losses,
    }
    (folder / _TABLE).write_text(json.dumps(table), "utf-8")
    for name in (_TENSORS, _TABLE):
        handle = os.open(folder / name, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _compare(folder: Path, kept: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuses to go on with what was begun otherwise."""
    if configuration_digest(kept) == configuration_digest(asked):
        return
    names = sorted(name for name in {*kept, *asked} if kept.get(name) != asked.get(name))
    shown = ", ".join(f"{name} was {_short(kept.get(name))}, is {_short(asked.get(name))}" for name in names[:3])
    raise UsageError(f"{folder} holds a training of another configuration: {shown}.", _ANOTHER)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:20]}..."
