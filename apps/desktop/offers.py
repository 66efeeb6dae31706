"""Models that can be had, as the window lists them: the catalog and what each needs here, the hub, files on disk."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import psutil

import edgeinfer
from edgeinfer import hub
from edgeinfer.errors import EdgeInferError, ModelError
from edgeinfer.hub.ids import first_part, is_gguf_model

Fit = Literal["yes", "tight", "no"]

# A model may take so much of this machine's memory; what is left is for the system and other programs.
_ROOM_SHARE = 0.75
# Beyond this share of the memory that is free now, other programs feel it.
_EASY_SHARE = 0.6
_RECOMMENDED = 3
# Nobody waits an hour for a first impression.
_MOST_DOWNLOAD = 9_000_000_000
_CHAT = "chat"
_MOST_ENTRIES = 500
_GGUF = ".gguf"


@dataclass(frozen=True)
class Room:
    """What this machine has for models.

    Attributes:
        disk_bytes: free where models are kept.
        memory_bytes: that a model may take.
        easy_bytes: of memory that a model may take without others feeling it now.
        gguf: whether GGUF files run here.
    """

    disk_bytes: int
    memory_bytes: int
    easy_bytes: int
    gguf: bool

    @classmethod
    def here(cls) -> Room:
        """As it is now."""
        memory, folder = psutil.virtual_memory(), hub.models_folder()
        while not folder.exists():
            folder = folder.parent
        return cls(
            shutil.disk_usage(folder).free,
            int(memory.total * _ROOM_SHARE),
            int(memory.available * _EASY_SHARE),
            find_spec("llama_cpp") is not None,
        )

    def fit(self, memory: int) -> Fit:
        """How well a model of that need goes into memory."""
        return "no" if memory > self.memory_bytes else "yes" if memory <= self.easy_bytes else "tight"


class Catalog:
    """What can be had; may be asked from any thread."""

    def view(self) -> dict[str, Any]:
        """The catalog, with three of it that suit this machine."""
        room = Room.here()
        models = [_entry(model, room) for model in edgeinfer.catalog()]
        return {"models": models, "recommended": _recommended(models, room), "room": asdict(room)}

    def search(self, text: str) -> dict[str, Any]:
        """Models of the hub by a part of their name; errors as `edgeinfer.search_hub`."""
        found = [asdict(model) | {"path": _path(model.name)} for model in edgeinfer.search_hub(text)]
        return {"models": found}

    def offers(self, name: str) -> dict[str, Any]:
        """The types of a repository of GGUF files; errors as `edgeinfer.offers`."""
        room = Room.here()
        found = [
            asdict(offer) | {"fit": room.fit(offer.memory), "path": _path(offer.name)}
            for offer in edgeinfer.offers(name)
        ]
        return {"offers": found, "room": asdict(room)}


def importable(path: str) -> Path:
    """A model on this machine that its path names: a folder with a bundle or a checkpoint, or a GGUF file."""
    found = Path(path.strip().strip('"')).expanduser()
    if not found.is_absolute():
        raise ModelError(f"{path!r} is not a whole path.", "Give it from the beginning, such as /home/me/models/name.")
    if not found.exists():
        raise ModelError(f"There is no file or folder {found}.", "Check the path.")
    if found.is_file():
        if found.suffix.lower() != _GGUF:
            raise ModelError(f"{found.name} is not a GGUF file.", "Choose a .gguf file, or the folder of a checkpoint.")
        return found
    if not hub.is_bundle(found) and not hub.is_checkpoint(found):
        hint = "Choose the folder that has config.json and model.safetensors, or a .gguf file."
        raise ModelError(f"{found} contains no model that can be imported.", hint)
    return found


def folder_view(path: str) -> dict[str, Any]:
    """A folder of this machine with what in it may be or hold a model: folders and GGUF files, by name.

    Args:
        path: of the folder; empty is the user's own.
    """
    folder = Path(path).expanduser() if path else Path.home()
    try:
        found = sorted(folder.resolve(strict=True).iterdir(), key=lambda entry: entry.name.lower())
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{folder} cannot be opened: {reason}.", "Choose another folder.") from error
    folder, entries = folder.resolve(), []
    for entry in found:
        kind = None if entry.name.startswith(".") else _kind(entry)
        if kind is not None:
            entries.append({"name": entry.name, "path": str(entry), "kind": kind, "bytes": _size(entry)})
    parent = None if folder.parent == folder else str(folder.parent)
    shown = {"path": str(folder), "name": folder.name or str(folder), "parent": parent, "model": _holds_model(folder)}
    return shown | {"entries": entries[:_MOST_ENTRIES], "more": max(0, len(entries) - _MOST_ENTRIES)}


def _kind(entry: Path) -> Literal["model", "folder"] | None:
    try:
        if entry.is_dir():
            return "model" if _holds_model(entry) else "folder"
        return "model" if is_gguf_model(entry.name) and first_part(entry.name) else None
    except OSError:  # one that may not be looked at
        return None


def _holds_model(folder: Path) -> bool:
    return hub.is_bundle(folder) or hub.is_checkpoint(folder)


def _size(entry: Path) -> int | None:
    return entry.stat().st_size if entry.is_file() else None


def _entry(model: edgeinfer.CatalogModel, room: Room) -> dict[str, Any]:
    return {
        "name": model.name,
        "repo": model.repo,
        "purpose": model.purpose,
        "parameters": model.parameters,
        "licence": model.licence,
        "languages": list(model.languages),
        "context": model.context,
        "memory": model.memory,
        "download": model.download,
        "disk": model.disk,
        "gguf": model.is_gguf,
        "fit": room.fit(model.memory),
        "path": _path(model.name),
    }


def _path(name: str) -> str | None:
    """Where a model lies, if it is on this machine."""
    with contextlib.suppress(EdgeInferError):
        found = hub.local(name)
        return None if found is None else str(found)
    return None


def _recommended(models: Sequence[dict[str, Any]], room: Room) -> list[str]:
    """Up to three that run well here: the largest to chat with, and others of half its size or less, step by step."""
    fitting = [
        m for m in models if m["fit"] == "yes" and m["download"] <= _MOST_DOWNLOAD and (room.gguf or not m["gguf"])
    ]
    fitting = [m for m in fitting if m["download"] + m["disk"] <= room.disk_bytes]
    # Models for one purpose only come last, whatever their size.
    fitting.sort(key=lambda m: (_CHAT in m["purpose"], m["parameters"]), reverse=True)
    chosen: list[dict[str, Any]] = []
    for model in fitting:
        if not chosen or model["parameters"] <= chosen[-1]["parameters"] / 2:
            chosen.append(model)
    return [m["name"] for m in chosen[:_RECOMMENDED]]
