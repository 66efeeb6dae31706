"""Opening bundles with every file in its place and of its size, adding a file, and nesting a drafter in a bundle."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from edgeinfer.bundle.manifest import FileEntry, Manifest
from edgeinfer.bundle.store import GGUF_MODEL, GGUF_SUFFIX, Bundle, reading
from edgeinfer.bundle.tables import check_graphs, check_tensors
from edgeinfer.bundle.writing import MANIFEST, seal, storage_errors, write_bundle, write_file
from edgeinfer.core.errors import BundleError, Setting, UsageError

if TYPE_CHECKING:
    from edgeinfer.bundle.gguf.reader import GgufFile


# A manifest lists a few hundred bytes per tensor; 64 MB would be a hundred thousand tensors.
_MAX_MANIFEST_BYTES = 64 * 1000**2
_AGAIN = "Export or download the bundle again."
_GGUF_MAGIC = b"GGUF"


def open_bundle(path: Path | str) -> Bundle:
    """Opens a bundle: reads the manifest and checks that every file stays inside and has its size. A plain GGUF file is
    a bundle too; the first part of a split one stands for all. Digests of small files are compared when they are read;
    `Bundle.verify` compares all."""
    root = Path(path)
    with reading(root):
        if is_gguf(root):
            from edgeinfer.bundle.gguf_bundle import open_gguf

            return open_gguf(root)
        return _open(root, _roots(root))


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file: by its ending, or by how it begins, as Ollama's files have no ending."""
    if path.suffix.lower() == GGUF_SUFFIX or not path.is_file():
        return path.suffix.lower() == GGUF_SUFFIX and not path.is_dir()
    with path.open("rb") as file:
        return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC


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
        target = _inside(root, name, roots)
        if not target.is_file():
            raise BundleError(f"{target} is missing.", _AGAIN)
        size = target.stat().st_size
        if size != entry.bytes:
            raise BundleError(f"{name} has {size} bytes, the manifest says {entry.bytes}.", _AGAIN)
    check_tensors(manifest)
    check_graphs(manifest)
    bundle = Bundle(root, manifest, header=_gguf_header(root, manifest))
    for name in manifest.drafters:
        # The digest of its manifest, which lists its files' own, ties the drafter to this bundle.
        _open(bundle.file(f"{name}/{MANIFEST}").parent, roots)
    return bundle


def _gguf_header(root: Path, manifest: Manifest) -> GgufFile | None:
    """The header of a bundle's GGUF file, which must fit the manifest."""
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
    """Where a bundle's files may lie: its directory, and the blob store of a hub cache, whose snapshots are links."""
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


def add_file(bundle: Bundle, name: str, data: bytes) -> Bundle:
    """Writes a file of a bundle, replacing any of its name, and opens the bundle again. Whatever interrupts it, the
    bundle is there without the file, or with it."""
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
    """Writes a file whole, with the rights of the bundle's other files."""
    mode = (bundle.path / MANIFEST).stat().st_mode
    write_file(path, data)
    with storage_errors(bundle.path):
        path.chmod(mode)


# The folder of the drafter that a target loads with.
NESTED = "drafter"


def nest_drafter(target: Path, drafter: Path, out: Path) -> Bundle:
    """Writes a copy of the target's bundle with the drafter in it, replacing any that it had."""
    ours, theirs = open_bundle(target), open_bundle(drafter)
    if theirs.manifest.module is not None:
        raise UsageError(f"{drafter} is made for one model.", "Export that with it: edgeinfer export --drafter HEAD.")
    for bundle in (ours, theirs):
        if bundle.header is not None:
            hint = "Load its model, and name this one with " + Setting("draft_model") + "."
            raise UsageError(
                f"{bundle.path} is a GGUF model, which can neither contain a drafter nor be one in a bundle.", hint
            )
    if theirs.manifest.drafters:
        raise UsageError(f"{drafter} itself contains a drafter.", "Use the model that it was made from.")
    with write_bundle(out) as work:
        for name in ours.manifest.files:
            if not name.startswith(f"{NESTED}/"):
                _copy(ours, name, work)
        for name in theirs.manifest.files:
            _copy(theirs, name, work / NESTED)
        _require_copied(theirs, seal(work / NESTED, theirs.manifest))
        drafters = tuple(dict.fromkeys((*ours.manifest.drafters, NESTED)))
        _require_copied(ours, seal(work, replace(ours.manifest, drafters=drafters)))
    return open_bundle(out)


def nested_drafter(target: Bundle) -> Bundle | None:
    """The drafter inside a bundle; None without one."""
    names = target.manifest.drafters
    return open_bundle(target.path / names[0]) if names else None


def _require_copied(source: Bundle, sealed: Manifest) -> None:
    """Refuses files that were damaged before they were copied, which their new digests would hide."""
    for name, entry in source.manifest.files.items():
        if not name.startswith(f"{NESTED}/") and sealed.files.get(name, entry) != entry:
            message = f"{source.path / name} does not match its sha256 in the manifest."
            raise BundleError(message, "Export or download the bundle again.")


def _copy(bundle: Bundle, name: str, folder: Path) -> None:
    assert name != MANIFEST, "a manifest does not list itself"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(bundle.path / name, folder / name)


_PREFIX = "exit_agreement."


def exit_figure(depth: int) -> str:
    """Name of the figure for how often a guess after so many layers is the target's; only trained depths have it."""
    return f"{_PREFIX}{depth}"


def trained_depths(manifest: Manifest) -> tuple[int, ...]:
    """Depths with such a figure, ascending, fewer than all layers."""
    layers = manifest.geometry.num_layers
    return tuple(depth for depth in range(1, layers) if exit_figure(depth) in manifest.figures)


def add_figures(bundle: Bundle, figures: Mapping[str, float]) -> None:
    """Adds figures to the manifest."""
    manifest = replace(bundle.manifest, figures=bundle.manifest.figures | dict(figures))
    write_file(bundle.path / MANIFEST, manifest.to_json().encode())
