"""Models on this machine, found without asking the hub: paths, the built-in model, the hub's cache; their last use."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Literal

from edgeinfer.bundle.names import part_of, quantization_of, stem_of
from edgeinfer.bundle.writing import MANIFEST, write_file
from edgeinfer.core.errors import BundleError, HubError, ModelError, StorageError
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import user_data
from edgeinfer.hub.client import library
from edgeinfer.hub.ids import CONFIG_PATTERNS, GGUF, WEIGHT_PATTERNS, gguf_models, gguf_parts, listed_files, literal

BUILTIN = "tales"
Kind = Literal["bundle", "gguf", "checkpoint"]


@dataclass(frozen=True)
class CachedModel:
    """A model in the cache of the hub's library."""

    name: str  # what loads it
    repo_id: str  # ORG/NAME of its repository
    kind: Kind  # a checkpoint is converted before it runs
    path: Path  # a bundle's or checkpoint's directory, or the (first) GGUF file
    files: tuple[Path, ...]  # all that belong to it alone

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.stat().st_size for file in self.files if file.exists())


def is_bundle(path: Path) -> bool:
    """Whether a directory says it is a bundle; nothing in it is checked."""
    return (path / MANIFEST).is_file()


def is_checkpoint(path: Path) -> bool:
    """Whether a directory holds a Hugging Face checkpoint in safetensors."""
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def existing(source: str | os.PathLike[str]) -> Path | None:
    """The path that was given, if something is there."""
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        hint = "Give a folder, a .gguf file, OWNER/NAME or a catalog name."
        raise ModelError(f"{source!r} is not a model's name.", hint)
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be searched, no home
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise ModelError(f"No model at {text!r}: {reason}.", "Check the path and its permissions.") from error


def builtin() -> Path:
    """The model that comes with edgeinfer; BundleError where this copy comes without it."""
    path = Path(__file__).parents[1] / "builtin" / BUILTIN
    if not is_bundle(path):
        hint = f"Reinstall edgeinfer, or export the model's checkpoint to {path}."
        raise BundleError("This copy of edgeinfer comes without its built-in model.", hint)
    return path


def ready(model: str | Path | None) -> Path | None:
    """The built-in model, or a bundle's path; None for what must be looked up."""
    path = None if model is None else existing(model)
    if path is None:
        return builtin() if model in (None, BUILTIN) else None
    return path if is_bundle(path) else None


def cached_snapshot(repo_id: str) -> Path | None:
    """The cached bundle or checkpoint of the main branch, whole, or None."""
    hub = library()
    try:
        path = Path(hub.snapshot_download(repo_id, local_files_only=True, allow_patterns=[MANIFEST]))
        names = listed_files(path / MANIFEST) if is_bundle(path) else []
        patterns = literal(names) or [*CONFIG_PATTERNS, *WEIGHT_PATTERNS]
        path = Path(hub.snapshot_download(repo_id, local_files_only=True, allow_patterns=patterns))
    except hub.errors.LocalEntryNotFoundError:
        return None
    # Older releases of the library return interrupted downloads, too.
    whole = all((path / name).is_file() for name in names) if names else is_checkpoint(path)
    return path if whole else None


def cached_gguf(repo_id: str, tag: str) -> Path | None:
    """The cached file of the main branch with all its parts, or None."""
    hub = library()
    try:
        folder = Path(hub.snapshot_download(repo_id, local_files_only=True, allow_patterns=[f"*{GGUF}"]))
        parts = gguf_parts(repo_id, [p.relative_to(folder).as_posix() for p in folder.rglob(f"*{GGUF}")], tag)
    except (hub.errors.LocalEntryNotFoundError, HubError):
        return None
    return folder / parts[0] if len(parts) == part_of(parts[0])[1] else None


def cached_models() -> list[CachedModel]:
    """Whole models of the main branches in the hub's cache, by name."""
    hub = library()
    try:
        repos = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return []
    found: list[CachedModel] = []
    for repo in repos:
        for revision in repo.revisions:
            if repo.repo_type == "model" and "main" in revision.refs:
                found += _in_snapshot(repo.repo_id, Path(revision.snapshot_path))
    return sorted(found, key=lambda model: model.name)


def _in_snapshot(repo_id: str, folder: Path) -> list[CachedModel]:
    if is_bundle(folder) or is_checkpoint(folder):
        whole = cached_snapshot(repo_id)
        files = tuple(path for path in folder.rglob("*") if path.is_file())
        kind: Kind = "bundle" if is_bundle(folder) else "checkpoint"
        return [] if whole is None else [CachedModel(repo_id, repo_id, kind, folder, files)]
    names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")]
    return [
        CachedModel(
            gguf_name(repo_id, parts[0], names), repo_id, "gguf", folder / parts[0], tuple(map(folder.joinpath, parts))
        )
        for parts in gguf_models(names)
    ]


def gguf_name(repo_id: str, file: str, names: list[str]) -> str:
    """ORG/NAME:TYPE of a GGUF file, or ORG/NAME:STEM where the type says too little."""
    tag = quantization_of(file)
    try:
        if tag is not None and file in gguf_parts(repo_id, names, tag):
            return f"{repo_id}:{tag}"
    except HubError:  # several files of this type
        pass
    return f"{repo_id}:{stem_of(file).rpartition('/')[2]}"


def remove_cached(model: CachedModel) -> int:
    """Removes a model's files from the cache, or the whole repository where it has no other; returns the bytes
    freed."""
    hub = library()
    others = [other for other in cached_models() if other.repo_id == model.repo_id and other.path != model.path]
    if not others:
        for repo in hub.scan_cache_dir().repos:
            if repo.repo_type == "model" and repo.repo_id == model.repo_id:
                commits = [revision.commit_hash for revision in repo.revisions]
                hub.scan_cache_dir().delete_revisions(*commits).execute()
                return int(repo.size_on_disk)
    freed = model.bytes
    for file in model.files:
        # A snapshot's files are links into the blobs where the system has links.
        blob = file.resolve()
        file.unlink(missing_ok=True)
        blob.unlink(missing_ok=True)
    return freed


_LAST_USE = "edgeinfer/last_use.json"
# The oldest entries make room.
_MOST_MODELS = 500
_MOST_BYTES = 1_000_000


def note_use(path: Path) -> None:
    """Notes that a model was loaded now; a failure to keep that fails no load."""
    with contextlib.suppress(OSError, StorageError, ValueError):
        uses = last_uses() | {str(path.resolve()): time.time()}
        latest = sorted(uses.items(), key=lambda use: use[1])[-_MOST_MODELS:]
        file = user_data() / _LAST_USE
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(file, json.dumps(dict(latest), indent=0).encode("utf-8"), durable=False)


def last_uses() -> dict[str, float]:
    """Seconds since 1970 by resolved path."""
    try:
        file = user_data() / _LAST_USE
        if file.stat().st_size > _MOST_BYTES:
            return {}
        data = json.loads(file.read_text("utf-8"))
    except (OSError, StorageError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {path: float(when) for path, when in data.items() if isinstance(when, int | float) and 0 < when < 1e11}
