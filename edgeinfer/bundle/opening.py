"""Opening bundles, each file in its place and of its size, and adding a file to one that exists."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from edgeinfer.bundle.manifest import FileEntry, Manifest
from edgeinfer.bundle.store import GGUF_MODEL, GGUF_SUFFIX, Bundle, reading
from edgeinfer.bundle.tables import check_graphs, check_tensors
from edgeinfer.bundle.writing import MANIFEST, storage_errors, write_file
from edgeinfer.errors import BundleError, UsageError

if TYPE_CHECKING:
    # Read where there is such a file: it takes as long to import as the rest of the format.
    from edgeinfer.bundle.gguf.reader import GgufFile


# A manifest lists a few hundred bytes per tensor; 64 MB would be a hundred thousand tensors.
_MAX_MANIFEST_BYTES = 64 * 1000**2
_AGAIN = "Export or download the bundle again."


def open_bundle(path: Path | str) -> Bundle:
    """Opens a bundle: reads the manifest and checks that every file stays inside and has its size.

    A plain GGUF file is a bundle too; of one that was split, the first part stands for all. Digests of small files are
    compared when they are read; `Bundle.verify` compares all.
    """
    root = Path(path)
    with reading(root):
        if root.suffix.lower() == GGUF_SUFFIX and not root.is_dir():
            from edgeinfer.bundle.gguf_bundle import open_gguf

            return open_gguf(root)
        return _open(root, _roots(root))


def _open(root: Path, roots: tuple[Path, ...]) -> Bundle:
    source = root / MANIFEST
    if not root.is_dir() or not source.is_file():
        hint = "Point to a directory made by edgeinfer export or to a .gguf file, or pull one with edgeinfer pull."
        raise BundleError(f"{root} is not a bundle: it has no {MANIFEST}.", hint)
    if _inside(root, MANIFEST, roots).stat().st_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{source} is larger than any manifest.", _AGAIN)
    with reading(source):
        text = source.read_text("utf-8")
    manifest = Manifest.from_json(text)
    for name, entry in manifest.files.items():
        _check_file(_inside(root, name, roots), name, entry)
    check_tensors(manifest)
    check_graphs(manifest)
    bundle = Bundle(root, manifest, header=_gguf_header(root, manifest))
    for name in manifest.drafters:
        # The digest of its manifest, which lists its files' own, ties the drafter to this bundle.
        _open(bundle.file(f"{name}/{MANIFEST}").parent, roots)
    return bundle


def _gguf_header(root: Path, manifest: Manifest) -> GgufFile | None:
    """The header of a bundle's GGUF file, which must be of the model that the manifest describes."""
    if manifest.backend == "llamacpp" and GGUF_MODEL not in manifest.files:
        raise BundleError(f"{root} has no {GGUF_MODEL}.", _AGAIN)
    if GGUF_MODEL not in manifest.files:
        return None
    from edgeinfer.bundle.gguf.reader import read_gguf
    from edgeinfer.bundle.gguf_bundle import check_model

    header = read_gguf(root / GGUF_MODEL)
    check_model(header, manifest)
    return header


def _roots(root: Path) -> tuple[Path, ...]:
    """Where a bundle's files may lie: its directory, and in a hub cache, whose snapshots are links, the blob store."""
    folder = root.resolve()
    return (folder, folder.parents[1] / "blobs") if folder.parent.name == "snapshots" else (folder,)


def _inside(root: Path, name: str, roots: tuple[Path, ...]) -> Path:
    parts = PurePosixPath(name).parts
    relative = bool(parts) and not PurePosixPath(name).is_absolute() and ".." not in parts
    simple = relative and not set(name) & {"\\", "\0"}
    target = root.joinpath(*parts) if simple else root
    if not simple or not any(target.resolve().is_relative_to(allowed) for allowed in roots):
        raise BundleError(f"The bundle names {name!r}, which leaves its directory.", "Do not use this bundle.")
    return target


def _check_file(target: Path, name: str, entry: FileEntry) -> None:
    if not target.is_file():
        raise BundleError(f"{target} is missing.", _AGAIN)
    size = target.stat().st_size
    if size != entry.bytes:
        message = f"{name} has {size} bytes, the manifest says {entry.bytes}."
        raise BundleError(message, _AGAIN)


def add_file(bundle: Bundle, name: str, data: bytes) -> Bundle:
    """Writes a file of a bundle, instead of any that has its name, and opens the bundle again.

    Whatever interrupts it, the bundle is there without the file, or with it.
    """
    outer = bundle.path.resolve().parent
    if (outer / MANIFEST).is_file():
        message = f"{bundle.path} is a part of the bundle {outer}."
        raise UsageError(message, "Copy it elsewhere, change the copy, and put the copy into the bundle.")
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
