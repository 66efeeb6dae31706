"""What every endpoint shares: the models that requests may name, and the one that answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

import edgeinfer
from edgeinfer import Context, Model, ModelFacts, hub
from edgeinfer.apps.server.events import while_connected
from edgeinfer.apps.server.host import ModelHost, NotReadyError
from edgeinfer.apps.server.metrics import Load, Metrics
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.switching import ModelSwitch, load_refusal
from edgeinfer.core.errors import EdgeInferError, HubError, shown
from edgeinfer.openai.errors import RequestError, unknown_model
from edgeinfer.openai.prompt import PromptReplies

# Seconds for which a listing is cached: making it plans every model, and clients request it often.
_FRESH_S = 10.0
_LATEST = ":latest"


@dataclass(frozen=True)
class NamedModel:
    """A model that requests may name."""

    names: tuple[str, ...]  # under which it is listed, at least one
    source: str | None  # for `edgeinfer.load`; None is the built-in model
    path: Path
    facts: ModelFacts
    modified: float  # seconds since 1970
    digest: str  # 64 hexadecimal digits that identify it
    others: tuple[str, ...] = ()  # names that are accepted but not listed

    @property
    def name(self) -> str:
        return self.names[0]


class NamedModels:
    """The models on this machine. Only listed models can be named, and nothing is downloaded. Safe from any thread. The
    served model is always listed, by its further names too."""

    def __init__(self, source: str | None = None, aliases: tuple[str, ...] = ()) -> None:
        self._source = source
        self._aliases = aliases
        self._lock = threading.Lock()
        self._listed: list[NamedModel] = []
        self._last: NamedModel | None = None
        self._until = 0.0

    def listed(self) -> list[NamedModel]:
        """Return all models that can be loaded, the served one first."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._listed = list(self._found())
                self._until = time.monotonic() + _FRESH_S
            return self._listed

    def forget(self) -> None:
        """Make the list again when it is asked for next."""
        self._until = 0.0

    def of(self, source: str | None) -> NamedModel:
        """Return the model of a source, listed or not; the latest one is remembered."""
        last = self._last
        if last is None or last.source != source:
            listed = (model for model in self._listed if model.source == source)
            last = self._last = next(listed, None) or self._served(source)
        return last

    def find(self, name: str) -> NamedModel | None:
        """Return the model of a name, if there is one."""
        wanted = plain_name(name)
        if not wanted:
            return None
        # The catalog has short names for models of the hub.
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
            # Models that cannot run here, or are damaged, are not listed.
            if local.error is not None or local.path in paths:
                continue
            with contextlib.suppress(EdgeInferError):
                source = None if local.origin == "built-in" else str(local.path)
                others = (str(local.path), local.path.stem, *([local.hub_id] if local.hub_id else []))
                named = local.origin != "built-in" and local.name != str(local.path)
                yield _model(source, [local.name] if named else [], others)

    def _served(self, source: str | None) -> NamedModel:
        """The model of a source under its own name."""
        aliases = self._aliases if source == self._source else ()
        return _model(source, [], () if source is None else (source,), aliases)


def plain_name(name: str) -> str:
    """Normalize a name for comparison: no case, and without the tag that Ollama's clients add."""
    return name.strip().removesuffix(_LATEST).casefold()


def _model(
    source: str | None, names: Iterable[str], others: tuple[str, ...], aliases: tuple[str, ...] = ()
) -> NamedModel:
    """Describe a model under these names, or its own."""
    facts, path = edgeinfer.describe(source), hub.find_model(source).here
    if path is None:
        raise HubError(f"{source} is not on this machine yet.", f"Fetch it first: edgeinfer pull {source}")
    changed = path.stat()
    # From facts that identify the files; hashing the files would take too long.
    digest = hashlib.sha256(f"{path} {facts.bytes} {changed.st_mtime_ns}".encode()).hexdigest()
    own = tuple(dict.fromkeys([*(names or [facts.name]), *aliases]))
    return NamedModel(own, source, path, facts, changed.st_mtime, digest, (*others, facts.name))


Endpoint = Callable[[Request], Awaitable[Response]]

# Bytes of a request without its prompts, and per token of the context: the longest tokens have 128 in most
# vocabularies, JSON may escape bytes, and a request may have several prompts.
_OTHER_FIELDS = 1000**2
_BYTES_A_TOKEN = 512


@dataclass(frozen=True)
class Service:
    """A model host and everything that endpoints need."""

    host: ModelHost
    security: Security
    aliases: tuple[str, ...] = ()  # further names of the served model
    switch: ModelSwitch | None = None  # loads models that requests name; None serves only the loaded one
    local: NamedModels = field(default_factory=NamedModels)
    metrics: Metrics = field(default_factory=Metrics)
    contexts: Mapping[str, Context] = field(default_factory=dict)  # texts that requests may name
    # Check requests and tokenize their prompts; of those whose schemas are compiled one at a time, so that others need
    # not wait.
    readers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "edgeinfer-requests"))
    # By the ids of their answers, those that are made now.
    answering: WeakValueDictionary[str, PromptReplies] = field(default_factory=WeakValueDictionary)
    compiling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))

    def model(self) -> Model:
        return self.host.require_model()

    def most_body(self) -> int | None:
        """Bytes of the largest request that a model here could answer; None if no context limits it."""
        model = self.host.model if self.host.state.status == "ready" else None
        if model is None or model.plan.overflow != "stop":
            return None
        context = model.context if self.switch is None else max(model.context, self.switch.most_context)
        return _OTHER_FIELDS + _BYTES_A_TOKEN * context

    def name_contexts(self, body: MutableMapping[str, Any]) -> None:
        """Replace the names of contexts in a request by the texts."""
        names = body.get("contexts")
        if not isinstance(names, list):  # absent, or refused later for its type
            return
        for name in names:
            if not isinstance(name, str) or name not in self.contexts:
                hint = "GET /v1/contexts lists them; edgeinfer serve --context-file FILE adds one."
                raise RequestError(f"There is no context {shown(name)}.", hint, param="contexts", status=404)
        body["contexts"] = [self.contexts[name] for name in names]

    @contextlib.asynccontextmanager
    async def use(self, name: Any, receive: Receive) -> AsyncIterator[Model]:
        """Give the model that a request names, or the served one, in memory; it stays loaded for the block. `receive`
        tells when the client hangs up, as the body has been read."""
        if name is not None and not isinstance(name, str):
            raise RequestError("model is not a string.", "GET /v1/models lists what is served.", param="model")
        if self.switch is None or not self.switch.opened:
            model = self._loaded(name)
            await while_connected(receive, self._bring_back())
            yield model
            return
        source = await self._source(name or "")
        switch, entered = self.switch, False

        async def enter() -> None:
            nonlocal entered
            await switch.enter(source)
            entered = True
            await self._bring_back()

        try:
            await while_connected(receive, enter())
            yield self.model()
        finally:
            if entered:
                switch.leave()

    async def _bring_back(self) -> None:
        try:
            await self.host.bring_back()
        except NotReadyError:
            raise
        except EdgeInferError as error:
            raise load_refusal(error) from error

    def names(self, model: Model) -> list[str]:
        """The names of the loaded model, its own first."""
        served = self.switch is None or self.host.state.model == self.switch.source
        return list(dict.fromkeys([model.info.name, *(self.aliases if served else ())]))

    async def loaded(self) -> NamedModel | None:
        """Describe the loaded model."""
        if self.host.state.status != "ready":
            return None
        return await asyncio.to_thread(self.local.of, self.host.state.model)

    async def models(self) -> list[NamedModel]:
        """List the models that requests may name, the loaded one first. The first is listed while it is still loading,
        as clients remember the list."""
        first = [] if (known := await self.loaded() or await self._loading()) is None else [known]
        if self.switch is None or not (self.switch.opened or first):
            return first
        listed = await asyncio.to_thread(self.local.listed)
        return first + [model for model in listed if known is None or model.source != known.source]

    async def _loading(self) -> NamedModel | None:
        """Describe the model that is being loaded, if its files are here."""
        if self.host.state.status != "loading":
            return None
        with contextlib.suppress(EdgeInferError):
            return await asyncio.to_thread(self.local.of, self.host.state.model)
        return None

    async def find(self, name: str) -> NamedModel:
        if self.host.state.status == "loading" and not (self.switch is not None and self.switch.opened):
            listed = await self.models()
            meant = (model for model in listed if plain_name(name) in map(plain_name, [*model.names, *self.aliases]))
            found = next(meant, None)
            if found is None:
                raise unknown_model(name, [name for model in listed for name in model.names])
            return found
        if self.switch is None or not self.switch.opened:
            self._loaded(name)
            source = self.host.state.model
        else:
            source = await self._source(name)
        return await asyncio.to_thread(self.local.of, source)

    def _loaded(self, name: str | None) -> Model:
        """The loaded model, if it has this name."""
        model = self.model()
        # The argument of the command line is accepted too, though a path is not listed.
        asked_for = [self.host.state.model] if self.host.state.model else []
        if name and plain_name(name) not in map(plain_name, [*self.names(model), *model.adapters, *asked_for]):
            raise unknown_model(name, [*self.names(model), *model.adapters])
        return model

    async def _source(self, name: str) -> str | None:
        """The source of the model with this name."""
        assert self.switch is not None, "who asks has looked"
        wanted, model = plain_name(name), self.host.model
        if not wanted or wanted in map(plain_name, self.aliases):
            return self.switch.source
        if (
            model is not None
            and self.switch.is_loaded(self.host.state.model)
            and (wanted == plain_name(model.info.name) or name in model.adapters)
        ):
            return self.host.state.model
        found = await asyncio.to_thread(self.local.find, name)
        if found is None:
            listed = await asyncio.to_thread(self.local.listed)
            raise unknown_model(name, [name for model in listed for name in model.names])
        return found.source

    def load(self) -> Load:
        waiting = self.host.waiting + (0 if self.switch is None else self.switch.waiting)
        model = self.host.model if self.host.state.status == "ready" else None
        if model is None:
            return Load(self.host.running, waiting)
        return Load(self.host.running, waiting, model.context, model.plan)
