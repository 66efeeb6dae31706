"""Which models there are on this machine, with what they are and need, as if nothing were loaded yet.

Looking takes a while, as every model's files are opened; what was found of a file holds until the file changes.

A plan counts the process it is made in. While a model is loaded, that process is larger than the one that would load
another after it, by what the model takes; plans are corrected by as much."""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.server.room import with_room
from edgeinfer.errors import EdgeInferError

# What a model is for, by which the window suggests what to ask it.
Kind = Literal["stories", "code", "chat", "base"]
_STORIES = re.compile(r"tales|stor(?:y|ies)", re.IGNORECASE)
_CODE = re.compile(r"code|coding|devstral|starcoder", re.IGNORECASE)
Source = Literal["built-in", "bundle", "gguf", "hub", "converted", "imported"]

# How the window names the model that needs no name.
BUILT_IN = "built-in"
_GGUF = "*.gguf"
# The first part of a GGUF model in several files stands for all.
_OTHER_PART = "*-of-[0-9][0-9][0-9][0-9][0-9].gguf"
_FIRST_PART = "*-00001-of-[0-9][0-9][0-9][0-9][0-9].gguf"


@dataclass(frozen=True)
class ListedModel:
    """A model that could be loaded, or could not and why.

    Attributes:
        id: what loads it.
        place: where it comes from, of models that others have the name of.
        bytes: of its files.
        context: tokens it can hold at most.
        planned_bytes: what it takes with the options asked about and no budget.
        minimum_bytes: the smallest budget it fits.
        error: why it cannot be used; the rest is unknown then.
    """

    id: str
    name: str
    source: Source
    place: str = ""
    bytes: int = 0
    parameters: int = 0
    bits_per_weight: float = 0.0
    context: int = 0
    planned_bytes: int = 0
    minimum_bytes: int = 0
    error: str | None = None


def model_of(id: str | None) -> str | None:
    """What `edgeinfer.load` takes for an id."""
    return None if id == BUILT_IN else id


def canonical(model: str | None) -> str | None:
    """The id under which the library lists a model that a name stands for; the name itself, where there is no other."""
    with contextlib.suppress(EdgeInferError):
        path = hub.local(model)
        if model is not None and path is not None and (path.is_file() or path.is_relative_to(hub.models_folder())):
            return str(path)
    return model


def kind_of(facts: edgeinfer.ModelFacts) -> Kind:
    """What a model is for: by its name, as Qwen's chat models have the tokens of a coding model too, and by whether it
    was made for conversations."""
    if _STORIES.search(facts.name) or facts.name == hub.BUILTIN:
        return "stories"
    if not facts.chats:
        return "base"
    return "code" if _CODE.search(facts.name) else "chat"


def file_of(model: str | None) -> str:
    """What tells a model from others of its name: its file or folder, or the bits of a conversion."""
    path = Path(model or "")
    converted = path.parent.parent == hub.models_folder() and re.match(r"(\d+)-bit-", path.name)
    return f"{converted[1]} bits" if converted else path.name


def id_of(model: str | None) -> str:
    """What the window calls a model."""
    return BUILT_IN if model is None else model


class Library:
    """The models; may be asked from any thread.

    Args:
        folders: searched for bundles and GGUF files, two levels deep.
        planner: says what they need.
    """

    def __init__(self, folders: Sequence[Path], planner: Planner) -> None:
        self._folders = tuple(folders)
        self._planner = planner
        self._lock = threading.Lock()
        self._known: dict[tuple[str, float, int | None], ListedModel] = {}

    def models(self, recent: Iterable[str] = (), context: int | None = None) -> list[ListedModel]:
        """All models, the built-in one first.

        Args:
            context: tokens to plan for; None is the model's usual.
        """
        with self._lock:
            found: dict[str, Source] = {}
            for id, source in self._find(recent):
                # A folder that is searched may hold what was downloaded; it is listed as that.
                found.setdefault(id, source)
            return _told_apart([self._describe(id, source, context) for id, source in found.items()])

    def facts(self, model: str | None) -> edgeinfer.ModelFacts | None:
        """What a model's files say of it; None where they cannot be read."""
        try:
            return edgeinfer.describe(model)
        except EdgeInferError:
            return None

    def _find(self, recent: Iterable[str]) -> Iterator[tuple[str, Source]]:
        yield BUILT_IN, "built-in"
        for converted in hub.converted_models():
            yield str(converted.path), "converted" if converted.source.directory is None else "imported"
        for folder in self._folders:
            for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
                # A bundle's own drafter is no model to talk to.
                if hub.is_bundle(path) and not hub.is_bundle(path.parent):
                    yield str(path), "bundle"
                elif _is_gguf(path):
                    yield str(path), "gguf"
        for place in hub.places():
            if place.origin == "folder":
                yield str(place.path), "gguf" if place.path.is_file() else "bundle"
        for id in hub.cached():
            yield id, "hub"
        for id in recent:
            if Path(id).exists():
                yield id, "gguf" if Path(id).is_file() else "bundle"

    def _describe(self, id: str, source: Source, context: int | None) -> ListedModel:
        key = id, _changed(id), context
        if key not in self._known:
            self._known[key] = self._look(id, source, context)
        return self._known[key]

    def _look(self, id: str, source: Source, context: int | None) -> ListedModel:
        name = hub.shown_name(model_of(id))
        try:
            facts = edgeinfer.describe(model_of(id))
            wanted = None if context is None else min(context, facts.context)
            plan = self._planner.plan(model_of(id), context=wanted)
        except EdgeInferError as error:
            return ListedModel(id, name, source, error=str(error))
        return ListedModel(
            id=id,
            name=name,
            source=source,
            bytes=facts.bytes,
            parameters=facts.parameters,
            bits_per_weight=facts.bits_per_weight,
            context=facts.context,
            planned_bytes=plan["planned_bytes"],
            minimum_bytes=plan["minimum_bytes"],
        )


def _told_apart(models: Sequence[ListedModel]) -> list[ListedModel]:
    """The models, those of one name with where they come from."""
    counts = Counter(model.name for model in models)
    return [
        replace(model, place=_place(model)) if counts[model.name] > 1 and model.source != "built-in" else model
        for model in models
    ]


def _place(model: ListedModel) -> str:
    """Where a person finds a model: its file or folder, or what it was converted of."""
    sources = {str(converted.path): converted.source.name for converted in hub.converted_models()}
    place = sources.get(model.id, model.id)
    return place.replace(str(Path.home()), "~", 1) if place.startswith(str(Path.home())) else place


def _is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF model: the whole or the first part of one, and not a bundle's own."""
    first = path.match(_FIRST_PART) or not path.match(_OTHER_PART)
    return path.match(_GGUF) and first and not hub.is_bundle(path.parent)


def _changed(id: str) -> float:
    """When the files of a path were last changed; of what is no path, never."""
    path = Path(id)
    try:
        files = [path, *path.glob("*")] if path.is_dir() else [path]
        return max(file.stat().st_mtime for file in files)
    except OSError:
        return 0.0


# The terms of the process around a model.
_PROCESS = ("interpreter", "libraries")
# Budgets that a plan names besides its minimum, or None.
_BOUNDS = ("speculation_bytes", "best_speed_bytes")
# What a model leaves in the heap when it is freed: 5 MB, measured over loads of the built-in one.
_LEFT_BYTES = 6_000_000


class Planner:
    """Makes plans; may be called from any thread.

    Args:
        options: fields of LoadConfig that hold for every model.
        parallel: replies that take turns.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, parallel: int = 1) -> None:
        self._parallel = parallel
        self._options = dict(options or {})
        self._lock = threading.Lock()
        self._empty: dict[str, int] | None = None

    def measure(self) -> None:
        """Measures the process; to be called before a model is loaded."""
        with self._lock:
            if self._empty is None:
                # Of these terms all plans say the same, and of plans with few choices they say it at once.
                terms = edgeinfer.plan(None, context=64, speculation="off").terms
                self._empty = {name: terms.get(name, 0) for name in _PROCESS}

    def loaded(self, plan: edgeinfer.MemoryPlan) -> None:
        """Takes over what the process was when a model was loaded into it, and what it will be when that is gone."""
        with self._lock:
            self._empty = {name: plan.terms.get(name, 0) for name in _PROCESS}
            self._empty["interpreter"] += _LEFT_BYTES

    def plan(self, model: str | None, memory: int | None = None, **options: Any) -> dict[str, Any]:
        """The JSON object of a plan.

        Args:
            memory: budget in bytes.
            options: fields of LoadConfig; those that are None are left open.
        """
        given = self._options | {name: value for name, value in options.items() if value is not None}
        with self._lock:
            if memory is not None:
                _, counted = self._excess(edgeinfer.plan(model, **given))
                # No more than the machine has, which a plan refuses.
                given["memory"] = max(memory, min(memory + counted, psutil.virtual_memory().total))
            alone = edgeinfer.plan(model, **given)
            # As the host would load it; where memory is short it makes do without what others need.
            roomy = edgeinfer.plan(model, **with_room(model, given, self._parallel, alone))
            data = roomy.to_dict() | {"alternatives": [way.to_dict() for way in alone.useful_alternatives]}
            told = alone.to_dict()
            data |= {name: told[name] for name in ("minimum_bytes", *_BOUNDS)}
            return _corrected(data, *self._excess(roomy), memory)

    def _excess(self, plan: edgeinfer.MemoryPlan) -> tuple[dict[str, int], int]:
        """Bytes by which the process is larger than without a model, by term; and those of them that count."""
        empty = self._empty or {}
        excess = {name: max(0, plan.terms.get(name, 0) - empty.get(name, plan.terms.get(name, 0))) for name in _PROCESS}
        return excess, sum(size for name, size in excess.items() if name in _counted(plan.counted))


def _counted(kind: str) -> tuple[str, ...]:
    return _PROCESS if kind == "resident" else ("interpreter",)


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
