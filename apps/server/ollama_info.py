"""What Ollama tells beside replies: the models of this machine, which is loaded, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgeinfer
from edgeinfer import ModelFacts
from edgeinfer.apps.server.bodies import read_json
from edgeinfer.apps.server.completions import completion_endpoint
from edgeinfer.apps.server.named_models import NamedModel
from edgeinfer.apps.server.ollama import OLLAMA_KINDS, moment
from edgeinfer.apps.server.service import Endpoint, Service
from edgeinfer.errors import CapabilityError
from edgeinfer.openai.errors import RequestError

# Of which these endpoints follow the reference; clients refuse servers that are older than what they need.
_FOLLOWED = "0.12.6"
_FETCH = "Fetch models on the machine itself: edgeinfer pull NAME."
_KEEP = "Manage models on the machine itself: edgeinfer models."
_REFUSED = {
    "/api/pull": ("Clients cannot have models fetched.", _FETCH),
    "/api/push": ("Models are not published from here.", _KEEP),
    "/api/create": ("Clients cannot make models.", _KEEP),
    "/api/copy": ("Clients cannot copy models.", _KEEP),
    "/api/delete": ("Clients cannot delete models.", _KEEP),
    "/api/embed": ("Models here generate text and have no embeddings.", "Use another server."),
    "/api/embeddings": ("Models here generate text and have no embeddings.", "Use another server."),
}
# Far enough for clients to take it for never.
_NEVER_S = 100 * 365 * 86400


class OllamaEndpoints:
    """The endpoints.

    Args:
        service: what is told of.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        completions = {path: completion_endpoint(service, kind) for path, kind in OLLAMA_KINDS.items()}
        refused = dict.fromkeys((path for path in _REFUSED if path != "/api/delete"), self.refuse)
        self.asked: Mapping[str, Endpoint] = {
            "/api/tags": self.tags,
            "/api/ps": self.running,
            "/api/version": self.version,
        }
        self.posted: Mapping[str, Endpoint] = {"/api/show": self.show, **completions, **refused}
        self.deleted: Mapping[str, Endpoint] = {"/api/delete": self.refuse}

    async def version(self, _: Request) -> Response:
        """Tells which version of Ollama's API this is, and our own."""
        return JSONResponse({"version": _FOLLOWED, "edgeinfer": edgeinfer.__version__})

    async def tags(self, _: Request) -> Response:
        """Lists the models that requests may name."""
        return JSONResponse({"models": [_listed(model) for model in await self._service.models()]})

    async def running(self, _: Request) -> Response:
        """Tells which model is loaded, and until when."""
        service = self._service
        loaded = await service.loaded()
        if loaded is None or not service.model().in_memory:
            return JSONResponse({"models": []})
        left = None if service.switch is None else service.switch.expires_in()
        model, planned = service.model(), service.model().plan.planned_bytes
        told = {
            **{name: value for name, value in _listed(loaded).items() if name not in ("modified_at", "capabilities")},
            "size": planned,
            "size_vram": 0,
            "context_length": model.context,
            "expires_at": moment(time.time() + (_NEVER_S if left is None else left)),
        }
        return JSONResponse({"models": [told]})

    async def show(self, request: Request) -> Response:
        """Describes a model of this machine without loading it."""
        service = self._service
        body = await read_json(request, service.security)
        name = body.get("model") or body.get("name")
        if not isinstance(name, str):
            raise RequestError("model is missing.", "Name one that GET /api/tags lists.", param="model")
        found = await service.find(name)
        model = service.model() if found == await service.loaded() else None
        facts, family = found.facts, found.facts.architecture
        sampling = "\n".join(f"{name} {value}" for name, value in facts.sampling.items())
        described = {
            "modelfile": f"FROM {found.name}\n",
            "parameters": sampling,
            "template": (model.chat_template_text or "") if model is not None else "",
            "details": _details(facts),
            "model_info": {
                "general.architecture": family,
                "general.basename": facts.name,
                "general.parameter_count": facts.parameters,
                f"{family}.context_length": facts.context,
                f"{family}.embedding_length": facts.width,
                f"{family}.vocab_size": facts.vocabulary,
            },
            "capabilities": _capabilities(facts),
            "modified_at": moment(found.modified),
        }
        return JSONResponse(described)

    async def refuse(self, request: Request) -> Response:
        """Says what clients cannot do here."""
        message, hint = _REFUSED[request.url.path]
        raise CapabilityError(message, hint)


def _listed(model: NamedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": moment(model.modified),
        "size": model.facts.bytes,
        "digest": model.digest,
        "details": _details(model.facts),
        "capabilities": _capabilities(model.facts),
    }


def _capabilities(facts: ModelFacts) -> list[str]:
    # Functions are told to every model that takes messages, in its own way or in words.
    return ["completion", "tools"] if facts.chats else ["completion"]


def _details(facts: ModelFacts) -> dict[str, Any]:
    count = facts.parameters
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    return {
        "parent_model": "",
        "format": "gguf" if facts.backend == "llamacpp" else facts.backend,
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": size,
        "quantization_level": f"{facts.bits_per_weight:.1f} bits",
        "context_length": facts.context,
        "embedding_length": facts.width,
    }
