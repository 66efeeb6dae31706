"""Checkpoints and bundles of tests, made once for all workers and runs, and again when the code changes.

What is made lies in `.pytest_cache/models` under a digest of everything that decides what it contains: the sources that
make it, the libraries' versions, and the arguments. A file lock lets one worker make it while the others wait.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import platform
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from edgeinfer.export import exporter
from edgeinfer.export.options import ExportConfig

_ROOT = Path(__file__).resolve().parents[1]
_FOLDER = _ROOT / ".pytest_cache" / "models"
# What makes checkpoints and bundles: a test's own maker is added by `made`.
_MAKERS = ("edgeinfer", "export", "quant", "runtime/native", "tests/factories.py", "tests/cache.py")
_LIBRARIES = ("numpy", "onnx", "safetensors", "tokenizers", "torch", "transformers", "llama_cpp_python", "gguf")
_PATIENCE = 300  # seconds; far more than the slowest of them takes


def made(make: Callable[..., None], *arguments: Any, copy_to: Path | None = None) -> Path:
    """The folder that `make(folder, *arguments)` fills, made by whoever asks first. It is everybody's: ask for a copy,
    in a folder that does not exist yet, if you change what is in it. It is known by the source of the function's module
    and the `repr` of the arguments, which must say all that matters."""
    path = place_of(make.__qualname__, Path(inspect.getfile(make)), *arguments)
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock"), timeout=_PATIENCE):
            if not path.is_dir():
                unfinished = path.with_suffix(".unfinished")
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                make(unfinished, *arguments)
                unfinished.rename(path)
    return path if copy_to is None else Path(shutil.copytree(path, copy_to))


def export_checkpoint(source: Path, out: Path, config: ExportConfig | None = None) -> Path:
    """As edgeinfer.export.export_checkpoint, for tests that are not about exporting but about what comes after it."""
    folder = made(_export, _Checkpoint(source), config or ExportConfig(bits=4, calibration="none"), out.name)
    return Path(shutil.copytree(folder / out.name, out))


def _export(folder: Path, source: _Checkpoint, config: ExportConfig, name: str) -> None:
    exporter.export_checkpoint(source.path, folder / name, config)


class _Checkpoint:
    """A checkpoint that is known by what is in it, and by its folder's name, which bundles may be named after."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"{self.path.name} {_digest_of(p for p in self.path.rglob('*') if p.is_file())}"


def place_of(*known_by: object) -> Path:
    """Where something is kept; paths among what it is known by stand for those files' contents."""
    parts = [_digest_of([part]) if isinstance(part, Path) else repr(part) for part in known_by]
    return _FOLDER / _code() / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def _code() -> str:
    """A digest of the sources and libraries that make checkpoints and bundles."""
    found: list[Path] = []
    for name in _MAKERS:
        place = _ROOT / name
        files = [place] if place.is_file() else [p for p in place.rglob("*") if p.suffix in {".py", ".c", ".h"}]
        found += files
    versions = [sys.version, platform.machine()]
    for name in _LIBRARIES:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} is not installed")
    return hashlib.sha256("\0".join([_digest_of(found), *versions]).encode()).hexdigest()[:16]


def _digest_of(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
