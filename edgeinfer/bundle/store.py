"""A bundle directory on disk: opening, checking and writing it whole or not at all; knows nothing of what runs it."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.bundle.manifest import Blob, FileEntry, Manifest
from edgeinfer.bundle.packing import dequantize
from edgeinfer.errors import BundleError, StorageError

__all__ = [
    "MANIFEST",
    "MODEL",
    "WEIGHTS",
    "Bundle",
    "open_bundle",
    "seal",
    "storage_errors",
    "write_bundle",
    "write_file",
]

MANIFEST = "edgeinfer.json"
WEIGHTS = "weights.bin"
MODEL = "model.onnx"
# A manifest lists a few hundred bytes per tensor; 64 MB would be a hundred thousand tensors.
_MAX_MANIFEST_BYTES = 64 * 1000**2
_CHUNK = 1 << 20
_AGAIN = "Export or download the bundle again."


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its manifest is valid and every file is there with the right size."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """Path of a listed file.

        Raises:
            BundleError: the bundle does not list it.
        """
        if name not in self.manifest.files:
            raise BundleError(f"{self.path} has no {name}.", _AGAIN)
        return self.path / name

    def has(self, name: str) -> bool:
        """Whether the bundle lists a file."""
        return name in self.manifest.files

    def read_text(self, name: str) -> str:
        """Contents of a small text file, checked against its digest."""
        data = self.file(name).read_bytes()
        self._compare(name, hashlib.sha256(data).hexdigest())
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise BundleError(f"{name} is not UTF-8 text.", _AGAIN) from error

    def verify(self, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Compares every file with its digest.

        Raises:
            BundleError: a file differs.
        """
        for index, name in enumerate(self.manifest.files):
            if progress is not None:
                progress(name, index, len(self.manifest.files))
            self._compare(name, _digest(self.path / name))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A weight as float32, in its logical shape; quantized ones are multiplied out."""
        entry = self.manifest.tensor(name)
        if entry.bits == 32:
            data = self._blob(entry.data)
            return data.T if entry.transposed else data
        assert entry.scales is not None
        zeros = self._blob(entry.zero_points) if entry.zero_points is not None else None
        k = entry.shape[1]
        return dequantize(
            self._blob(entry.data), self._blob(entry.scales), zeros, bits=entry.bits, block_size=entry.block_size, k=k
        )

    def _blob(self, blob: Blob) -> NDArray[Any]:
        return np.memmap(self.path / WEIGHTS, blob.dtype, "r", blob.offset, blob.shape)

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.manifest.files[name].sha256:
            raise BundleError(f"{name} does not match its sha256 in the manifest.", _AGAIN)


def open_bundle(path: Path | str) -> Bundle:
    """Opens a bundle: reads the manifest and checks that every file stays inside and has its size.

    Digests of small files are compared when they are read; `Bundle.verify` compares all.

    Raises:
        BundleError: anything is missing, malformed or out of place.
    """
    root = Path(path)
    source = root / MANIFEST
    if not root.is_dir() or not source.is_file():
        hint = "Point to a directory made by edgeinfer export, or pull one with edgeinfer pull."
        raise BundleError(f"{root} is not a bundle: it has no {MANIFEST}.", hint)
    if source.stat().st_size > _MAX_MANIFEST_BYTES:
        raise BundleError(f"{source} is larger than any manifest.", _AGAIN)
    try:
        text = source.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{source} is not UTF-8 text.", _AGAIN) from error
    manifest = Manifest.from_json(text)
    for name, entry in manifest.files.items():
        _check_file(root, name, entry)
    _check_blobs(manifest)
    for name in manifest.drafters:
        open_bundle(_inside(root, name))
    return Bundle(root, manifest)


def _inside(root: Path, name: str) -> Path:
    parts = PurePosixPath(name).parts
    simple = bool(parts) and not PurePosixPath(name).is_absolute() and ".." not in parts and "\\" not in name
    target = root.joinpath(*parts) if simple else root
    # A hub cache holds bundles as links into a blob store, so a link may lead out of the folder only by its last step.
    if not simple or not target.parent.resolve().is_relative_to(root.resolve()):
        raise BundleError(f"The bundle names {name!r}, which leaves its directory.", "Do not use this bundle.")
    return target


def _check_file(root: Path, name: str, entry: FileEntry) -> None:
    target = _inside(root, name)
    if not target.is_file():
        raise BundleError(f"{name} is missing from {root}.", _AGAIN)
    size = target.stat().st_size
    if size != entry.bytes:
        message = f"{name} has {size} bytes, the manifest says {entry.bytes}."
        raise BundleError(message, _AGAIN)


def _check_blobs(manifest: Manifest) -> None:
    if not manifest.tensors:
        return
    if WEIGHTS not in manifest.files:
        raise BundleError(f"The manifest lists tensors but no {WEIGHTS}.", _AGAIN)
    size = manifest.files[WEIGHTS].bytes
    for tensor in manifest.tensors:
        for blob in tensor.blobs:
            if blob.offset + blob.nbytes > size:
                raise BundleError(f"{tensor.name} reaches past the end of {WEIGHTS}.", _AGAIN)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turns a full disk or a path that cannot be written into a StorageError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(f"The disk is full: {path}.", "Free some space or choose another place.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
            raise StorageError(f"Cannot write {path}: {error.strerror}.", "Choose a place you may write to.") from error
        raise


def write_file(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all: beside, synced, renamed."""
    with storage_errors(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
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
    if path.exists() and not replace_existing:
        raise StorageError(f"{path} exists already.", "Choose another name, or add --force to replace it.")
    if path.exists() and not (path / MANIFEST).is_file():
        raise StorageError(f"{path} exists and is not a bundle, so it is not replaced.", "Choose another name.")
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        try:
            yield work
            _sync_tree(work)
            work.chmod(0o755)
            _swap(work, path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise


def _sync_tree(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            handle = os.open(Path(folder) / name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _swap(work: Path, path: Path) -> None:
    """Puts `work` in the place of `path`; the old bundle stays until the new one is there."""
    if not path.exists():
        work.rename(path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    path.rename(old / "bundle")
    try:
        work.rename(path)
    except BaseException:
        (old / "bundle").rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def seal(root: Path, manifest: Manifest) -> Manifest:
    """Lists every file under `root` with size and digest in the manifest and writes `edgeinfer.json`."""
    files = {}
    for path in sorted(p for p in root.rglob("*") if p.is_file() and p.name != MANIFEST):
        files[path.relative_to(root).as_posix()] = FileEntry(path.stat().st_size, _digest(path))
    sealed = replace(manifest, files=files)
    (root / MANIFEST).write_text(sealed.to_json(), "utf-8")
    return sealed

