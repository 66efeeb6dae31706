"""Where each model on this machine is and by which names it is loaded, before any of its files is opened."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from edgeinfer.bundle.names import display_name, stem_of
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.errors import EdgeInferError, ModelError
from edgeinfer.hub.cache import BUILTIN, CachedModel, builtin, cached_models, is_bundle, last_uses
from edgeinfer.hub.folder import Converted, converted_models, models_folder, source_of
from edgeinfer.hub.ids import GGUF, first_part
from edgeinfer.records import dataclass

Origin = Literal["built-in", "converted", "hub", "folder"]


@dataclass(frozen=True)
class Place:
    """A model on this machine."""

    name: str  # what loads it: a short name, or its path where another model has that
    path: Path  # the bundle's directory or the (first) GGUF file
    origin: Origin
    hub_id: str | None = None  # ORG/NAME that it came from; None where it came from elsewhere
    also: tuple[str, ...] = ()  # further names that mean it, unless they mean others as well
    files: tuple[Converted | CachedModel, ...] = ()  # removed with it
    source_bytes: int = 0  # of the checkpoint that it was converted from, where that is still in the hub's cache

    @property
    def converted(self) -> Converted | None:
        """The conversion that it is; None for other models."""
        return next((each for each in self.files if isinstance(each, Converted)), None)


def places() -> list[Place]:
    """All models on this machine, except the user's own files outside the folder of models."""
    found = [Place(BUILTIN, builtin(), "built-in")]
    cached = cached_models()
    checkpoints = {model.repo_id: model.bytes for model in cached if model.kind == "checkpoint"}
    converted = converted_models()
    counts = Counter(_source_name(each).lower() for each in converted)
    for each in converted:
        base = _source_name(each)
        name = base if counts[base.lower()] == 1 else f"{base}:{each.bits}bit"
        hub_id = each.source.name if each.source.directory is None else None
        size = checkpoints.get(each.source.name, 0) if hub_id else 0
        last = base.rpartition("/")[2]
        also = (base, f"{base}:{each.bits}bit", last, f"{last}:{each.bits}bit")
        found.append(Place(name, each.path, "converted", hub_id, also, (each,), size))
    for model in cached:
        if model.kind != "checkpoint":
            names = (stem_of(model.path.name), model.repo_id.rpartition("/")[2])
            found.append(Place(model.name, model.path, "hub", model.repo_id, names, (model,)))
    known = {place.path for place in found}
    found += [Place(_file_name(path), path, "folder") for path in _own_files() if path not in known]
    counts = Counter(place.name.lower() for place in found)
    # Models with equal names are loaded by their paths; the built-in one keeps its name.
    return [
        place if counts[place.name.lower()] == 1 or place.origin == "built-in" else replace(place, name=str(place.path))
        for place in found
    ]


def find_place(name: str, bits: int | None = None) -> Place | None:
    """The model on this machine that a short name means, ignoring case; ModelError where it means several. Of several
    conversions of one checkpoint it is the last. A file elsewhere that was loaded before counts too."""
    wanted, here = name.casefold(), places()
    found = [place for place in here if place.name.casefold() == wanted]
    found = found or [place for place in here if wanted in map(str.casefold, place.also)]
    if len({place.path.parent for place in found}) == 1 and found[0].converted is not None:
        fitting = [place for place in found if place.converted is not None and place.converted.bits == bits]
        return max(fitting or found, key=lambda place: place.path.stat().st_mtime)
    found = found or [place for place in here if _own_name(place.path).casefold() == wanted]
    used = (Path(path) for path in ([] if found else last_uses()))
    found = found or [
        Place(str(path), path, "folder")
        for path in used
        if _file_name(path).casefold() == wanted and (is_bundle(path) or path.is_file())
    ]
    if len(found) > 1:
        shown = ", ".join(sorted(str(place.path) for place in found))
        raise ModelError(f"Several models are called {name}.", f"Give the path of one: {shown}.")
    return found[0] if found else None


def shown_name(model: str | Path | None) -> str:
    """A model's name as people write it: Qwen2.5 Coder 0.5B Instruct; only its manifest is read."""
    if model is None:
        return BUILTIN
    path = Path(model)
    # Old conversations name models that are gone.
    return display_name(_own_name(path) if path.exists() else source_of(path) or str(model))


def _source_name(converted: Converted) -> str:
    source = converted.source
    return source.name if source.directory is None else source.directory.name or source.name


def _file_name(path: Path) -> str:
    return source_of(path) or (stem_of(path.name) if path.suffix == GGUF else path.name)


def _own_name(path: Path) -> str:
    """The name in a model's own files."""
    manifest = path / MANIFEST if path.is_dir() else path
    return _read_name(path, manifest.stat().st_mtime_ns if manifest.exists() else 0)


@lru_cache(maxsize=256)
def _read_name(path: Path, changed: int) -> str:
    with contextlib.suppress(EdgeInferError):
        return open_bundle(path).manifest.name
    return _file_name(path)


def _own_files() -> Iterator[Path]:
    """Bundles and GGUF files that the user put into the folder of models."""
    folder = models_folder()
    for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
        bundle = is_bundle(path) and not is_bundle(path.parent)
        gguf = path.suffix == GGUF and path.is_file() and first_part(path.name) and not is_bundle(path.parent)
        if (bundle or gguf) and not path.name.startswith("."):
            yield path
