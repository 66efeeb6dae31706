"""The user's folder of models that were converted on this machine: found, listed, locked, removed.

models/Qwen--Qwen3-0.6B/source.json              which checkpoint or GGUF file
models/Qwen--Qwen3-0.6B/auto-c1899de289a0/       a bundle with the bits that the model needs, by revision
models/Qwen--Qwen3-0.6B/4-bit-c1899de289a0/      one with bits that somebody asked for
models/_llama-7b-q4_k_m-1f0c7b52/gguf-9e107d9d/  a bundle with the types of a GGUF file
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
from typing import TYPE_CHECKING, Literal, get_args

from edgeinfer.bundle.names import part_of, stem_of
from edgeinfer.bundle.writing import MANIFEST, storage_errors, write_file
from edgeinfer.core.errors import StorageError
from edgeinfer.core.options.load import CONVERTED_BITS
from edgeinfer.core.records import dataclass
from edgeinfer.core.user_files import user_data
from edgeinfer.core.version import VERSION
from edgeinfer.hub.cache import is_bundle
from edgeinfer.hub.ids import AUTO, WEIGHT_PATTERNS, Bits

if TYPE_CHECKING:
    from filelock import FileLock


# The name of an unfinished conversion's folder begins with this.
WORK = ".work-"
_LOCKS = ".locks"
_SOURCE = "source.json"
_REFUSED = "refused.json"
_BUNDLE = re.compile(rf"(?:({'|'.join(map(str, CONVERTED_BITS))})-bit|(auto)|gguf)-([0-9a-z]{{1,12}})")
_REVISION_LETTERS = 12
_ELSEWHERE = "Models are kept in the user's folder: set XDG_DATA_HOME to a folder that can be written."
# Files whose change means that a checkpoint's directory holds another model.
_TELLING = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/tool_use.jinja", "generation_config.json", "modules.json",
)  # fmt: skip


SourceKind = Literal["hub", "directory", "gguf", "package"]


@dataclass(frozen=True)
class ModelSource:
    """What is converted: a checkpoint, of the hub or in a directory, or a GGUF file, a user's or a package's."""

    name: str  # ORG/NAME, a path, or the catalog's name of a model that a package holds
    kind: SourceKind = "hub"

    @classmethod
    def of_path(cls, path: Path) -> ModelSource:
        """The checkpoint in a directory, or a GGUF file, which may be a link to a name that says less."""
        return cls(str(path.resolve()), "directory") if path.is_dir() else cls(str(path.absolute()), "gguf")

    @property
    def path(self) -> Path | None:
        """Where it is, if it is on this machine whatever happens to the hub's cache."""
        return Path(self.name) if self.kind in ("directory", "gguf") else None

    @property
    def shown(self) -> str:
        """What people call it."""
        path = self.path
        return self.name if path is None else stem_of(path.name) or self.name

    @property
    def key(self) -> str:
        """The name of its folder."""
        if self.path is None:
            # A repository's has "--" in it.
            return self.name.replace("/", "--")
        digest = hashlib.sha256(self.name.encode("utf-8", "surrogateescape")).hexdigest()
        safe = re.sub(r"[^\w.-]", "-", self.shown, flags=re.ASCII)[-60:]
        # No repository's name begins like this.
        return f"_{safe}-{digest[:8]}"

    @property
    def folder(self) -> Path:
        """The folder of its conversions."""
        return models_folder() / self.key

    def revision(self) -> str:
        """A digest of the sizes and times of its files, which changes when the model does."""
        assert self.path is not None, "a repository's is its commit, a package's its digest"
        if self.kind == "gguf":
            files = parts_of(self.path)
        else:
            files = [self.path / name for name in _TELLING]
            files += sorted(path for pattern in WEIGHT_PATTERNS for path in self.path.glob(pattern))
        facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def place(self, bits: Bits | None, revision: str) -> Path:
        """The folder of the bundle with these bits; None keeps the types of a GGUF file."""
        form = "gguf" if bits is None else AUTO if bits == AUTO else f"{bits}-bit"
        return self.folder / f"{form}-{revision[:_REVISION_LETTERS] or 'main'}"

    def record(self) -> None:
        """Makes the folder, and notes in it what it belongs to."""
        with storage_errors(self.folder, _ELSEWHERE):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        data = {"source": self.name, "kind": self.kind}
        write_file(self.folder / _SOURCE, json.dumps(data, indent=1).encode("utf-8", "backslashreplace"))


def parts_of(path: Path) -> list[Path]:
    """The files of a GGUF model, by its first."""
    count, stem = part_of(path.name)[1], stem_of(path.name)
    return [path] if count == 1 else [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]


@dataclass(frozen=True)
class Converted:
    """A bundle that was converted on this machine."""

    source: ModelSource
    bits: Bits | None  # None where it has the types of a GGUF file
    revision: str
    path: Path

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def bits_of(path: Path) -> Bits | None:
    """The bits of a conversion, by its path; None for other paths, and with a GGUF file's own types."""
    found = _BUNDLE.fullmatch(path.name) if path.parent.parent == models_folder() else None
    return None if found is None else _bits(found)


def _bits(found: re.Match[str]) -> Bits | None:
    return int(found[1]) if found[1] else AUTO if found[2] else None


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


def find_converted(source: ModelSource, bits: Bits | None = None, revision: str | None = None) -> Converted | None:
    """The latest conversion of a model, of files here only as they are now; None where there is none."""
    if source.path is not None and revision is None:
        revision = source.revision()
    found = [
        converted
        for converted in _conversions(source.folder)
        if bits in (None, converted.bits)
        and converted.source.name == source.name
        and (revision is None or revision[:_REVISION_LETTERS] == converted.revision)
    ]
    return max(found, key=lambda converted: converted.path.stat().st_mtime, default=None)


def refuse(source: ModelSource, reason: str) -> None:
    """Notes that this version does not read a GGUF file, so that it is not tried at every load."""
    write_file(source.folder / _REFUSED, json.dumps([VERSION, source.revision(), reason]).encode())


def refusal_of(source: ModelSource) -> str | None:
    """Why this version does not read a GGUF file; None where it was not tried, or not as it is now."""
    try:
        version, revision, reason = json.loads((source.folder / _REFUSED).read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return None
    return str(reason) if (version, revision) == (VERSION, source.revision()) else None


def converted_models() -> list[Converted]:
    """All bundles converted on this machine, by the name of their source, and bits."""
    try:
        folders = list(models_folder().iterdir())
    except (OSError, StorageError):
        return []
    found = [converted for folder in folders for converted in _conversions(folder)]
    # First what was made with the bits that it needs.
    return sorted(found, key=lambda each: (each.source.name, each.bits if isinstance(each.bits, int) else 0))


def remove_converted(converted: Converted) -> int:
    """Removes a bundle, and the folder of its source where nothing else is in it, and returns the bytes that were
    freed; StorageError where it cannot be removed."""
    freed, folder = converted.bytes, converted.path.parent
    with storage_errors(converted.path):
        # First the manifest, so that half of a bundle is never found.
        (converted.path / MANIFEST).unlink()
        shutil.rmtree(converted.path)
    remove_empty(folder)
    return freed


def remove_empty(folder: Path) -> None:
    """Removes the folder of a source of which nothing was made."""
    if not _conversions(folder) and not any(folder.glob(f"{WORK}*")):
        shutil.rmtree(folder, ignore_errors=True)


def lock_of(key: str) -> FileLock:
    """The lock that is held while a folder is written to; the system releases it when its holder ends."""
    from filelock import FileLock  # only here: a megabyte of modules

    folder = models_folder() / _LOCKS
    with storage_errors(folder, _ELSEWHERE):
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
        name, kind = data["source"], data["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not isinstance(name, str) or kind not in get_args(SourceKind):
        return []
    named = ((path, _BUNDLE.fullmatch(path.name)) for path in folder.iterdir())
    return [
        Converted(ModelSource(name, kind), _bits(match), match[3], path)
        for path, match in named
        if match and is_bundle(path)
    ]
