"""Finds models by path or hub id and fetches their data files."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import importlib.resources
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from edgeinfer.bundle import MANIFEST, WEIGHTS, Manifest
from edgeinfer.errors import BundleError, HubError, ModelError, StorageError

__all__ = ["BUILTIN", "cached", "find", "find_checkpoint", "is_bundle", "local", "pull", "resolve"]

BUILTIN = "tales"

# Kinds of data a bundle may hold. Pickles, Python and shared libraries are not among them, whatever a manifest lists.
_BUNDLE_SUFFIXES = {".gguf", ".jinja", ".json", ".md", ".npz", ".onnx", ".onnx_data", ".safetensors", ".txt"}
# Of a checkpoint only what export reads. Many repositories also keep pickles, ONNX variants or a second copy of the
# weights (`consolidated.safetensors`), so a pattern such as *.safetensors would fetch gigabytes too many.
_WEIGHT_PATTERNS = ("model.safetensors", "model-*-of-*.safetensors")
_CONFIG_PATTERNS = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
# What the hub itself accepts: two names of letters, digits, dot, dash and underscore.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
# One GGUF file of a repository, by its type or another part of its name, as llama.cpp's own tools write it.
_GGUF_ID = re.compile(rf"({_HUB_ID.pattern}):([\w.-]+)", re.ASCII)
_GGUF = ".gguf"
_GGUF_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
# Projectors of images beside a model, and data that was used to quantize it.
_GGUF_OTHERS = ("mmproj", "imatrix")

Progress = Callable[[str, int, int], None]


def is_bundle(path: Path) -> bool:
    """Whether a directory says it is a bundle; nothing in it is checked."""
    return (path / MANIFEST).is_file()


def resolve(model: str | Path | None) -> Path:
    """The local path of a bundle: the built-in model, an existing path, or a hub id, fetched unless it is cached.

    A cached copy is used as it is, so that loading needs no network; `pull` brings it up to date.

    Args:
        model: None, a path, ORG/NAME, or ORG/NAME:TYPE for one GGUF file of a repository, such as ORG/NAME:Q4_K_M.

    Raises:
        ModelError: no such path, or the repository holds a checkpoint that has to be exported first.
        HubError: the repository could not be fetched.
    """
    path = local(model) or pull(str(model))
    if isinstance(model, str) and not is_bundle(path) and _HUB_ID.fullmatch(model) and _existing(model) is None:
        hint = f"Make one: edgeinfer export {model} {model.split('/')[1]}"
        raise ModelError(f"{model} is a checkpoint, not an edgeinfer bundle.", hint)
    return path


def local(model: str | Path | None) -> Path | None:
    """Where a model is on this machine; None where it would have to be fetched first.

    Args:
        model: as `resolve` takes it.

    Raises:
        ModelError: no such path.
    """
    if model is None:
        return _builtin()
    path = _existing(model)
    if path is not None:
        return path
    gguf = _gguf_id(model)
    return _cached(_hub_id(model)) if gguf is None else _cached_gguf(*gguf)


def cached() -> list[str]:
    """Models in the hub's cache, as `resolve` takes them: ids of bundles, and paths of GGUF files."""
    hub = _library()
    try:
        repos = hub.scan_cache_dir().repos
    except hub.errors.CacheNotFound:
        return []
    found: list[str] = []
    for repo in repos:
        for revision in repo.revisions:
            if repo.repo_type != "model" or "main" not in revision.refs:
                continue
            folder = Path(revision.snapshot_path)
            if is_bundle(folder):
                found += [repo.repo_id] if _cached(repo.repo_id) else []
                continue
            names = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{_GGUF}")]
            # Of a model in several parts the first stands for all.
            parts = {name: _GGUF_PART.search(name) for name in names if _is_gguf_model(name)}
            found += [str(folder / name) for name, part in parts.items() if part is None or int(part[1]) == 1]
    return sorted(found)


def find(source: str | Path) -> Path:
    """The local directory of a bundle or checkpoint: an existing path, or a hub id, fetched unless it is cached.

    Raises:
        ModelError: no such path.
        HubError: the repository could not be fetched.
    """
    return _existing(source) or _cached(_hub_id(source)) or pull(_hub_id(source))


def find_checkpoint(source: str | Path) -> Path:
    """The local directory of a checkpoint: an existing path, or a hub id, fetched unless it is cached.

    Raises:
        ModelError: no such path, or the source is a bundle already.
        HubError: the repository could not be fetched.
    """
    path = find(source)
    if is_bundle(path):
        raise ModelError(f"{source} is a bundle already.", f"Run it: edgeinfer run -m {source}")
    return path


def pull(
    repo_id: str,
    *,
    revision: str | None = None,
    cache_dir: Path | None = None,
    progress: bool | Progress = True,
) -> Path:
    """Fetches a bundle, or the checkpoint files that export reads, into the hub's cache; resumes what was interrupted.

    Of a bundle only files that its manifest lists are fetched, of a checkpoint only safetensors and configuration.
    Nothing fetched is executed.

    Args:
        repo_id: ORG/NAME, or ORG/NAME:TYPE for one GGUF file.
        revision: branch, tag or commit; None takes the main branch.
        cache_dir: None takes the cache that Hugging Face libraries share.
        progress: True draws bars on stderr, False is silent, a callable gets (file, bytes done, bytes in all).

    Returns:
        The local directory, or the GGUF file.

    Raises:
        HubError: offline, unknown, private or gated repository, or one that holds no model.
        BundleError: the repository's manifest is malformed or lists files that are not data.
        StorageError: the cache cannot be written, or the disk is full.
    """
    hub = _library()
    options: dict[str, Any] = {"cache_dir": cache_dir, "library_name": "edgeinfer", "tqdm_class": _bar(hub, progress)}
    if (gguf := _gguf_id(repo_id)) is not None:
        return _pull_gguf(*gguf, revision, options)
    with _hub_errors(repo_id, revision):
        names = [f.rfilename for f in hub.HfApi().model_info(repo_id, revision=revision).siblings or ()]
        if MANIFEST in names:
            path = Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=[MANIFEST], **options))
            # The same commit again, should the branch move in between; the cache names snapshots by commit.
            revision, patterns = path.name, _literal(_listed(path / MANIFEST))
        elif "config.json" in names and any(fnmatch.fnmatchcase(n, p) for n in names for p in _WEIGHT_PATTERNS):
            patterns = [*_CONFIG_PATTERNS, *_WEIGHT_PATTERNS]
        elif models := [name for name in names if _is_gguf_model(name)]:
            hint = f"Name one by a part of its name, as {repo_id}:Q4_K_M. There are {', '.join(sorted(models))}."
            raise HubError(f"{repo_id} holds GGUF files.", hint)
        else:
            hint = "edgeinfer reads bundles, and checkpoints in safetensors; pickled weights are never loaded."
            raise HubError(f"{repo_id} holds neither a bundle nor a checkpoint in safetensors.", hint)
        return Path(hub.snapshot_download(repo_id, revision=revision, allow_patterns=patterns, **options))


def _existing(source: str | Path) -> Path | None:
    """The path that was given, if something is there."""
    try:
        path = Path(source).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # too long a name, a folder that may not be searched, no home
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        raise ModelError(f"No model at {str(source)!r}: {reason}.", "Check the path and its permissions.") from error


def _builtin() -> Path:
    path = Path(str(importlib.resources.files("edgeinfer"))) / "builtin" / BUILTIN
    if not is_bundle(path):
        hint = f"Reinstall edgeinfer, or export the model's checkpoint to {path}."
        raise BundleError("This copy of edgeinfer comes without its built-in model.", hint)
    return path


def _is_checkpoint(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))


def _hub_id(model: str | Path) -> str:
    if isinstance(model, Path) or _HUB_ID.fullmatch(model) is None:
        hint = "Give a bundle directory or a hub id ORG/NAME; without one the built-in model runs."
        raise ModelError(f"No model at {str(model)!r}.", hint)
    return model


def _cached(repo_id: str) -> Path | None:
    """The cached snapshot of the main branch, whole, or None."""
    hub = _library()
    try:
        path = Path(hub.snapshot_download(repo_id, local_files_only=True, allow_patterns=[MANIFEST]))
        names = _listed(path / MANIFEST) if is_bundle(path) else []
        patterns = _literal(names) or [*_CONFIG_PATTERNS, *_WEIGHT_PATTERNS]
        path = Path(hub.snapshot_download(repo_id, local_files_only=True, allow_patterns=patterns))
    except hub.errors.LocalEntryNotFoundError:
        return None
    # Older releases of the library return what an interrupted download left.
    whole = all((path / name).is_file() for name in names) if names else _is_checkpoint(path)
    return path if whole else None


def _gguf_id(model: str | Path) -> tuple[str, str] | None:
    """Repository and part of a file's name, where that is what is meant."""
    match = None if isinstance(model, Path) else _GGUF_ID.fullmatch(model)
    return None if match is None else (match[1], match[2])


def _is_gguf_model(name: str) -> bool:
    return name.endswith(_GGUF) and not any(other in name.lower() for other in _GGUF_OTHERS)


def _gguf_parts(repo_id: str, names: list[str], tag: str) -> list[str]:
    """The parts of the one model that a tag means, the first one first.

    Raises:
        HubError: it means none, or several.
    """
    models = sorted(name for name in names if _is_gguf_model(name))
    whole = re.compile(rf"(^|[-._/]){re.escape(tag)}([-._]|$)", re.IGNORECASE)
    meant = [name for name in models if whole.search(name.removesuffix(_GGUF))]
    if len({_GGUF_PART.sub("", name) for name in meant}) == 1:
        return meant
    shown = ", ".join(meant or models) or "none"
    several = f"Several GGUF files of {repo_id} are named like {tag!r}." if meant else ""
    raise HubError(several or f"{repo_id} has no GGUF file named like {tag!r}.", f"Choose among {shown}.")


def _pull_gguf(repo_id: str, tag: str, revision: str | None, options: dict[str, Any]) -> Path:
    hub = _library()
    with _hub_errors(repo_id, revision):
        names = [f.rfilename for f in hub.HfApi().model_info(repo_id, revision=revision).siblings or ()]
        parts = _gguf_parts(repo_id, names, tag)
        folder = hub.snapshot_download(repo_id, revision=revision, allow_patterns=_literal(parts), **options)
    return Path(folder) / parts[0]


def _cached_gguf(repo_id: str, tag: str) -> Path | None:
    """The cached file of the main branch with all its parts, or None."""
    hub = _library()
    try:
        folder = Path(hub.snapshot_download(repo_id, local_files_only=True, allow_patterns=[f"*{_GGUF}"]))
        parts = _gguf_parts(repo_id, [p.relative_to(folder).as_posix() for p in folder.rglob(f"*{_GGUF}")], tag)
    except (hub.errors.LocalEntryNotFoundError, HubError):
        return None
    count = _GGUF_PART.search(parts[0])
    return folder / parts[0] if count is None or len(parts) == int(count[2]) else None


def _listed(manifest: Path) -> list[str]:
    """The files of a bundle, its manifest included.

    Raises:
        BundleError: the manifest is malformed or lists a file that is not data.
    """
    try:
        text = manifest.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(f"{manifest} is not UTF-8 text.", "Do not use this bundle.") from error
    listing = Manifest.from_json(text)
    for name in listing.files:
        file = PurePosixPath(name)
        if file.suffix not in _BUNDLE_SUFFIXES and file.name != WEIGHTS:
            raise BundleError(f"The bundle lists {name!r}, which is not a kind of data it may hold.", "Do not use it.")
    return [MANIFEST, *listing.files]


def _literal(names: list[str]) -> list[str]:
    return [glob.escape(name) for name in names]


def _library() -> ModuleType:
    """huggingface_hub, imported when a hub id is used and not before, with its telemetry off."""
    import huggingface_hub
    import huggingface_hub.constants
    import huggingface_hub.errors
    import huggingface_hub.utils

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    return huggingface_hub


def _bar(hub: ModuleType, progress: bool | Progress) -> type | None:
    """The class of progress bars that the library should use; None takes its own."""
    if progress is True:
        return None

    class Bar(hub.utils.tqdm):  # type: ignore[misc, name-defined]  # the base is a module attribute
        """A bar that draws nothing and passes byte counts on."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._label = str(options.get("desc") or "")
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0  # a disabled bar does not count
            if callable(progress) and self._counts_bytes:
                progress(self._label, int(self.n), int(self.total or 0))
            return None

    return Bar


@contextlib.contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turns the library's errors into a HubError or StorageError that says what to do."""
    errors = _library().errors
    try:
        yield
    except errors.GatedRepoError as error:
        hint = f"Accept its terms at https://huggingface.co/{repo_id}, then log in with: hf auth login"
        raise HubError(f"{repo_id} is gated.", hint) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo_id} has no revision {revision!r}.", "Give a branch, tag or commit of it.") from error
    except errors.RepositoryNotFoundError as error:
        hint = "Check the spelling; if it is private, log in with: hf auth login"
        raise HubError(f"There is no {repo_id} on the hub, nor a local directory of that name.", hint) from error
    except errors.HFValidationError as error:
        raise HubError(f"{repo_id!r} is not a hub id.", "Write it as ORG/NAME.") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _offline(repo_id) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise HubError(f"The hub refused {repo_id} ({status}).", "Log in with: hf auth login") from error
        raise HubError(f"The hub answered {status} for {repo_id}.", "Try again later; downloads resume.") from error
    except errors.HTTPError as error:
        raise _offline(repo_id) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError("The disk is full.", "Free some space and pull again; downloads resume.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            hint = "Set HF_HOME to a directory you may write to."
            raise StorageError(f"The hub cache cannot be written: {error}.", hint) from error
        raise _offline(repo_id) from error


def _offline(repo_id: str) -> HubError:
    hint = f"Run `edgeinfer pull {repo_id}` when online, or pass a local bundle directory."
    return HubError(f"You are offline or the hub cannot be reached, and {repo_id} is not in the cache.", hint)
