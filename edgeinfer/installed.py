"""The models on this machine: listed with what they take, fetched, removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from edgeinfer import hub
from edgeinfer.bundle import open_bundle
from edgeinfer.config import LoadConfig
from edgeinfer.errors import EdgeInferError, ModelError, UsageError
from edgeinfer.loading import Bundles
from edgeinfer.records import dataclass

__all__ = ["LocalModel", "list_models", "pull", "remove_model"]

Origin = Literal["built-in", "converted", "hub", "folder"]
_GGUF = "*.gguf"


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine.

    Attributes:
        name: what loads it.
        path: the bundle's directory or the GGUF file.
        bytes: of its files.
        memory: the smallest budget it runs in, in bytes; None where it cannot be planned here.
        format: of its files.
        origin: comes with edgeinfer, was converted here, lies in the hub's cache, or in the user's folder of models.
        hub_id: ORG/NAME that it came from; None where it came from elsewhere.
        source_bytes: of the checkpoint that it was converted from, where that is still in the hub's cache.
        last_used: when it was last loaded; None where that is not known.
        error: why it cannot run here; None where nothing is known against it.
    """

    name: str
    path: Path
    bytes: int
    memory: int | None
    format: Literal["bundle", "gguf"]
    origin: Origin
    hub_id: str | None = None
    source_bytes: int = 0
    last_used: datetime | None = None
    error: str | None = None


def list_models() -> list[LocalModel]:
    """The models on this machine, the built-in one first, then by name.

    The user's own files elsewhere are not looked for.
    """
    uses = hub.last_uses()
    found = [_describe(place, uses) for place in _places()]
    return sorted(found, key=lambda model: (model.origin != "built-in", model.name.lower()))


def pull(
    name: str,
    *,
    bits: int | None = None,
    revision: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> LocalModel:
    """Fetches a model, or brings it up to date; a checkpoint is converted, once, into the user's folder of models.

    Args:
        name: of the catalog, ORG/NAME, ORG/NAME:TYPE for one GGUF file of a repository, or a checkpoint's directory.
        bits: of the conversion: 2, 3, 4, 8 or 32; None is 4, or what goes into this machine's memory.
        revision: branch, tag or commit; None is the main branch.
        progress: called with a stage, and bytes or steps done and in all; None draws bars on a terminal.
        cancelled: asked several times a second whether to stop.

    Raises:
        ModelError: there is no such model, or it cannot be converted.
        HubError: offline, unknown, private or gated repository, one that holds no model, or it was cancelled.
        StorageError: the disk has too little room; nothing was written then.
    """
    path = hub.update(name, bits=bits, revision=revision, progress=progress, cancelled=cancelled)
    uses = hub.last_uses()
    for place in _places():
        if place.path == path:
            return _describe(place, uses)
    # A revision that is not the main branch's, or a path that was given.
    return _describe(_Place(name, path, "folder", None, ()), uses)


def remove_model(name: str) -> int:
    """Removes a model from the user's folder of models or the hub's cache, without asking.

    Of a converted model the checkpoint that it came from goes too, where the hub's cache has it.

    Args:
        name: as `list_models` names it, or a short name of the catalog.

    Returns:
        Bytes that were freed.

    Raises:
        ModelError: there is no such model, or it is none that edgeinfer put there.
        StorageError: its files cannot be removed.
    """
    wanted = _hub_names(name)
    places = [place for place in _places() if place.name in wanted or str(place.path) == name]
    if not places:
        # Without the bits, all conversions of a checkpoint.
        places = [place for place in _places() if place.hub_id in wanted and place.origin == "converted"]
    cached = [model for model in hub.cached_models() if model.name in wanted and model.kind == "checkpoint"]
    if not places and not cached:
        raise ModelError(
            f"There is no model {name} on this machine.", "Their names: edgeinfer models, or edgeinfer.list_models()."
        )
    for place in places:
        if place.origin not in ("converted", "hub"):
            if place.origin == "built-in":
                raise UsageError(f"{name} comes with edgeinfer and stays.", "It goes when edgeinfer is uninstalled.")
            message = f"{name} was not put there by edgeinfer, so it is not removed."
            raise UsageError(message, f"Delete {place.path} yourself if you want to.")
    return sum(_remove(place) for place in places) + sum(hub.remove_cached(model) for model in cached)


@dataclass(frozen=True)
class _Place:
    """Where a model is, before it is opened."""

    name: str
    path: Path
    origin: Origin
    hub_id: str | None
    removed_by: tuple[hub.Converted | hub.CachedModel, ...]
    source_bytes: int = 0


def _places() -> Iterator[_Place]:
    yield _Place(hub.BUILTIN, hub.builtin(), "built-in", None, ())
    cached = hub.cached_models()
    checkpoints = {model.repo_id: model for model in cached if model.kind == "checkpoint"}
    converted = hub.converted_models()
    counts = Counter(each.source.name for each in converted)
    for each in converted:
        of_hub = each.source.directory is None
        checkpoint = checkpoints.get(each.source.name) if of_hub else None
        name = each.source.name if counts[each.source.name] == 1 else f"{each.source.name}:{each.bits}bit"
        # A directory that is gone or changed no longer loads it, and a path takes no bits.
        known = of_hub or (counts[each.source.name] == 1 and hub.local(each.source.name) == each.path)
        size = 0 if checkpoint is None else checkpoint.bytes
        hub_id = each.source.name if of_hub else None
        yield _Place(name if known else str(each.path), each.path, "converted", hub_id, (each,), size)
    for model in cached:
        if model.kind != "checkpoint":
            yield _Place(model.name, model.path, "hub", model.repo_id, (model,))
    yield from _own_files({each.path for each in converted})


def _own_files(known: set[Path]) -> Iterator[_Place]:
    """Bundles and GGUF files that the user put into the folder of models."""
    folder = hub.models_folder()
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        bundle = hub.is_bundle(path) and not hub.is_bundle(path.parent)
        gguf = path.match(_GGUF) and path.is_file() and not hub.is_bundle(path.parent)
        if (bundle or gguf) and path not in known and not path.name.startswith("."):
            yield _Place(str(path), path, "folder", None, ())


def _describe(place: _Place, uses: dict[str, float]) -> LocalModel:
    size, memory, error = 0, None, None
    try:
        size = sum(entry.bytes for entry in open_bundle(place.path).manifest.files.values())
        config = LoadConfig()
        memory = Bundles.open(place.path, config).plan(config).minimum_bytes
    except EdgeInferError as problem:
        error = str(problem)
    used = uses.get(str(place.path.resolve()))
    return LocalModel(
        name=place.name,
        path=place.path,
        bytes=size,
        memory=memory,
        format="gguf" if place.path.is_file() else "bundle",
        origin=place.origin,
        hub_id=place.hub_id,
        source_bytes=place.source_bytes,
        last_used=None if used is None else datetime.fromtimestamp(used, UTC),
        error=error,
    )


def _hub_names(name: str) -> set[str]:
    """What a name stands for: itself, and the hub's name of a short one."""
    short = hub.catalog_model(name)
    return {name} if short is None else {name, short.repo}


def _remove(place: _Place) -> int:
    freed = 0
    for each in place.removed_by:
        freed += hub.remove_cached(each) if isinstance(each, hub.CachedModel) else hub.remove_converted(each)
    return freed
