"""Fetches large files so that an interrupted download goes on where it was, which the hub's library no longer does.

Every process of it fetches under a new name, from the beginning. So large files are fetched here, under a name that
stays, and put where the library looks for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgeinfer.bundle.writing import digest_of
from edgeinfer.errors import HubError
from edgeinfer.hub.client import Progress, bar_class, hub_errors, library

# Smaller files are not worth a request for what they are.
_LARGE_BYTES = 10_000_000
# The hub serves no larger ones this way.
_LARGEST_BYTES = 50_000_000_000
_UNFINISHED = ".edgeinfer.incomplete"
_SHA256_LETTERS = 64


def fetch_large(
    repo_id: str, commit: str, sizes: Mapping[str, int], cache: Path | None, progress: bool | Progress
) -> None:
    """Fetches those of a repository's files that are large and not in the cache.

    Args:
        sizes: bytes of the files that are wanted, by name.
        cache: None is the one that Hugging Face libraries share.
    """
    hub = library()
    folder = Path(hub.constants.HF_HUB_CACHE) if cache is None else cache
    missing = {
        name: size
        for name, size in sizes.items()
        if _LARGE_BYTES <= size < _LARGEST_BYTES
        and not isinstance(hub.try_to_load_from_cache(repo_id, name, cache_dir=folder, revision=commit), str)
    }
    before, total = 0, sum(missing.values())
    for name, size in missing.items():
        with hub_errors(repo_id, commit):
            _fetch(repo_id, commit, name, folder, _offset(progress, before, total))
        before += size


def _offset(progress: bool | Progress, before: int, total: int) -> bool | Progress:
    """Counts the bytes of one file among those of all."""
    if not callable(progress):
        return progress
    tell: Progress = progress
    return lambda label, done, _: tell("large files", before + done, total)


def _fetch(repo_id: str, commit: str, name: str, cache: Path, progress: bool | Progress) -> None:
    from filelock import FileLock
    from huggingface_hub import file_download

    hub = library()
    url = hub.hf_hub_url(repo_id, name, revision=commit)
    facts = hub.get_hf_file_metadata(url, library_name="edgeinfer")
    own = file_download.repo_folder_name(repo_id=repo_id, repo_type="model")
    etag = str(facts.etag or "")
    if not etag or not etag.isalnum() or facts.size is None:
        return  # the library will see to it
    blob = cache / own / "blobs" / etag
    # Without links the library keeps files where they are read.
    linked = file_download.are_symlinks_supported(cache)
    target = blob if linked else cache / own / "snapshots" / commit / name
    lock = cache / ".locks" / own / f"{etag}.lock"
    for folder in (blob.parent, target.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    # The lock of the library's own, which other programs hold while they fetch the same.
    with FileLock(lock):
        if target.exists():
            return
        part = blob.with_name(etag + _UNFINISHED)

        def get(file: Any, had: int) -> None:
            given: dict[str, Any] = {"resume_size": had, "expected_size": facts.size}
            if "tqdm_class" in inspect.signature(file_download.http_get).parameters:
                given["tqdm_class"] = bar_class(progress)
            file_download.http_get(url, file, headers=hub.utils.build_hf_headers(library_name="edgeinfer"), **given)

        _complete(part, facts.size, etag, name, get)
        part.replace(target)


def _complete(part: Path, size: int, etag: str, name: str, get: Callable[[Any, int], None]) -> None:
    """Fetches what is missing of a file; what was there before is held against the hub's digest where it gives one."""
    had = part.stat().st_size if part.exists() else 0
    if had > size:
        part.unlink()
        had = 0
    with part.open("ab") as file:
        get(file, had)
    if had and len(etag) == _SHA256_LETTERS and digest_of(part) != etag:
        part.unlink()
        raise HubError(f"{name} was damaged while it was fetched.", "Ask again; it is fetched from the beginning.")
