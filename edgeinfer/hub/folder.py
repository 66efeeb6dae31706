"""The user's folder of models that were converted on this machine: found, listed, locked, removed.

models/Qwen--Qwen3-0.6B/source.json              which checkpoint
models/Qwen--Qwen3-0.6B/4-bit-c1899de289a0/      a bundle, by bits and revision
models/Qwen--Qwen3-0.6B/.work-XXXX/              a running or killed conversion
models/.locks/Qwen--Qwen3-0.6B.lock              held by the process that converts it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.bundle.writing import MANIFEST, storage_errors, write_file
from edgeinfer.errors import StorageError
from edgeinfer.hub.cache import is_bundle
from edgeinfer.hub.ids import WEIGHT_PATTERNS
from edgeinfer.options.load import CONVERTED_BITS
from edgeinfer.records import dataclass
from edgeinfer.user_files import user_data

if TYPE_CHECKING:
    from filelock import FileLock


# The name of an unfinished conversion's folder begins with this.
WORK = ".work-"
_LOCKS = ".locks"
_SOURCE = "source.json"
_BUNDLE = re.compile(rf"({'|'.join(map(str, CONVERTED_BITS))})-bit-([0-9a-z]{{1,12}})")
_REVISION_LETTERS = 12
# Files whose change means that a checkpoint's directory holds another model.
_TELLING = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/tool_use.jinja", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that is converted: a repository of the hub, or a directory."""

    name: str  # ORG/NAME, or the directory's path
    directory: Path | None = None  # None for a repository

    @classmethod
    def of_directory(cls, path: Path) -> CheckpointSource:
        resolved = path.resolve()
        return cls(str(resolved), resolved)

    @property
    def key(self) -> str:
        if self.directory is None:
            return self.name.replace("/", "--")
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()
        safe = re.sub(r"[^\w.-]", "-", self.directory.name, flags=re.ASCII)[:60]
        # No repository's name begins like this.
        return f"_{safe}-{digest[:8]}"

    @property
    def folder(self) -> Path:
        """The folder of its conversions."""
        return models_folder() / self.key

    def revision(self) -> str:
        """A digest of the sizes and times of a directory's files, which changes when the checkpoint does."""
        assert self.directory is not None, "a repository's is its commit"
        files = [self.directory / name for name in _TELLING]
        files += sorted(path for pattern in WEIGHT_PATTERNS for path in self.directory.glob(pattern))
        facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def place(self, bits: int, revision: str) -> Path:
        return self.folder / f"{bits}-bit-{revision[:_REVISION_LETTERS] or 'main'}"

    def record(self) -> None:
        """Makes the folder, and notes in it which checkpoint it belongs to."""
        with storage_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = {"source": self.name, "hub": self.directory is None}
        write_file(self.folder / _SOURCE, json.dumps(data, indent=1).encode("utf-8", "backslashreplace"))


@dataclass(frozen=True)
class Converted:
    """A bundle that was converted on this machine."""

    source: CheckpointSource
    bits: int
    revision: str
    path: Path

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def source_of(path: Path) -> str | None:
    """The last part of a conversion's source, by the bundle's path, which need not exist; None for other paths."""
    if path.parent.parent != models_folder() or _BUNDLE.fullmatch(path.name) is None:
        return None
    key = path.parent.name
    directory = re.fullmatch(r"_(.+)-[0-9a-f]{8}", key)
    return key.rpartition("--")[2] if directory is None else directory[1]


def models_folder() -> Path:
    """The user's folder of models; it need not exist. StorageError where this user has no home folder."""
    return user_data() / "edgeinfer" / "models"


def find_converted(source: CheckpointSource, bits: int | None = None, revision: str | None = None) -> Converted | None:
    """The latest conversion of a checkpoint, of a directory only of its present files; None where there is none."""
    if source.directory is not None and revision is None:
        revision = source.revision()
    found = [
        converted
        for converted in _conversions(source.folder)
        if bits in (None, converted.bits)
        and converted.source.name == source.name
        and (revision is None or revision[:_REVISION_LETTERS] == converted.revision)
    ]
    return max(found, key=lambda converted: converted.path.stat().st_mtime, default=None)


def converted_models() -> list[Converted]:
    """All bundles converted on this machine, by the name of their source, and bits."""
    try:
        folders = list(models_folder().iterdir())
    except (OSError, StorageError):
        return []
    found = [converted for folder in folders for converted in _conversions(folder)]
    return sorted(found, key=lambda converted: (converted.source.name, converted.bits))


def remove_converted(converted: Converted) -> int:
    """Removes a bundle, and the folder of its source where nothing else is in it, and returns the bytes that were
    freed; StorageError where it cannot be removed."""
    freed, folder = converted.bytes, converted.path.parent
    with storage_errors(converted.path):
        # First the manifest, so that half of a bundle is never found.
        (converted.path / MANIFEST).unlink()
        shutil.rmtree(converted.path)
    if not _conversions(folder) and not any(folder.glob(f"{WORK}*")):
        shutil.rmtree(folder, ignore_errors=True)
    return freed


def lock_of(key: str) -> FileLock:
    """The lock that is held while a folder is written to; the system releases it when its holder ends."""
    from filelock import FileLock  # only here: a megabyte of modules

    folder = models_folder() / _LOCKS
    with storage_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return FileLock(folder / f"{key}.lock")


def remove_leftovers() -> None:
    """Removes the folders of killed conversions, whose locks are free."""
    left = list(models_folder().glob(f"*/{WORK}*"))
    if not left:
        return
    from filelock import Timeout  # a megabyte of modules

    for work in left:
        with contextlib.suppress(Timeout, OSError), lock_of(work.parent.name).acquire(timeout=0):
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):
                (work.parent / _SOURCE).unlink() if not _conversions(work.parent) else None
                work.parent.rmdir()


def _conversions(folder: Path) -> list[Converted]:
    try:
        data = json.loads((folder / _SOURCE).read_text("utf-8"))
        name, from_hub = data["source"], data["hub"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(name, str):
        return []
    source = CheckpointSource(name, None if from_hub else Path(name))
    named = ((path, _BUNDLE.fullmatch(path.name)) for path in folder.iterdir())
    return [Converted(source, int(match[1]), match[2], path) for path, match in named if match and is_bundle(path)]
