"""Bundles on disk: opening and checking them, and writing one whole or not at all; knows nothing of what runs them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.codecs import CODECS, read_rows
from edgeinfer.bundle.digests import hash_file
from edgeinfer.bundle.gguf.reader import GgufFile, read_gguf
from edgeinfer.bundle.kv_types import FLOAT32, KV, find_kv_type
from edgeinfer.bundle.layouts import LAYOUTS, STATIC, WEIGHTS, Layout, model_name, weights_name
from edgeinfer.bundle.manifest import FileEntry, Manifest, TensorEntry
from edgeinfer.bundle.packing import QuantizedMatrix, dequantize
from edgeinfer.bundle.tensor_checks import check_graphs, check_tensors
from edgeinfer.errors import BundleError, StorageError, UsageError

__all__ = [
    "GGUF_MODEL",
    "GGUF_SUFFIX",
    "MANIFEST",
    "Bundle",
    "new_file",
    "open_bundle",
    "seal",
    "storage_errors",
    "write_bundle",
    "write_file",
]

MANIFEST = "edgeinfer.json"
# The model file of a GGUF bundle, and what plain ones' names end in.
GGUF_MODEL, GGUF_SUFFIX = "model.gguf", ".gguf"
# A manifest lists a few hundred bytes per tensor; 64 MB would be a hundred thousand tensors.
_MAX_MANIFEST_BYTES = 64 * 1000**2
# Larger files hold weights, which are verified beside loading: hashing this much takes some 50 ms.
_MOST_HASHED_BYTES = 64 * 1000**2
_AGAIN = "Export or download the bundle again."


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest is valid and every file is there with the right size.

    Attributes:
        path: the folder that its files lie in.
        texts: contents of small files that are not there, by their names.
        header: of a GGUF model file.
        digests: the manifest has the sha256 of every file; of a plain GGUF file it has a fingerprint only.
    """

    path: Path
    manifest: Manifest
    texts: Mapping[str, str] = field(default_factory=dict)
    header: GgufFile | None = field(default=None, repr=False, compare=False)
    digests: bool = True

    def file(self, name: str) -> Path:
        """Path of a listed file, compared with its digest; those of weights are left to who loads them.

        Raises:
            BundleError: the bundle does not list it, or it differs.
        """
        entry = self._entry(name)
        if self.digests and name != WEIGHTS and entry.bytes <= _MOST_HASHED_BYTES:
            self.check(name)
        return self.path / name

    @property
    def gguf(self) -> GgufFile:
        """The header of the model file, wherever that lies.

        Raises:
            BundleError: the bundle has no GGUF file.
        """
        if self.header is None:
            raise BundleError(f"{self.path} holds no GGUF file.", f"Its backend is {self.manifest.backend}.")
        return self.header

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Layouts that the bundle has a graph for, the stored one first."""
        stored = self.manifest.layout
        return (stored, *(other for other in LAYOUTS if other != stored and self.has(model_name(stored, other))))

    def kv_types(self, layout: Layout) -> tuple[str, ...]:
        """Types of cache (edgeinfer.bundle.kv_types) that the bundle has a graph of a layout for, float32 first."""
        stored = self.manifest.layout
        if stored == STATIC:
            return (FLOAT32,)
        return tuple(kv for kv in KV if self.has(model_name(stored, layout, kv)))

    def model_file(self, layout: Layout, kv: str = FLOAT32) -> Path:
        """Path of the graph that reads a layout and caches keys and values in a type.

        Raises:
            BundleError: as `file`; or the bundle was made before there were caches of this type.
            UsageError: there is no such type.
        """
        name = model_name(self.manifest.layout, layout, find_kv_type(kv).name)
        if kv != FLOAT32 and not self.has(name):
            hint = "Export the model again, or load it with a float32 cache."
            raise BundleError(f"{self.path} has no graph for a cache of {kv}.", hint)
        return self.file(name)

    def weights_file(self, layout: Layout) -> Path:
        """Path of the weights in a layout, where the graph beside looks for them.

        Those of a layout that is not stored are there only once they were converted to (edgeinfer.bundle.conversion).
        """
        return self.path / weights_name(self.manifest.layout, layout)

    def has(self, name: str) -> bool:
        """Whether the bundle lists a file or has its text."""
        return name in self.texts or name in self.manifest.files

    def read_text(self, name: str) -> str:
        """Contents of a small text file, checked against its digest.

        Raises:
            BundleError: the bundle does not list it, it differs, or is not UTF-8.
        """
        if name in self.texts:
            return self.texts[name]
        self._entry(name)
        with _reading(self.path / name):
            data = (self.path / name).read_bytes()
            self._compare(name, hashlib.sha256(data).hexdigest())
            return data.decode("utf-8")

    def read_object(self, name: str) -> dict[str, Any]:
        """The JSON object in a small file, checked against its digest.

        Raises:
            BundleError: as `read_text`, or it is not a JSON object.
        """
        try:
            value = json.loads(self.read_text(name))
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{name} is not valid JSON: {error}.", _AGAIN) from error
        if not isinstance(value, dict):
            raise BundleError(f"{name} is not a JSON object.", _AGAIN)
        return value

    def check(self, name: str) -> None:
        """Compares one file with its digest.

        Raises:
            BundleError: it differs, or cannot be read.
            UsageError: there is no digest of it.
        """
        if not self.digests:
            hint = "Compare its sha256 with the one that its publisher states."
            raise UsageError(f"{self.path / name} is no bundle of edgeinfer's and comes without a digest.", hint)
        with _reading(self.path / name):
            self._compare(name, _digest(self.path / name))

    def verify(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compares every file with its digest.

        Raises:
            BundleError: a file differs.
            UsageError: the bundle is a plain GGUF file, which comes without a digest.
        """
        for index, name in enumerate(self.manifest.files):
            if progress is not None:
                progress(name, index, len(self.manifest.files))
            self.check(name)

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A weight as float32, in its logical shape; quantized ones are multiplied out."""
        entry = self.manifest.tensor(name)
        if entry.bits == 32:
            data = read_rows(self.path / WEIGHTS, entry, entry.data, 0, entry.data.shape[0])
            return data.T if entry.transposed else data
        n, k = entry.shape
        rows = self.rows(entry, 0, n)
        return dequantize(rows.data, rows.scales, rows.zero_points, bits=entry.bits, block_size=entry.block_size, k=k)

    def rows(self, entry: TensorEntry, start: int, stop: int) -> QuantizedMatrix:
        """Rows start..stop-1 of a quantized weight."""
        return CODECS[entry.layout].read(self.path / WEIGHTS, entry, start, stop)

    def _entry(self, name: str) -> FileEntry:
        if name not in self.manifest.files:
            raise BundleError(f"{self.path} has no {name}.", _AGAIN)
        return self.manifest.files[name]

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.manifest.files[name].sha256:
            raise BundleError(f"{name} does not match its sha256 in the manifest.", _AGAIN)


def open_bundle(path: Path | str) -> Bundle:
    """Opens a bundle: reads the manifest and checks that every file stays inside and has its size.

    A plain GGUF file is a bundle too; of one that was split, the first part stands for all. Digests of small files are
    compared when they are read; `Bundle.verify` compares all.

    Raises:
        BundleError: anything is missing, malformed or out of place.
    """
    root = Path(path)
    with _reading(root):
        if root.suffix.lower() == GGUF_SUFFIX and not root.is_dir():
            # Not at the top of the file: the bundle of a plain file is made of this module's own.
            from edgeinfer.bundle.gguf.model import open_gguf

            return open_gguf(root)
        return _open(root, _roots(root))


def _open(root: Path, roots: tuple[Path, ...]) -> Bundle:
    source = root / MANIFEST
    if not root.is_dir() or not source.is_file():
        hint = "Point to a directory made by edgeinfer export or to a .gguf file, or pull one with edgeinfer pull."
        raise BundleError(f"{root} is not a bundle: it has no {MANIFEST}.", hint)
    if _inside(root, MANIFEST, roots).stat().st_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{source} is larger than any manifest.", _AGAIN)
    with _reading(source):
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
    from edgeinfer.bundle.gguf.model import check_model

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


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns what can go wrong in reading a file of a bundle into a BundleError."""
    try:
        yield
    except UnicodeError as error:
        raise BundleError(f"{path} is not UTF-8 text.", _AGAIN) from error
    except OSError as error:
        raise BundleError(f"Cannot read {path}: {error.strerror}.", "Check the file and its permissions.") from error


def _digest(path: Path) -> str:
    hashed = hash_file(path)
    assert hashed is not None, "nobody stops it"
    return hashed[0]


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns a full disk or a path that cannot be written into a StorageError; nothing inside may read other files."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"The disk is full: {path}.", "Free some space or choose another place.") from error
        raise StorageError(f"Cannot write {path}: {error.strerror}.", "Choose another place.") from error


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: beside, synced, renamed."""
    with new_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary sibling to write; on success it becomes `path`, on any failure it is removed.

    Raises:
        StorageError: the place cannot be written.
    """
    with storage_errors(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def write_bundle(path: Path, *, replace_existing: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling directory to fill; on success it becomes `path`, on any failure it is removed.

    Raises:
        StorageError: the place cannot be written, or something is there already.
    """
    with storage_errors(path):
        if path.exists() and not replace_existing:
            raise StorageError(f"{path} exists already.", "Choose another name, or add --force to replace it.")
        if path.exists() and not (path / MANIFEST).is_file():
            raise StorageError(f"{path} exists and is not a bundle, so it is not replaced.", "Choose another name.")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            work = scratch / "new"
            work.mkdir()
            yield work
            _sync_tree(work)
            if path.exists():
                path.rename(scratch / "old")
            work.rename(path)
        finally:
            # The old bundle stays until the new one is there, also when Ctrl-C comes between the two renames.
            if (scratch / "old").exists() and not path.exists():
                (scratch / "old").rename(path)
            shutil.rmtree(scratch, ignore_errors=True)


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            handle = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def seal(root: Path, manifest: Manifest) -> Manifest:
    """Lists every file under `root` with size and digest in the manifest and writes `edgeinfer.json`."""
    files = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p != root / MANIFEST):
        files[path.relative_to(root).as_posix()] = FileEntry(path.stat().st_size, _digest(path))
    sealed = replace(manifest, files=files)
    (root / MANIFEST).write_text(sealed.to_json(), "utf-8")
    return sealed
