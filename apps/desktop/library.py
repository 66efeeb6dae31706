"""Models that the window lists: those on this machine with what they need, and those to download or import.

Every model's files are opened once and again when they change. A plan counts the process in which it is made; while a
model is loaded, plans are corrected by the memory that it takes.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.server.host import with_room
from edgeinfer.core.errors import EdgeInferError, ModelError
from edgeinfer.hub.catalog_models import gguf_memory
from edgeinfer.hub.ids import first_part, is_gguf_model

# The purpose of a model, for suggestions in the window.
Kind = Literal["stories", "code", "chat", "base"]
_STORIES = re.compile(r"tales|stor(?:y|ies)", re.IGNORECASE)
_CODE = re.compile(r"code|coding|devstral|starcoder", re.IGNORECASE)
Source = Literal["built-in", "bundle", "gguf", "hub", "converted", "imported"]

# The id of the built-in model.
BUILT_IN = "built-in"
_GGUF_FILES = "*.gguf"
# A GGUF model in several files is listed by its first part.
_OTHER_PART = "*-of-[0-9][0-9][0-9][0-9][0-9].gguf"
_FIRST_PART = "*-00001-of-[0-9][0-9][0-9][0-9][0-9].gguf"


@dataclass(frozen=True)
class ListedModel:
    """A model that can be loaded, or the reason why not."""

    id: str  # loads it
    name: str
    source: Source
    place: str = ""  # where it comes from, if several models have its name
    bytes: int = 0  # of its files
    parameters: int = 0
    bits_per_weight: float = 0.0
    context: int = 0  # the largest in tokens
    planned_bytes: int = 0  # without a budget
    minimum_bytes: int = 0  # the smallest budget that fits
    error: str | None = None  # why it cannot be used; other facts are then unknown


def model_of(id: str | None) -> str | None:
    """The argument of `edgeinfer.load` for an id."""
    return None if id == BUILT_IN else id


def canonical(model: str | None) -> str | None:
    """The id under which the library lists a model; its name if there is no other."""
    with contextlib.suppress(EdgeInferError):
        path = hub.find_model(model).here
        if model is not None and path is not None and (path.is_file() or path.is_relative_to(hub.models_folder())):
            return str(path)
    return model


def kind_of(facts: edgeinfer.ModelFacts) -> Kind:
    """The kind of a model, by its name (chat models too may have the tokens of coding models) and whether it chats."""
    if _STORIES.search(facts.name) or facts.name == hub.BUILTIN:
        return "stories"
    if not facts.chats:
        return "base"
    return "code" if _CODE.search(facts.name) else "chat"


def file_of(model: str | None) -> str:
    """Tell a model from others of its name: its file or folder, or the bits of a conversion."""
    path = Path(model or "")
    converted = path.parent.parent == hub.models_folder() and re.match(r"(\d+)-bit-|auto-", path.name)
    if not converted:
        return path.name
    return f"{converted[1]} bits" if converted[1] else "the bits that it needs"


def id_of(model: str | None) -> str:
    return BUILT_IN if model is None else model


class Library:
    """The models on this machine, in folders searched two levels deep; may be used from any thread."""

    def __init__(self, folders: Sequence[Path], planner: Planner) -> None:
        self._folders = tuple(folders)
        self._planner = planner
        self._lock = threading.Lock()
        self._known: dict[tuple[str, float, Path | None, int | None], ListedModel] = {}

    def models(self, recent: Iterable[str] = (), context: int | None = None) -> list[ListedModel]:
        """List all models, the built-in one first, planned for `context` tokens or each model's default."""
        with self._lock:
            found: dict[str, tuple[Source, Path | None]] = {}
            for id, source in self._find(recent):
                runs = _runs(id)
                # A searched folder may contain a download, which is listed as such. What was prepared of a GGUF file
                # stands for it.
                if id not in found and str(runs) not in found:
                    found[id] = source, runs
            models = []
            for id, (source, runs) in found.items():
                key = id, _changed(id), runs, context
                if key not in self._known:
                    self._known[key] = self._describe(id, source, context, prepared=runs is not None)
                models.append(self._known[key])
        counts = Counter(model.name for model in models)
        # Models that share a name are shown with their origin.
        return [
            replace(model, place=_place(model)) if counts[model.name] > 1 and model.source != "built-in" else model
            for model in models
        ]

    def facts(self, model: str | None) -> edgeinfer.ModelFacts | None:
        """Describe a model; None if its files cannot be read."""
        try:
            return edgeinfer.describe(model)
        except EdgeInferError:
            return None

    def _find(self, recent: Iterable[str]) -> Iterator[tuple[str, Source]]:
        yield BUILT_IN, "built-in"
        for converted in hub.converted_models():
            yield str(converted.path), "imported" if converted.source.path else "converted"
        for folder in self._folders:
            for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
                # A bundle's own drafter is not listed.
                if hub.is_bundle(path) and not hub.is_bundle(path.parent):
                    yield str(path), "bundle"
                elif _is_gguf(path):
                    yield str(path), "gguf"
        for place in sorted(hub.places(), key=lambda place: place.origin == "hub"):
            if place.origin == "hub":
                yield str(place.path if place.path.is_file() else place.hub_id), "hub"
            elif place.origin in ("folder", "ollama", "lm-studio"):
                yield str(place.path), "gguf" if place.path.is_file() else "bundle"
        for id in recent:
            if Path(id).exists():
                yield id, "gguf" if Path(id).is_file() else "bundle"

    def _describe(self, id: str, source: Source, context: int | None, *, prepared: bool) -> ListedModel:
        name = hub.shown_name(model_of(id))
        try:
            facts = edgeinfer.describe(model_of(id))
            wanted = None if context is None else min(context, facts.context)
            if prepared:
                plan = self._planner.plan(model_of(id), context=wanted)
            else:  # planning would prepare it
                plan = dict.fromkeys(("planned_bytes", "minimum_bytes"), gguf_memory(facts.bytes))
        except EdgeInferError as error:
            return ListedModel(id, name, source, error=str(error))
        return ListedModel(
            id,
            name,
            source,
            **{name: getattr(facts, name) for name in ("bytes", "parameters", "bits_per_weight", "context")},
            **{name: plan[name] for name in ("planned_bytes", "minimum_bytes")},
        )


def _runs(id: str) -> Path | None:
    """What is loaded for a model; None for a GGUF file that was not prepared for the native kernel yet."""
    with contextlib.suppress(EdgeInferError):
        return hub.find_model(model_of(id)).path
    return Path(id)


def _place(model: ListedModel) -> str:
    """The file or folder of a model, or the source of a conversion."""
    sources = {str(converted.path): converted.source.name for converted in hub.converted_models()}
    place = sources.get(model.id, model.id)
    return place.replace(str(Path.home()), "~", 1) if place.startswith(str(Path.home())) else place


def _is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF model or the first part of one, outside of a bundle."""
    first = path.match(_FIRST_PART) or not path.match(_OTHER_PART)
    return path.match(_GGUF_FILES) and first and not hub.is_bundle(path.parent)


def _changed(id: str) -> float:
    """The last change of a path's files; 0 for a path that does not exist."""
    path = Path(id)
    try:
        files = [path, *path.glob("*")] if path.is_dir() else [path]
        return max(file.stat().st_mtime for file in files)
    except OSError:
        return 0.0


# Terms of a plan about the process, not the model.
_PROCESS = ("interpreter", "libraries")
# Further budgets of a plan, each may be None.
_BOUNDS = ("speculation_bytes", "best_speed_bytes")
# Heap left after a model is freed: 5 MB, measured over loads of the built-in model.
_LEFT_BYTES = 6_000_000


class Planner:
    """Makes plans with LoadOptions fields for every model; may be used from any thread."""

    def __init__(self, options: Mapping[str, Any] | None = None, parallel: int = 1) -> None:
        self._parallel = parallel
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._empty: dict[str, int] | None = None

    def measure(self) -> None:
        """Measure the process before a model is loaded."""
        with self._lock:
            if self._empty is None:
                # These terms are the same in all plans; one with few choices is quick.
                terms = edgeinfer.plan(None, context=64, speculation="off").terms
                self._empty = {name: terms.get(name, 0) for name in _PROCESS}

    def loaded(self, plan: edgeinfer.MemoryPlan) -> None:
        """Record the process's size when a model was loaded, and estimate it for when that is freed."""
        with self._lock:
            self._empty = {name: plan.terms.get(name, 0) for name in _PROCESS}
            self._empty["interpreter"] += _LEFT_BYTES

    def plan(self, model: str | None, memory: int | None = None, **options: Any) -> dict[str, Any]:
        """Make a plan as JSON, within a budget in bytes; LoadOptions fields that are None are the defaults."""
        given = self._options | {name: value for name, value in options.items() if value is not None}
        with self._lock:
            if memory is not None:
                _, counted = self._excess(edgeinfer.plan(model, **given))
                # A plan refuses more than the machine has.
                given["memory"] = max(memory, min(memory + counted, psutil.virtual_memory().total))
            alone = edgeinfer.plan(model, **given)
            # As the host would load it, without memory for other replies if it is short.
            roomy = edgeinfer.plan(model, **with_room(model, given, self._parallel, alone))
            data = roomy.to_dict() | {"alternatives": [way.to_dict() for way in alone.useful_alternatives]}
            described = alone.to_dict()
            data |= {name: described[name] for name in ("minimum_bytes", *_BOUNDS)}
            return _corrected(data, *self._excess(roomy), memory)

    def _excess(self, plan: edgeinfer.MemoryPlan) -> tuple[dict[str, int], int]:
        """Bytes by which the process is larger than without a model, by term, and their counted part."""
        empty = self._empty or {}
        excess = {name: max(0, plan.terms.get(name, 0) - empty.get(name, plan.terms.get(name, 0))) for name in _PROCESS}
        counted = _PROCESS if plan.counted == "resident" else ("interpreter",)
        return excess, sum(excess[name] for name in counted)


def _corrected(data: dict[str, Any], excess: Mapping[str, int], counted: int, memory: int | None) -> dict[str, Any]:
    data["terms"] = {name: size - excess.get(name, 0) for name, size in data["terms"].items()}
    data["anonymous_bytes"] -= excess["interpreter"]
    data["budget_bytes"] = memory
    for part in (data, *data["alternatives"]):
        part["planned_bytes"] -= counted
        part["fits"] = memory is None or part["planned_bytes"] <= memory
    for name in ("minimum_bytes", *_BOUNDS):
        data[name] = None if data[name] is None else data[name] - counted
    return data


Fit = Literal["yes", "tight", "no"]

# The share of memory that a model may take; the rest is for the system and other programs.
_ROOM_SHARE = 0.75
# Beyond this share of free memory, other programs slow down.
_EASY_SHARE = 0.6
_RECOMMENDED = 3
# A first impression should not take an hour.
_MOST_DOWNLOAD = 9_000_000_000
_CHAT = "chat"
_MOST_ENTRIES = 500
_GGUF = ".gguf"


@dataclass(frozen=True)
class Room:
    """Memory and disk space for models on this machine."""

    disk_bytes: int
    memory_bytes: int  # the most that a model may take
    easy_bytes: int  # what a model may take without slowing other programs down
    gguf: bool  # whether GGUF files run here, on the native kernel or llama.cpp

    @classmethod
    def here(cls) -> Room:
        memory, folder = psutil.virtual_memory(), hub.models_folder()
        while not folder.exists():
            folder = folder.parent
        return cls(
            shutil.disk_usage(folder).free,
            int(memory.total * _ROOM_SHARE),
            int(memory.available * _EASY_SHARE),
            hub.runs_gguf(),
        )

    def fit(self, memory: int) -> Fit:
        """How well a model of this size fits."""
        return "no" if memory > self.memory_bytes else "yes" if memory <= self.easy_bytes else "tight"


def catalog_view() -> dict[str, Any]:
    """The catalog, with up to three recommendations for this machine."""
    room = Room.here()
    names = ("name", "repo", "purpose", "parameters", "licence", "languages", "context", "memory", "download", "disk")
    models = [
        {name: getattr(model, name) for name in names}
        | {"gguf": model.is_gguf, "fit": room.fit(model.memory), "path": _path(model.name)}
        for model in edgeinfer.catalog()
        if model.kind == "text"
    ]
    return {"models": models, "recommended": _recommended(models, room), "room": asdict(room)}


def search_view(text: str) -> dict[str, Any]:
    """Models of the hub, found by a part of the name."""
    return {"models": [asdict(model) | {"path": _path(model.name)} for model in edgeinfer.search_hub(text)]}


def offers_view(name: str) -> dict[str, Any]:
    """The files of a GGUF repository."""
    room = Room.here()
    found = [
        asdict(offer) | {"fit": room.fit(offer.memory), "path": _path(offer.name)} for offer in edgeinfer.offers(name)
    ]
    return {"offers": found, "room": asdict(room)}


def importable(path: str) -> Path:
    """Check the path of a model to import: a folder with a bundle or a checkpoint, or a GGUF file."""
    found = Path(path.strip().strip('"')).expanduser()
    if not found.is_absolute():
        raise ModelError(f"{path!r} is not a whole path.", "Give it from the beginning, such as /home/me/models/name.")
    if not found.exists():
        raise ModelError(f"There is no file or folder {found}.", "Check the path.")
    if found.is_file():
        if found.suffix.lower() != _GGUF:
            raise ModelError(f"{found.name} is not a GGUF file.", "Choose a .gguf file, or the folder of a checkpoint.")
        return found
    if not hub.is_bundle(found) and not hub.is_checkpoint(found):
        hint = "Choose the folder that has config.json and model.safetensors, or a .gguf file."
        raise ModelError(f"{found} contains no model that can be imported.", hint)
    return found


def folder_view(path: str) -> dict[str, Any]:
    """List the folders and GGUF files of a folder; an empty path is the home folder."""
    folder = Path(path).expanduser() if path else Path.home()
    try:
        found = sorted(folder.resolve(strict=True).iterdir(), key=lambda entry: entry.name.lower())
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{folder} cannot be opened: {reason}.", "Choose another folder.") from error
    folder, entries = folder.resolve(), []
    for entry in found:
        kind = None if entry.name.startswith(".") else _kind(entry)
        if kind is not None:
            size = entry.stat().st_size if entry.is_file() else None
            entries.append({"name": entry.name, "path": str(entry), "kind": kind, "bytes": size})
    parent = None if folder.parent == folder else str(folder.parent)
    shown = {"path": str(folder), "name": folder.name or str(folder), "parent": parent, "model": _holds_model(folder)}
    return shown | {"entries": entries[:_MOST_ENTRIES], "more": max(0, len(entries) - _MOST_ENTRIES)}


def _kind(entry: Path) -> Literal["model", "folder"] | None:
    try:
        if entry.is_dir():
            return "model" if _holds_model(entry) else "folder"
        return "model" if is_gguf_model(entry.name) and first_part(entry.name) else None
    except OSError:  # not readable
        return None


def _holds_model(folder: Path) -> bool:
    return hub.is_bundle(folder) or hub.is_checkpoint(folder)


def _path(name: str) -> str | None:
    """The path of a model, if it is on this machine."""
    with contextlib.suppress(EdgeInferError):
        found = hub.find_model(name).here
        return None if found is None else str(found)
    return None


def _recommended(models: Sequence[dict[str, Any]], room: Room) -> list[str]:
    """Recommend the largest chat model that runs well here, and up to two more, each half the size of the last."""
    fitting = [
        m for m in models if m["fit"] == "yes" and m["download"] <= _MOST_DOWNLOAD and (room.gguf or not m["gguf"])
    ]
    fitting = [m for m in fitting if m["download"] + m["disk"] <= room.disk_bytes]
    # Models for a single purpose come last.
    fitting.sort(key=lambda m: (_CHAT in m["purpose"], m["parameters"]), reverse=True)
    chosen: list[dict[str, Any]] = []
    for model in fitting:
        if not chosen or model["parameters"] <= chosen[-1]["parameters"] / 2:
            chosen.append(model)
    return [m["name"] for m in chosen[:_RECOMMENDED]]
