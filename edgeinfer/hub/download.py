"""The files that a repository of the hub has and offers, fetched into the cache that Hugging Face libraries share. The
library fetches every file under a new name in every process, so that an interrupted download begins again. Large files
are therefore fetched here, under a name that stays, and put where the library looks for them."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeinfer.bundle.names import quantization_of
from edgeinfer.bundle.writing import MANIFEST, digest_of
from edgeinfer.core.errors import BudgetError, HubError
from edgeinfer.core.options import format_size
from edgeinfer.core.records import dataclass
from edgeinfer.hub.cache import Kind, gguf_name
from edgeinfer.hub.catalog_models import gguf_memory, room
from edgeinfer.hub.client import Progress, bar_class, hub_errors, library
from edgeinfer.hub.ids import (
    CONFIG_PATTERNS,
    WEIGHT_PATTERNS,
    HubName,
    gguf_models,
    gguf_parts,
    is_gguf_model,
    listed_files,
    literal,
    parse_name,
)

_CHECKPOINT = (*CONFIG_PATTERNS, *WEIGHT_PATTERNS)
# Smaller files are not worth a request of their own; the hub serves no larger ones this way.
_LARGE_BYTES, _LARGEST_BYTES = 10_000_000, 50_000_000_000
_UNFINISHED = ".edgeinfer.incomplete"
_SHA256_LETTERS = 64
# The type that is taken where it fits: beyond it text hardly improves, and every token takes longer. Makers of GGUF
# files and llama.cpp take the same. The types after it stand in for it where a repository has none, best first.
_USUAL = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_0", "IQ4_NL", "IQ4_XS", "Q4_1", "MXFP4", "MXFP4_MOE"),
    *("Q5_K_M", "Q5_K_S"),
)


@dataclass(frozen=True)
class Repository:
    repo_id: str
    commit: str  # of its revision
    sizes: dict[str, int]  # bytes of its files by name, 0 where the hub does not tell
    kind: Kind

    @property
    def fetched(self) -> dict[str, int]:
        """The files of a checkpoint that are fetched; of other kinds all files."""
        return self._matching(_CHECKPOINT) if self.kind == "checkpoint" else self.sizes

    @property
    def weights(self) -> dict[str, int]:
        """The files with a checkpoint's tensors."""
        return self._matching(WEIGHT_PATTERNS)

    def _matching(self, patterns: Iterable[str]) -> dict[str, int]:
        return {n: size for n, size in self.sizes.items() if any(fnmatch.fnmatchcase(n, p) for p in patterns)}


def look_up(repo_id: str, revision: str | None = None) -> Repository:
    """Asks the hub what a repository has."""
    hub = library()
    with hub_errors(repo_id, revision):
        info = hub.HfApi().model_info(repo_id, revision=revision, files_metadata=True)
    sizes = {file.rfilename: int(getattr(file, "size", None) or 0) for file in info.siblings or ()}
    return Repository(repo_id, str(getattr(info, "sha", None) or ""), sizes, _kind(repo_id, sizes))


def _kind(repo_id: str, names: Iterable[str]) -> Kind:
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

    Only the files that a bundle's manifest lists are fetched, and only the safetensors and configuration of a
    checkpoint. Nothing that is fetched is executed.

    Args:
        name: ORG/NAME, or ORG/NAME:TYPE for one GGUF file.
        revision: branch, tag or commit; None takes the main branch.
        cache_dir: None takes the cache that Hugging Face libraries share.
        progress: True draws bars on stderr, False is silent, a callable gets (file, bytes done, bytes in all).
        found: the answer of `look_up` for the repository at this revision; None asks.

    Returns:
        The local directory, or the GGUF file.

    Raises:
        HubError: offline, unknown, private or gated repository, or one that holds no model.
        BundleError: the repository's manifest is malformed or lists files that are not data.
        StorageError: the cache cannot be written, or the disk is full.
    """
    parsed = _parsed(name)
    hub, repo_id, commit = library(), parsed.repo_id, revision
    options: dict[str, Any] = {"cache_dir": cache_dir, "library_name": "edgeinfer", "tqdm_class": bar_class(progress)}
    found = found or look_up(repo_id, revision)
    with hub_errors(repo_id, revision):
        if parsed.tag is not None:
            wanted = gguf_parts(repo_id, found.sizes, parsed.tag)
            patterns, large = literal(wanted), found.commit
        elif found.kind == "bundle":
            path = Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=[MANIFEST], **options))
            # The same commit again, should the branch move in between; the cache names snapshots by commit.
            wanted = listed_files(path / MANIFEST)
            patterns, large, commit = literal(wanted), path.name, path.name
        elif found.kind == "checkpoint":
            wanted, patterns, large = list(found.fetched), list(_CHECKPOINT), found.commit
        else:
            models = ", ".join(sorted(filter(is_gguf_model, found.sizes)))
            hint = f"Name one by its type, such as {repo_id}:Q4_K_M. There are {models}."
            raise HubError(f"{repo_id} contains GGUF files.", hint)
        _fetch_large(repo_id, large, {n: found.sizes.get(n, 0) for n in wanted}, cache_dir, progress)
        folder = Path(hub.snapshot_download(repo_id, revision=commit, allow_patterns=patterns, **options))
    return folder if parsed.tag is None else folder / wanted[0]


def pull_config(repo_id: str, revision: str | None) -> Path:
    """Fetches the config.json of a checkpoint, which says whether its weights are worth fetching."""
    options: dict[str, Any] = {"library_name": "edgeinfer", "tqdm_class": bar_class(False)}
    with hub_errors(repo_id, revision):
        patterns = ["config.json"]
        return Path(library().snapshot_download(repo_id, revision=revision, allow_patterns=patterns, **options))


def _parsed(name: str) -> HubName:
    parsed = parse_name(name)
    if parsed is None:
        raise HubError(f"{name!r} is not a Hugging Face id.", "Write it as OWNER/NAME, such as Qwen/Qwen3-0.6B.")
    return parsed


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
    found = look_up(_parsed(name).repo_id)
    if found.kind != "gguf":
        raise HubError(f"{found.repo_id} contains a {found.kind}, not GGUF files.", "Load it by this name.")
    return offers_in(found, memory)


def offers_in(repository: Repository, memory: int | None = None) -> list[Offer]:
    """The offers of a repository that was looked up, smallest first."""
    models, limit, found = gguf_models(repository.sizes), room(memory), list[Offer]()
    firsts = [parts[0] for parts in models]
    for parts in models:
        size = sum(repository.sizes[part] for part in parts)
        name, needed = gguf_name(repository.repo_id, parts[0], firsts), gguf_memory(size)
        found.append(Offer(name, quantization_of(parts[0]) or "", size, needed, needed <= limit))
    found.sort(key=lambda offer: (offer.bytes, offer.name))
    best = _best([offer for offer in found if offer.fits])
    return [replace(offer, recommended=offer is best) for offer in found]


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


def _best(fitting: list[Offer]) -> Offer | None:
    usual = [offer for kind in _USUAL for offer in fitting if offer.type == kind]
    quantized = [offer for offer in fitting if offer.type not in ("F16", "BF16", "F32")]
    return usual[0] if usual else max(quantized or fitting, key=lambda offer: offer.bytes, default=None)


def missing_files(repo_id: str, commit: str, sizes: Mapping[str, int], cache: Path | None = None) -> dict[str, int]:
    """The files that the hub's cache does not hold yet, with their sizes."""
    hub = library()
    return {
        name: size
        for name, size in sizes.items()
        if not isinstance(hub.try_to_load_from_cache(repo_id, name, cache_dir=cache, revision=commit or None), str)
    }


def _fetch_large(
    repo_id: str, commit: str, sizes: Mapping[str, int], cache: Path | None, progress: bool | Progress
) -> None:
    """Fetches the large files of a repository that are not in the cache yet."""
    large = {name: size for name, size in sizes.items() if _LARGE_BYTES <= size < _LARGEST_BYTES}
    missing = missing_files(repo_id, commit, large, cache)
    before, total = 0, sum(missing.values())
    for name, size in missing.items():
        _fetch(repo_id, commit, name, cache, _counting_from(progress, before, total))
        before += size


def _counting_from(progress: bool | Progress, before: int, total: int) -> bool | Progress:
    """Counts the bytes of one file among the bytes of all."""
    if not callable(progress):
        return progress
    report: Progress = progress
    return lambda label, done, _: report("large files", before + done, total)


def _fetch(repo_id: str, commit: str, name: str, cache: Path | None, progress: bool | Progress) -> None:
    from filelock import FileLock
    from huggingface_hub import file_download

    hub = library()
    cache = Path(hub.constants.HF_HUB_CACHE) if cache is None else cache
    url = hub.hf_hub_url(repo_id, name, revision=commit)
    facts = hub.get_hf_file_metadata(url, library_name="edgeinfer")
    own = file_download.repo_folder_name(repo_id=repo_id, repo_type="model")
    etag, size = str(facts.etag or ""), facts.size
    if not etag or not etag.isalnum() or size is None:
        return  # the library fetches it
    blob = cache / own / "blobs" / etag
    # Without links the library keeps files where they are read.
    linked = file_download.are_symlinks_supported(cache)
    target = blob if linked else cache / own / "snapshots" / commit / name
    lock = cache / ".locks" / own / f"{etag}.lock"
    for folder in (blob.parent, target.parent, lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {"headers": hub.utils.build_hf_headers(library_name="edgeinfer"), "expected_size": size}
    if "tqdm_class" in inspect.signature(file_download.http_get).parameters:
        given["tqdm_class"] = bar_class(progress)
    # The library's own lock, which other programs hold while they fetch the same file.
    with FileLock(lock):
        if target.exists():
            return
        part = blob.with_name(etag + _UNFINISHED)
        had = part.stat().st_size if part.exists() else 0
        if had > size:
            part.unlink()
            had = 0
        with part.open("ab") as file:
            file_download.http_get(url, file, resume_size=had, **given)
        # The first part came from another run, so it is compared with the hub's digest where there is one.
        if had and len(etag) == _SHA256_LETTERS and digest_of(part) != etag:
            part.unlink()
            raise HubError(f"{name} was damaged while it was fetched.", "Ask again; it is fetched from the beginning.")
        part.replace(target)
