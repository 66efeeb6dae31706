"""The files that a repository of the hub has and offers, fetched into the cache that Hugging Face libraries share.

The library fetches every file under a new name in every process, so that an interrupted download begins again. Large
files are therefore fetched here, under a name that stays, and put where the library looks for them.
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edgeinfer.bundle.names import quantization_of, stem_of
from edgeinfer.bundle.writing import MANIFEST, digest_of
from edgeinfer.config import format_size
from edgeinfer.errors import BudgetError, HubError, UsageError
from edgeinfer.hub.cache import Kind, gguf_name
from edgeinfer.hub.catalog_models import gguf_memory, room
from edgeinfer.hub.client import Progress, bar_class, hub_errors, library
from edgeinfer.hub.ids import (
    CONFIG_PATTERNS,
    WEIGHT_PATTERNS,
    HubName,
    first_part,
    gguf_parts,
    is_gguf_model,
    is_hub_id,
    listed_files,
    literal,
    parse_name,
)
from edgeinfer.records import dataclass

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


@dataclass(frozen=True)
class Repository:
    """What a repository of the hub holds.

    Attributes:
        commit: of its revision.
        sizes: bytes of its files by name, 0 where the hub does not tell.
        kind: of the model in it.
    """

    repo_id: str
    commit: str
    sizes: dict[str, int]
    kind: Kind

    @property
    def fetched(self) -> dict[str, int]:
        """Files of a checkpoint that are fetched; of others all."""
        if self.kind != "checkpoint":
            return self.sizes
        patterns = (*CONFIG_PATTERNS, *WEIGHT_PATTERNS)
        return {n: size for n, size in self.sizes.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}

    @property
    def weights(self) -> dict[str, int]:
        """The files with a checkpoint's tensors."""
        return {n: s for n, s in self.sizes.items() if any(fnmatch.fnmatchcase(n, p) for p in WEIGHT_PATTERNS)}


def look_up(repo_id: str, revision: str | None = None) -> Repository:
    """Asks the hub what a repository holds."""
    hub = library()
    with hub_errors(repo_id, revision):
        info = hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: int(getattr(file, "size", None) or 0) for file in info.siblings or ()}
    return Repository(repo_id, str(getattr(info, "sha", None) or ""), sizes, _kind(repo_id, sizes))


def _kind(repo_id: str, names: dict[str, int]) -> Kind:
    if MANIFEST in names:
        return "bundle"
    if "config.json" in names and any(fnmatch.fnmatchcase(n, p) for n in names for p in WEIGHT_PATTERNS):
        return "checkpoint"
    if any(is_gguf_model(name) for name in names):
        return "gguf"
    hint = "edgeinfer reads bundles, GGUF files, and checkpoints in safetensors; pickled weights are never loaded."
    raise HubError(f"{repo_id} contains neither a bundle nor a checkpoint in safetensors.", hint)


def pull(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: bool | Progress = True,
    found: Repository | None = None,
) -> Path:
    """Fetches a bundle, one GGUF file, or the checkpoint files that export reads.

    Of a bundle only files that its manifest lists are fetched, of a checkpoint only safetensors and configuration.
    Nothing fetched is executed.

    Args:
        name: ORG/NAME, or ORG/NAME:TYPE for one GGUF file.
        revision: branch, tag or commit; None takes the main branch.
        cache_dir: None takes the cache that Hugging Face libraries share.
        progress: True draws bars on stderr, False is silent, a callable gets (file, bytes done, bytes in all).
        found: what `look_up` said of the repository at this revision; None asks.

    Returns:
        The local directory, or the GGUF file.

    Raises:
        HubError: offline, unknown, private or gated repository, or one that holds no model.
        BundleError: the repository's manifest is malformed or lists files that are not data.
        StorageError: the cache cannot be written, or the disk is full.
    """
    parsed = parse_name(name)
    if parsed is None:
        raise HubError(f"{name!r} is not a Hugging Face id.", "Write it as OWNER/NAME, such as Qwen/Qwen3-0.6B.")
    hub, repo_id = library(), parsed.repo_id
    options: dict[str, Any] = {"cache_dir": cache_dir, "library_name": "edgeinfer", "tqdm_class": bar_class(progress)}
    found = found or look_up(repo_id, revision)
    if parsed.tag is not None:
        return _pull_gguf(parsed, found, revision, options, progress)
    with hub_errors(repo_id, revision):
        if found.kind == "bundle":
            path = Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=[MANIFEST], **options))
            # The same commit again, should the branch move in between; the cache names snapshots by commit.
            listed = listed_files(path / MANIFEST)
            revision, patterns = path.name, literal(listed)
            fetch_large(repo_id, path.name, {n: found.sizes.get(n, 0) for n in listed}, cache_dir, progress)
        elif found.kind == "checkpoint":
            patterns = [*CONFIG_PATTERNS, *WEIGHT_PATTERNS]
            fetch_large(repo_id, found.commit, found.fetched, cache_dir, progress)
        else:
            models = ", ".join(sorted(filter(is_gguf_model, found.sizes)))
            hint = f"Name one by its type, such as {repo_id}:Q4_K_M. There are {models}."
            raise HubError(f"{repo_id} contains GGUF files.", hint)
        return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns, **options))


def pull_config(repo_id: str, revision: str | None) -> Path:
    """Fetches the small files of a checkpoint, by which it is known whether its weights are worth fetching."""
    assert is_hub_id(repo_id), "was parsed"
    hub = library()
    options: dict[str, Any] = {"library_name": "edgeinfer", "tqdm_class": bar_class(False)}
    with hub_errors(repo_id, revision):
        patterns = ["config.json"]
        return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns, **options))


def _pull_gguf(
    name: HubName, found: Repository, revision: str | None, options: dict[str, Any], progress: bool | Progress
) -> Path:
    assert name.tag is not None, "whoever calls looked"
    parts = gguf_parts(name.repo_id, found.sizes, name.tag)
    fetch_large(name.repo_id, found.commit, {n: found.sizes[n] for n in parts}, options["cache_dir"], progress)
    with hub_errors(name.repo_id, revision):
        patterns = literal(parts)
        folder = library().snapshot_download(name.repo_id, revision=revision, allow_patterns=patterns, **options)
    return Path(folder) / parts[0]


# The type that is taken where it fits: beyond it text hardly improves, and every token takes longer. Makers of GGUF
# files and llama.cpp take the same. Types behind it stand in for it where a repository has none, best first.
_USUAL = (
    "Q4_K_M",
    "UD-Q4_K_XL",
    "Q4_K_S",
    "Q4_0",
    "IQ4_NL",
    "IQ4_XS",
    "Q4_1",
    "MXFP4",
    "MXFP4_MOE",
    "Q5_K_M",
    "Q5_K_S",
)


@dataclass(frozen=True)
class Offer:
    """One GGUF model of a repository.

    Attributes:
        name: what loads it, ORG/NAME:TYPE.
        type: by llama.cpp's name; "" where the name of the file says none.
        bytes: of its files; 0 where the hub does not tell.
        memory: bytes that running it takes, by the size of its files.
        fits: whether this machine, or the budget asked about, has that much.
        recommended: whether it is the one to take.
    """

    name: str
    type: str
    bytes: int
    memory: int
    fits: bool
    recommended: bool = False


def offers(name: str, *, memory: int | None = None) -> list[Offer]:
    """The types of a repository of GGUF files, smallest first.

    Args:
        name: ORG/NAME.
        memory: budget in bytes; None is what this machine has.

    Raises:
        HubError: as `edgeinfer.pull`, or the repository holds no GGUF files.
    """
    parsed = parse_name(name)
    if parsed is None:
        raise HubError(f"{name!r} is not a Hugging Face id.", "Write it as OWNER/NAME.")
    found = look_up(parsed.repo_id)
    if found.kind != "gguf":
        raise HubError(f"{parsed.repo_id} contains a {found.kind}, not GGUF files.", "Load it by this name.")
    return offers_in(found, memory)


def offers_in(repository: Repository, memory: int | None = None) -> list[Offer]:
    """As `offers`, of a repository that was looked up."""
    models = _models(repository.sizes)
    limit = room(memory)
    found = []
    for first, size in models.items():
        needed = gguf_memory(size)
        tag = quantization_of(first) or ""
        found.append(Offer(gguf_name(repository.repo_id, first, list(models)), tag, size, needed, needed <= limit))
    found.sort(key=lambda offer: (offer.bytes, offer.name))
    best = _best(found)
    return [offer if offer is not best else _recommended(offer) for offer in found]


def best_offer(repository: Repository, memory: int | None = None) -> Offer:
    """The type to take: Q4_K_M or its like where that fits, else the largest that does."""
    found = offers_in(repository, memory)
    for offer in found:
        if offer.recommended:
            return offer
    smallest = found[0]
    message = f"No type of {repository.repo_id} fits into {format_size(room(memory))} of memory."
    hint = f"The smallest, {smallest.name}, needs about {format_size(smallest.memory)}; name it to run it all the same."
    raise BudgetError(message, hint, minimum_bytes=smallest.memory)


def require_gguf(name: str) -> None:
    """Refuses a GGUF file before it is fetched where nothing here could run it."""
    if find_spec("llama_cpp") is None:
        raise UsageError(f"{name} is a GGUF file, which llama.cpp runs.", "Install it: pip install 'edgeinfer[gguf]'")


def _models(sizes: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each model with all its parts, by its first file."""
    names = sorted(filter(is_gguf_model, sizes))
    return {
        first: sum(sizes[name] for name in names if stem_of(name) == stem_of(first))
        for first in names
        if first_part(first)
    }


def _best(found: Iterable[Offer]) -> Offer | None:
    fitting = [offer for offer in found if offer.fits]
    for kind in _USUAL:
        for offer in fitting:
            if offer.type == kind:
                return offer
    quantized = [offer for offer in fitting if offer.type not in ("F16", "BF16", "F32")]
    return max(quantized or fitting, key=lambda offer: offer.bytes, default=None)


def _recommended(offer: Offer) -> Offer:
    return Offer(offer.name, offer.type, offer.bytes, offer.memory, offer.fits, recommended=True)
