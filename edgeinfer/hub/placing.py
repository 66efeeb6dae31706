"""Where each model on this machine is and by which names it is loaded, before any of its files is opened."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from edgeinfer.bundle.names import display_name, stem_of
from edgeinfer.bundle.opening import is_gguf, open_bundle
from edgeinfer.bundle.writing import MANIFEST
from edgeinfer.core.errors import EdgeInferError, ModelError
from edgeinfer.core.records import dataclass
from edgeinfer.hub.cache import BUILTIN, CachedModel, builtin, cached_models, is_bundle, last_uses
from edgeinfer.hub.folder import Converted, converted_models, models_folder, source_of
from edgeinfer.hub.ids import GGUF, first_part, gguf_models, named_bits

Origin = Literal["built-in", "converted", "hub", "folder", "ollama", "lm-studio"]
# Of the layers in Ollama's manifests, a GGUF file, and one without which it is another model.
_MODEL, _ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_MOST_BYTES = 1_000_000  # of a manifest or of settings


@dataclass(frozen=True)
class Place:
    """A model on this machine."""

    name: str  # what loads it: a short name, or its path where another model has that
    path: Path  # the bundle's directory or the (first) GGUF file
    origin: Origin
    hub_id: str | None = None  # ORG/NAME that it came from; None where it came from elsewhere
    also: tuple[str, ...] = ()  # further names that mean it, unless they mean others as well
    files: tuple[Converted | CachedModel, ...] = ()  # of edgeinfer, removed with it
    source_bytes: int = 0  # of the checkpoint that it was converted from, where that is still in the hub's cache

    @property
    def converted(self) -> Converted | None:
        """The conversion that it is; None for other models."""
        return next((each for each in self.files if isinstance(each, Converted)), None)


def places() -> list[Place]:
    """All models on this machine, Ollama's and LM Studio's included, except the user's own files elsewhere."""
    found, cached, converted = [Place(BUILTIN, builtin(), "built-in")], cached_models(), converted_models()
    files = [
        Place(model.name, model.path, "hub", model.repo_id, _names(model), (model,))
        for model in cached
        if model.kind != "checkpoint"
    ]
    known = {place.path for place in files} | {each.path for each in converted}
    files += [Place(_file_name(path), path, "folder") for path in _own_files() if path not in known]
    known |= {place.path for place in files}
    files += [place for place in _of_other_programs() if place.path not in known]
    known |= {place.path for place in files}
    # What was prepared of a GGUF file that is listed belongs to it.
    prepared = {each.source.path: each for each in converted if each.source.path in known}
    checkpoints = {model.repo_id: model.bytes for model in cached if model.kind == "checkpoint"}
    converted = [each for each in converted if each.source.path not in known]
    counts = Counter(each.source.shown.lower() for each in converted)
    for each in converted:
        base, bits = each.source.shown, "gguf" if each.bits is None else named_bits(each.bits)
        name = base if counts[base.lower()] == 1 else f"{base}:{bits}"
        hub_id = each.source.name if each.source.kind == "hub" else None
        size = checkpoints.get(each.source.name, 0) if hub_id else 0
        last = base.rpartition("/")[2]
        also = (base, f"{base}:{bits}", last, f"{last}:{bits}")
        found.append(Place(name, each.path, "converted", hub_id, also, (each,), size))
    for place in files:
        own = prepared.get(place.path)
        found.append(place if own is None else replace(place, files=(*place.files, own)))
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


def _names(model: CachedModel) -> tuple[str, str]:
    return stem_of(model.path.name), model.repo_id.rpartition("/")[2]


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


def _of_other_programs() -> list[Place]:
    """GGUF files in Ollama's and LM Studio's folders, which are read and never changed."""
    found: dict[Path, Place] = {}
    for place in (*_readable(_of_ollama), *_readable(_of_lm_studio)):
        known = found.setdefault(place.path, place)
        found[place.path] = replace(known, also=tuple(dict.fromkeys((*known.also, place.name, *place.also))))
    return list(found.values())


def _readable(find: Callable[[], Iterator[Place]]) -> list[Place]:
    """What is found before a folder that may not be read, or no home."""
    found: list[Place] = []
    with contextlib.suppress(OSError, RuntimeError):
        found += find()
    return found


def _of_ollama() -> Iterator[Place]:
    given = os.environ.get("OLLAMA_MODELS")
    # The last one is the service's on Linux.
    usual = (Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models"))
    for folder in (Path(given),) if given else usual:
        # HOST/NAMESPACE/MODEL/TAG
        for manifest in sorted((folder / "manifests").glob("*/*/*/*")):
            blob, model = _blob(folder, manifest), manifest.parent.name
            if blob is not None and is_gguf(blob):
                latest = manifest.name == "latest"
                names = (model, f"{model}:latest") if latest else (f"{model}:{manifest.name}",)
                yield Place(names[0], blob, "ollama", also=names[1:])


def _blob(folder: Path, manifest: Path) -> Path | None:
    """The GGUF file of a manifest of Ollama's; None where it has none, or needs more than that."""
    layers = _small_object(manifest).get("layers")
    kinds = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    digests = [str(layer.get("digest")) for layer in kinds if layer.get("mediaType") == _MODEL]
    if len(digests) != 1 or any(layer.get("mediaType") == _ADAPTER for layer in kinds):
        return None
    return folder / "blobs" / digests[0].replace(":", "-") if _DIGEST.fullmatch(digests[0]) else None


def _of_lm_studio() -> Iterator[Place]:
    home = Path.home()
    homes = [home / ".lmstudio", home / ".cache" / "lm-studio"]
    pointer = home / ".lmstudio-home-pointer"
    if pointer.is_file() and pointer.stat().st_size < _MOST_BYTES:
        homes.insert(0, Path(pointer.read_text("utf-8", "replace").strip()))
    chosen = [_small_object(folder / "settings.json").get("downloadsFolder") for folder in homes]
    folders = [Path(folder) for folder in chosen if isinstance(folder, str)] + [folder / "models" for folder in homes]
    for folder in dict.fromkeys(folders):
        for repository in sorted(folder.glob("*/*")):  # PUBLISHER/REPOSITORY
            hub_id = f"{repository.parent.name}/{repository.name}"
            for parts in gguf_models(path.name for path in repository.glob(f"*{GGUF}")):
                yield Place(stem_of(parts[0]), repository / parts[0], "lm-studio", hub_id)


def _small_object(path: Path) -> dict[str, Any]:
    """An object of JSON that another program wrote; empty where it is none."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
