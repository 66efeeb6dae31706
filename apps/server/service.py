"""What every endpoint is given, and the model it may use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer import Model
from edgeinfer.apps.server.host import HostState, ModelHost
from edgeinfer.apps.server.metrics import Load, Metrics
from edgeinfer.apps.server.security import Security
from edgeinfer.openai.errors import RequestError, unknown_model

__all__ = ["Service"]

# Bytes of a request besides its prompts, and for each token of the context: the longest tokens of most vocabularies
# have 128, and JSON may write a byte as several, or a request have several prompts.
_OTHER_FIELDS = 1000**2
_BYTES_A_TOKEN = 512


@dataclass(frozen=True)
class Service:
    """A model host as it is served.

    Attributes:
        host: runs the model.
        security: limits of requests.
        aliases: names, beside its own, by which requests may call the model.
        metrics: what is counted.
        compiling: requests whose schemas and grammars are looked at, at once; the rest must not wait for them.
    """

    host: ModelHost
    security: Security
    aliases: tuple[str, ...] = ()
    metrics: Metrics = field(default_factory=Metrics)
    compiling: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))

    def model(self) -> Model:
        """The loaded model.

        Raises:
            RequestError: there is none now.
        """
        if self.host.state.status != "ready" or self.host.model is None:
            raise _unavailable(self.host.state)
        return self.host.model

    def most_body(self) -> int | None:
        """Bytes of a request that the loaded model could possibly answer; None where its context sets no limit."""
        model = self.host.model if self.host.state.status == "ready" else None
        if model is None or model.plan.overflow != "stop":
            return None
        return _OTHER_FIELDS + _BYTES_A_TOKEN * model.context

    def model_of(self, body: Mapping[str, Any]) -> Model:
        """The model that a request names, or the loaded one if it names none.

        Raises:
            RequestError: it is another than the loaded one, or there is none now.
        """
        model, name = self.model(), body.get("model")
        if name is not None and not isinstance(name, str):
            raise RequestError("model is not a text.", "GET /v1/models lists what is served.", param="model")
        # As it was asked for on the command line will do too, though a path is not listed.
        if name and name not in (*self.names(model), self.host.state.model):
            raise unknown_model(name)
        return model

    def names(self, model: Model) -> list[str]:
        """Returns the names of the model, its own first."""
        return list(dict.fromkeys([model.info.name, *self.aliases]))

    def load(self) -> Load:
        """Returns what the server is doing now."""
        model = self.host.model if self.host.state.status == "ready" else None
        if model is None:
            return Load(self.host.running, self.host.waiting)
        return Load(self.host.running, self.host.waiting, model.context, model.plan)


_HINTS = {
    "empty": ("No model is loaded.", "Load one first.", "no_model"),
    "loading": ("The model is loading.", "Try again in a moment; GET /health tells how far it is.", "model_loading"),
    "failed": ("The model could not be loaded.", "GET /health tells why.", "model_failed"),
}


def _unavailable(state: HostState) -> RequestError:
    message, hint, code = _HINTS.get(state.status, _HINTS["loading"])
    return RequestError(message, hint, status=503, code=code)
