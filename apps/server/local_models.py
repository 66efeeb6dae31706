"""The models on this machine that requests may name. What is not listed cannot be named, and nothing is fetched."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import edgeinfer
from edgeinfer import ModelFacts, hub
from edgeinfer.errors import EdgeInferError, HubError

__all__ = ["LocalModel", "LocalModels", "plain_name"]

# For which a listing is good: clients ask for it with every window that they open.
_FRESH_S = 2.0
_LATEST = ":latest"


@dataclass(frozen=True)
class LocalModel:
    """A model that a request may name.

    Attributes:
        name: by which it is listed.
        source: as `edgeinfer.load` takes it; None is the built-in one.
        path: of its files.
        facts: what its files say of it.
        modified: when it came here, by the clock's seconds.
        digest: tells it from others, 64 hexadecimal digits.
    """

    name: str
    source: str | None
    path: Path
    facts: ModelFacts
    modified: float
    digest: str


class LocalModels:
    """The models of this machine. Safe from any thread; listing reads files.

    Args:
        source: of the model that is served, which is listed wherever it lies, as `edgeinfer.load` takes it.
    """

    def __init__(self, source: str | None = None) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._listed: list[LocalModel] = []
        self._last: LocalModel | None = None
        self._until = 0.0

    def listed(self) -> list[LocalModel]:
        """Returns all models that can be loaded, the served one first."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._listed = list(_found(self._source))
                self._until = time.monotonic() + _FRESH_S
            return self._listed

    def of(self, source: str | None) -> LocalModel:
        """Returns the model of a source, listed or not; of the one that was asked for last no file is read again.

        Raises:
            EdgeInferError: it is not on this machine, or damaged.
        """
        last = self._last
        if last is None or last.source != source:
            last = self._last = _model(source)
        return last

    def find(self, name: str) -> LocalModel | None:
        """Returns the model of a name, by which it is listed or loaded; None where there is none."""
        wanted = plain_name(name)
        return next((model for model in self.listed() if wanted in _names(model)), None)


def plain_name(name: str) -> str:
    """A name as names are compared: Ollama's clients add a tag to those that have none, and take no notice of case."""
    return name.strip().removesuffix(_LATEST).casefold()


def _names(model: LocalModel) -> set[str]:
    return {plain_name(name) for name in (model.name, model.source) if name}


def _found(served: str | None) -> Iterable[LocalModel]:
    for source in dict.fromkeys([served, None, *hub.cached()]):
        with contextlib.suppress(EdgeInferError):  # what is damaged cannot be loaded either
            yield _model(source)


def _model(source: str | None) -> LocalModel:
    facts, path = edgeinfer.describe(source), hub.local(source)
    if path is None:
        raise HubError(f"{source} is not on this machine.", f"Fetch it first: edgeinfer pull {source}")
    return LocalModel(_name(source, facts), source, path, facts, path.stat().st_mtime, _digest(path, facts))


def _name(source: str | None, facts: ModelFacts) -> str:
    """A hub id as it is; of paths the model's own name, or the file's."""
    if source is None or Path(source).exists():
        return Path(source).stem if source is not None and source.endswith(".gguf") else facts.name
    return source


def _digest(path: Path, facts: ModelFacts) -> str:
    """Of what tells the files from others; reading all of them for it would take too long."""
    return hashlib.sha256(f"{path} {facts.bytes} {path.stat().st_mtime_ns}".encode()).hexdigest()
