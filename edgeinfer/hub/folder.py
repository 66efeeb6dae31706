"""The user's folder of models that were converted on this machine: where each lies, found again, removed.

models/Qwen--Qwen3-0.6B/source.json              which checkpoint
models/Qwen--Qwen3-0.6B/4-bit-c1899de289a0/      a bundle, by bits and revision
models/Qwen--Qwen3-0.6B/.work-XXXX/              a conversion that runs, or was killed
models/.locks/Qwen--Qwen3-0.6B.lock              held by whoever converts it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.bundle.writing import MANIFEST, storage_errors, write_file
from edgeinfer.errors import StorageError
from edgeinfer.hub.cache import is_bundle
from edgeinfer.hub.ids import WEIGHT_PATTERNS
from edgeinfer.records import dataclass
from edgeinfer.user_files import user_data

if TYPE_CHECKING:
    from filelock import FileLock


# What a folder of an unfinished conversion begins with.
WORK = ".work-"
_LOCKS = ".locks"
_SOURCE = "source.json"
_BUNDLE = re.compile(r"(2|4|8|32)-bit-([0-9a-z]{1,12})")
_REVISION_LETTERS = 12
# What says that a checkpoint's directory is another one than before.
_TELLING = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that is converted: a repository of the hub, or a directory.

    Attributes:
        name: what names it: ORG/NAME, or the directory's path.
        directory: None for a repository.
    """

    name: str
    directory: Path | None = None

    @classmethod
    def of_directory(cls, path: Path) -> CheckpointSource:
        """The checkpoint in a directory."""
        resolved = path.resolve()
        return cls(str(resolved), resolved)

    @property
    def key(self) -> str:
        """The name of its folder."""
        if self.directory is None:
            return self.name.replace("/", "--")
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()
        safe = re.sub(r"[^\w.-]", "-", self.directory.name, flags=re.ASCII)[:60]
        # No repository's name begins like this.
        return f"_{safe}-{digest[:8]}"

    @property
    def folder(self) -> Path:
        """Where what was converted of it lies."""
        return models_folder() / self.key

    def revision(self) -> str:
        """What tells a directory from what it was before: sizes and times of its files."""
        assert self.directory is not None, "a repository's is its commit"
        files = [self.directory / name for name in _TELLING]
        files += sorted(path for pattern in WEIGHT_PATTERNS for path in self.directory.glob(pattern))
        facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def place(self, bits: int, revision: str) -> Path:
        """Where the bundle of these bits goes."""
        return self.folder / f"{bits}-bit-{revision[:_REVISION_LETTERS] or 'main'}"

    def record(self) -> None:
        """Makes the folder and says in it what it is of."""
        with storage_errors(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = {"source": self.name, "hub": self.directory is None}
        write_file(self.folder / _SOURCE, json.dumps(data, indent=1).encode("utf-8", "backslashreplace"))


@dataclass(frozen=True)
class Converted:
    """A bundle that was converted on this machine.

    Attributes:
        path: the bundle.
    """

    source: CheckpointSource
    bits: int
    revision: str
    path: Path

    @property
    def bytes(self) -> int:
        """Of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def source_of(path: Path) -> str | None:
    """The last part of the name of what a path was converted of, whether or not it is there; None for other paths."""
    if path.parent.parent != models_folder() or _BUNDLE.fullmatch(path.name) is None:
        return None
    key = path.parent.name
    directory = re.fullmatch(r"_(.+)-[0-9a-f]{8}", key)
    return key.rpartition("--")[2] if directory is None else directory[1]


def models_folder() -> Path:
    """The user's folder of models; it need not exist.

    Raises:
        StorageError: this user has no home folder.
    """
    return user_data() / "edgeinfer" / "models"


def find_converted(source: CheckpointSource, bits: int | None = None, revision: str | None = None) -> Converted | None:
    """The bundle of a checkpoint, of several the one that was converted last; None where there is none.

    Args:
        bits, revision: None takes any. Of a directory only what was converted of the files that are in it now counts.
    """
    if source.directory is not None and revision is None:
        revision = source.revision()
    found = [
        converted
        for converted in _in_folder(source.folder)
        if bits in (None, converted.bits)
        and converted.source.name == source.name
        and (revision is None or revision[:_REVISION_LETTERS] == converted.revision)
    ]
    return max(found, key=lambda converted: converted.path.stat().st_mtime, default=None)


def converted_models() -> list[Converted]:
    """All of them, by the name of their source, and bits."""
    try:
        folders = list(models_folder().iterdir())
    except (OSError, StorageError):
        return []
    found = [converted for folder in folders for converted in _in_folder(folder)]
    return sorted(found, key=lambda converted: (converted.source.name, converted.bits))


def remove_converted(converted: Converted) -> int:
    """Removes a bundle, and the folder of its source where nothing else is in it.

    Returns:
        Bytes that were freed.

    Raises:
        StorageError: it cannot be removed.
    """
    freed, folder = converted.bytes, converted.path.parent
    with storage_errors(converted.path):
        # First what makes it a bundle, so that half of one is never found.
        (converted.path / MANIFEST).unlink()
        shutil.rmtree(converted.path)
    if not _in_folder(folder) and not any(folder.glob(f"{WORK}*")):
        shutil.rmtree(folder, ignore_errors=True)
    return freed


def lock_of(key: str) -> FileLock:
    """Held while a folder is written to; the system lets go of it when its holder ends, however that happens."""
    from filelock import FileLock  # only here: a megabyte of modules

    folder = models_folder() / _LOCKS
    with storage_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return FileLock(folder / f"{key}.lock")


def remove_leftovers() -> None:
    """Removes what conversions left that were killed: their folders' locks are free."""
    left = list(models_folder().glob(f"*/{WORK}*"))
    if not left:
        return
    from filelock import Timeout  # a megabyte of modules

    for work in left:
        with contextlib.suppress(Timeout, OSError), lock_of(work.parent.name).acquire(timeout=0):
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):
                (work.parent / _SOURCE).unlink() if not _in_folder(work.parent) else None
                work.parent.rmdir()


def _in_folder(folder: Path) -> list[Converted]:
    return list(_read(folder))


def _read(folder: Path) -> Iterator[Converted]:
    try:
        data = json.loads((folder / _SOURCE).read_text("utf-8"))
        name, from_hub = data["source"], data["hub"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not isinstance(name, str):
        return
    source = CheckpointSource(name) if from_hub else CheckpointSource(name, Path(name))
    for path in folder.iterdir():
        match = _BUNDLE.fullmatch(path.name)
        if match is not None and is_bundle(path):
            yield Converted(source, int(match[1]), match[2], path)
