"""The models on this machine that requests may name. What is not listed cannot be named, and nothing is fetched."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import edgeinfer
from edgeinfer import ModelFacts, hub
from edgeinfer.errors import EdgeInferError, HubError

# For which a listing is good: it plans every model, and clients ask for it with each window that they open.
_FRESH_S = 10.0
_LATEST = ":latest"


@dataclass(frozen=True)
class NamedModel:
    """A model that a request may name.

    Attributes:
        names: by which it is listed, at least one.
        source: as `edgeinfer.load` takes it, so that nothing is fetched; None is the built-in one.
        path: of its files.
        facts: what those say of it.
        modified: when they came here, by the clock's seconds.
        digest: tells it from others, 64 hexadecimal digits.
        others: further names that mean it.
    """

    names: tuple[str, ...]
    source: str | None
    path: Path
    facts: ModelFacts
    modified: float
    digest: str
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


class NamedModels:
    """The models of this machine. Safe from any thread; listing reads files.

    Args:
        source: of the model that is served, which is listed wherever it lies, as `edgeinfer.load` takes it.
        aliases: names of that one beside its own.
    """

    def __init__(self, source: str | None = None, aliases: tuple[str, ...] = ()) -> None:
        self._source = source
        self._aliases = aliases
        self._lock = threading.Lock()
        self._listed: list[NamedModel] = []
        self._last: NamedModel | None = None
        self._until = 0.0

    def listed(self) -> list[NamedModel]:
        """Returns all models that can be loaded, the served one first."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._listed = list(self._found())
                self._until = time.monotonic() + _FRESH_S
            return self._listed

    def of(self, source: str | None) -> NamedModel:
        """Returns the model of a source, listed or not; of the one that was asked for last no file is read again."""
        last = self._last
        if last is None or last.source != source:
            listed = (model for model in self._listed if model.source == source)
            last = self._last = next(listed, None) or self._served(source)
        return last

    def find(self, name: str) -> NamedModel | None:
        """Returns the model of a name; None where there is none."""
        wanted = plain_name(name)
        if not wanted:
            return None
        # Short names of the catalog stand for those of the hub.
        short = hub.catalog_model(wanted)
        meant = {wanted} if short is None else {wanted, plain_name(short.repo)}
        listed = self.listed()
        by_name = (model for model in listed if not meant.isdisjoint(map(plain_name, model.names)))
        by_other = (model for model in listed if not meant.isdisjoint(map(plain_name, model.others)))
        return next(by_name, None) or next(by_other, None)

    def _found(self) -> Iterator[NamedModel]:
        paths = set[Path]()
        with contextlib.suppress(EdgeInferError):
            served = self._served(self._source)
            paths.add(served.path)
            yield served
        for local in edgeinfer.list_models():
            # What cannot run here is not offered, and what was damaged since then not either.
            if local.error is not None or local.path in paths:
                continue
            with contextlib.suppress(EdgeInferError):
                source = None if local.origin == "built-in" else str(local.path)
                others = (str(local.path), local.path.stem, *([local.hub_id] if local.hub_id else []))
                named = local.origin != "built-in" and local.name != str(local.path)
                yield _model(source, [local.name] if named else [], others)

    def _served(self, source: str | None) -> NamedModel:
        """A model that is loaded by its source, under its own name."""
        aliases = self._aliases if source == self._source else ()
        return _model(source, [], () if source is None else (source,), aliases)


def plain_name(name: str) -> str:
    """A name as names are compared: Ollama's clients add a tag to those that have none, and take no notice of case."""
    return name.strip().removesuffix(_LATEST).casefold()


def _model(
    source: str | None, names: Iterable[str], others: tuple[str, ...], aliases: tuple[str, ...] = ()
) -> NamedModel:
    """A model under these names, or its own."""
    facts, path = edgeinfer.describe(source), hub.local(source)
    if path is None:
        raise HubError(f"{source} is not on this machine yet.", f"Fetch it first: edgeinfer pull {source}")
    changed = path.stat()
    # Of what tells the files from others; reading all of them for it would take too long.
    digest = hashlib.sha256(f"{path} {facts.bytes} {changed.st_mtime_ns}".encode()).hexdigest()
    own = tuple(dict.fromkeys([*(names or [facts.name]), *aliases]))
    return NamedModel(own, source, path, facts, changed.st_mtime, digest, (*others, facts.name))
