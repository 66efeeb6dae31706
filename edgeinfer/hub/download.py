"""Fetches a model's files into the cache that Hugging Face libraries share; resumes what was interrupted."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.errors import HubError
from edgeinfer.hub.cache import Kind
from edgeinfer.hub.client import Progress, bar_class, hub_errors, library
from edgeinfer.hub.ids import (
    CONFIG_PATTERNS,
    WEIGHT_PATTERNS,
    HubName,
    gguf_parts,
    is_gguf_model,
    is_hub_id,
    listed_files,
    literal,
    parse_name,
)
from edgeinfer.hub.resuming import fetch_large
from edgeinfer.records import dataclass


@dataclass(frozen=True)
class Repository:
    """What a repository of the hub holds.

    Attributes:
        commit: of its revision.
        sizes: bytes of its files by name, 0 where the hub does not tell.
        kind: of the model in it.
    """

    repo_id: str
    commit: str
    sizes: dict[str, int]
    kind: Kind

    @property
    def fetched(self) -> dict[str, int]:
        """Files of a checkpoint that are fetched; of others all."""
        if self.kind != "checkpoint":
            return self.sizes
        patterns = (*CONFIG_PATTERNS, *WEIGHT_PATTERNS)
        return {n: size for n, size in self.sizes.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}

    @property
    def weights(self) -> dict[str, int]:
        """The files with a checkpoint's tensors."""
        return {n: s for n, s in self.sizes.items() if any(fnmatch.fnmatchcase(n, p) for p in WEIGHT_PATTERNS)}


def look_up(repo_id: str, revision: str | None = None) -> Repository:
    """Asks the hub what a repository holds."""
    hub = library()
    with hub_errors(repo_id, revision):
        info = hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: int(getattr(file, "size", None) or 0) for file in info.siblings or ()}
    return Repository(repo_id, str(getattr(info, "sha", None) or ""), sizes, _kind(repo_id, sizes))


def _kind(repo_id: str, names: dict[str, int]) -> Kind:
    if MANIFEST in names:
        return "bundle"
    if "config.json" in names and any(fnmatch.fnmatchcase(n, p) for n in names for p in WEIGHT_PATTERNS):
        return "checkpoint"
    if any(is_gguf_model(name) for name in names):
        return "gguf"
    hint = "edgeinfer reads bundles, GGUF files, and checkpoints in safetensors; pickled weights are never loaded."
    raise HubError(f"{repo_id} contains neither a bundle nor a checkpoint in safetensors.", hint)


def pull(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: bool | Progress = True,
    found: Repository | None = None,
) -> Path:
    """Fetches a bundle, one GGUF file, or the checkpoint files that export reads.

    Of a bundle only files that its manifest lists are fetched, of a checkpoint only safetensors and configuration.
    Nothing fetched is executed.

    Args:
        name: ORG/NAME, or ORG/NAME:TYPE for one GGUF file.
        revision: branch, tag or commit; None takes the main branch.
        cache_dir: None takes the cache that Hugging Face libraries share.
        progress: True draws bars on stderr, False is silent, a callable gets (file, bytes done, bytes in all).
        found: what `look_up` said of the repository at this revision; None asks.

    Returns:
        The local directory, or the GGUF file.

    Raises:
        HubError: offline, unknown, private or gated repository, or one that holds no model.
        BundleError: the repository's manifest is malformed or lists files that are not data.
        StorageError: the cache cannot be written, or the disk is full.
    """
    parsed = parse_name(name)
    if parsed is None:
        raise HubError(f"{name!r} is not a Hugging Face id.", "Write it as OWNER/NAME, such as Qwen/Qwen3-0.6B.")
    hub, repo_id = library(), parsed.repo_id
    options: dict[str, Any] = {"cache_dir": cache_dir, "library_name": "edgeinfer", "tqdm_class": bar_class(progress)}
    found = found or look_up(repo_id, revision)
    if parsed.tag is not None:
        return _pull_gguf(parsed, found, revision, options, progress)
    with hub_errors(repo_id, revision):
        if found.kind == "bundle":
            path = Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=[MANIFEST], **options))
            # The same commit again, should the branch move in between; the cache names snapshots by commit.
            listed = listed_files(path / MANIFEST)
            revision, patterns = path.name, literal(listed)
            fetch_large(repo_id, path.name, {n: found.sizes.get(n, 0) for n in listed}, cache_dir, progress)
        elif found.kind == "checkpoint":
            patterns = [*CONFIG_PATTERNS, *WEIGHT_PATTERNS]
            fetch_large(repo_id, found.commit, found.fetched, cache_dir, progress)
        else:
            models = ", ".join(sorted(filter(is_gguf_model, found.sizes)))
            hint = f"Name one by its type, such as {repo_id}:Q4_K_M. There are {models}."
            raise HubError(f"{repo_id} contains GGUF files.", hint)
        return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns, **options))


def pull_config(repo_id: str, revision: str | None) -> Path:
    """Fetches the small files of a checkpoint, by which it is known whether its weights are worth fetching."""
    assert is_hub_id(repo_id), "was parsed"
    hub = library()
    options: dict[str, Any] = {"library_name": "edgeinfer", "tqdm_class": bar_class(False)}
    with hub_errors(repo_id, revision):
        patterns = ["config.json"]
        return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns, **options))


def _pull_gguf(
    name: HubName, found: Repository, revision: str | None, options: dict[str, Any], progress: bool | Progress
) -> Path:
    assert name.tag is not None, "whoever calls looked"
    parts = gguf_parts(name.repo_id, found.sizes, name.tag)
    fetch_large(name.repo_id, found.commit, {n: found.sizes[n] for n in parts}, options["cache_dir"], progress)
    with hub_errors(name.repo_id, revision):
        patterns = literal(parts)
        folder = library().snapshot_download(name.repo_id, revision=revision, allow_patterns=patterns, **options)
    return Path(folder) / parts[0]
