"""Which models there are on this machine, with what they are and need; knows nothing of loading them.

Looking takes a while, as every model's files are opened; what was found of a file holds until the file changes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.desktop.plans import Planner
from edgeinfer.errors import EdgeInferError

__all__ = ["BUILT_IN", "Library", "ListedModel", "Source", "model_of"]

Source = Literal["built-in", "bundle", "gguf", "hub"]

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
        bytes: of its files.
        context: tokens it can hold at most.
        planned_bytes: what it takes with the options asked about and no budget.
        minimum_bytes: the smallest budget it fits.
        error: why it cannot be used; the rest is unknown then.
    """

    id: str
    name: str
    source: Source
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
            recent: paths and hub ids that were used lately.
            context: tokens to plan for; None is the model's usual.
        """
        with self._lock:
            found = dict(self._find(recent))
            return [self._describe(id, source, context) for id, source in found.items()]

    def sampling(self, model: str | None) -> dict[str, object]:
        """Generation options that a model's makers recommend; none where it cannot be read."""
        try:
            return dict(edgeinfer.describe(model).sampling)
        except EdgeInferError:
            return {}

    def _find(self, recent: Iterable[str]) -> Iterator[tuple[str, Source]]:
        yield BUILT_IN, "built-in"
        for folder in self._folders:
            for path in sorted([*folder.glob("*"), *folder.glob("*/*")]):
                # A bundle's own drafter is no model to talk to.
                if hub.is_bundle(path) and not hub.is_bundle(path.parent):
                    yield str(path), "bundle"
                elif _is_gguf(path):
                    yield str(path), "gguf"
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
        name = Path(id).name
        try:
            facts = edgeinfer.describe(model_of(id))
            name = facts.name
            wanted = None if context is None else min(context, facts.context)
            plan = self._planner.plan(model_of(id), context=wanted)
        except EdgeInferError as error:
            return ListedModel(id, name, source, error=str(error))
        return ListedModel(
            id=id,
            name=facts.name,
            source=source,
            bytes=facts.bytes,
            parameters=facts.parameters,
            bits_per_weight=facts.bits_per_weight,
            context=facts.context,
            planned_bytes=plan["planned_bytes"],
            minimum_bytes=plan["minimum_bytes"],
        )


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
