"""Puts a file into a bundle that exists, so that it can be opened at every moment; knows nothing of what is in it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from edgeinfer.bundle.manifest import FileEntry
from edgeinfer.bundle.store import MANIFEST, Bundle, open_bundle, storage_errors, write_file
from edgeinfer.errors import UsageError

__all__ = ["add_file"]


def add_file(bundle: Bundle, name: str, data: bytes) -> Bundle:
    """Writes a file of a bundle, instead of any that has its name, and opens the bundle again.

    Whatever interrupts it, the bundle is there without the file, or with it.

    Args:
        name: relative to the bundle, of one folder at most.

    Raises:
        UsageError: the bundle lies inside another one, whose digests would no longer be right.
        StorageError: it cannot be written.
    """
    outer = bundle.path.resolve().parent
    if (outer / MANIFEST).is_file():
        message = f"{bundle.path} is a part of the bundle {outer}."
        raise UsageError(message, "Copy it elsewhere, change the copy, and put that into the bundle.")
    files = {other: entry for other, entry in bundle.manifest.files.items() if other != name}
    if bundle.has(name):
        _write_manifest(bundle, files)
    with storage_errors(bundle.path):
        (bundle.path / name).parent.mkdir(exist_ok=True)
    _write_like(bundle, bundle.path / name, data)
    _write_manifest(bundle, files | {name: FileEntry(len(data), hashlib.sha256(data).hexdigest())})
    return open_bundle(bundle.path)


def _write_manifest(bundle: Bundle, files: dict[str, FileEntry]) -> None:
    ordered = dict(sorted(files.items()))
    _write_like(bundle, bundle.path / MANIFEST, replace(bundle.manifest, files=ordered).to_json().encode())


def _write_like(bundle: Bundle, path: Path, data: bytes) -> None:
    """Writes a file whole; a new one is its maker's alone, and a bundle's are for whoever may read it."""
    mode = (bundle.path / MANIFEST).stat().st_mode
    write_file(path, data)
    with storage_errors(bundle.path):
        path.chmod(mode)
