"""Endpoints that tell of the model and the server: models, props, health, metrics, tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from edgeinfer import Model
from edgeinfer.apps.server.bodies import read_json
from edgeinfer.apps.server.metrics import CONTENT_TYPE
from edgeinfer.apps.server.service import Service
from edgeinfer.errors import CapabilityError
from edgeinfer.openai.errors import RequestError, unknown_model

__all__ = ["InfoEndpoints"]

_HIGHEST_ID = 2**31
# Contexts of the model that may be turned into tokens or text at once.
_MOST_CONTEXTS = 16
# Of a token of ordinary text.
_CHARACTERS = 4


class InfoEndpoints:
    """The endpoints.

    Args:
        service: what is told of.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())
        # By path; those of OpenAI's API are also served under /v1.
        self.asked: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/models": self.models,
            "/models/{name:path}": self.model,
            "/props": self.props,
            "/metrics": self.metrics,
        }
        self.posted: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/embeddings": self.embeddings,
            "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }

    async def models(self, _: Request) -> Response:
        """Lists the loaded model under each of its names."""
        if self._service.host.state.status != "ready" or self._service.host.model is None:
            return JSONResponse({"object": "list", "data": []})
        model = self._service.model()
        listed = [self._listed(name, model) for name in self._service.names(model)]
        return JSONResponse({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        """Describes the model of one name."""
        name, model = request.path_params["name"], self._service.model()
        if name not in self._service.names(model):
            raise unknown_model(name)
        return JSONResponse(self._listed(name, model))

    async def props(self, _: Request) -> Response:
        """Tells how the model runs."""
        service = self._service
        model = service.model()
        data = {
            "model": dataclasses.asdict(model.info),
            "model_alias": service.names(model)[-1],
            "context": model.context,
            "plan": model.plan.to_dict(),
            "total_slots": service.host.parallel,
            "default_generation_settings": {"n_ctx": model.context},
            "chat_template": model.chat_template_text,
        }
        return JSONResponse(data)

    async def health(self, _: Request) -> Response:
        """Tells whether requests will be answered, and how far loading is."""
        state = self._service.host.state
        told: dict[str, Any] = {"status": "ok" if state.status == "ready" else state.status}
        if state.status == "ready":
            return JSONResponse(told)
        if state.status == "loading":
            told |= {"stage": state.stage, "done": state.done, "total": state.total}
        reason = str(state.error) if state.error is not None else f"The model is not ready: {state.status}."
        told["error"] = {"message": reason, "type": "unavailable_error", "param": None, "code": "not_ready"}
        return JSONResponse(told, status_code=503, headers={"Retry-After": "1"})

    async def metrics(self, _: Request) -> Response:
        """Writes the figures for Prometheus."""
        text = self._service.metrics.text(self._service.load())
        return PlainTextResponse(text, headers={"Content-Type": CONTENT_TYPE})

    async def embeddings(self, request: Request) -> Response:
        """Refuses: the model generates text only."""
        body = await read_json(request, self._service.security)
        async with self._service.use(body.get("model"), request.receive) as model:
            raise CapabilityError(f"{model.info.name} generates text and has no embeddings.", "Use another model.")

    async def tokenize(self, request: Request) -> Response:
        """Tokenizes a text as llama-server does: without the begin token unless `add_special` asks for it, and with
        special tokens parsed unless `parse_special` is false."""
        body = await read_json(request, self._service.security, most=self._service.most_body())
        content, special, parse = body.get("content"), body.get("add_special", False), body.get("parse_special", True)
        if not isinstance(content, str):
            raise RequestError("content is not a text.", 'Send {"content": "..."}.', param="content")
        if not isinstance(special, bool):
            raise RequestError("add_special is not true or false.", "Leave it out.", param="add_special")
        if not isinstance(parse, bool):
            raise RequestError("parse_special is not true or false.", "Leave it out.", param="parse_special")
        if not content:
            return JSONResponse({"tokens": []})
        model = self._service.model()
        if model.tokenizes_beside:
            ids = await asyncio.to_thread(_without_begin, model, content, special, parse)
        else:
            ids = await self._service.host.ask(lambda model: _without_begin(model, content, special, parse))
        return JSONResponse({"tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        """Turns token ids into text."""
        body = await read_json(request, self._service.security, most=self._service.most_body())
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < _HIGHEST_ID for id in ids):
            raise RequestError("tokens are not token ids.", 'Send {"tokens": [1, 2, 3]}.', param="tokens")
        model = self._service.model()
        if len(ids) > _MOST_CONTEXTS * model.context:
            message = f"There are {len(ids)} token ids."
            raise RequestError(message, f"The limit is {_MOST_CONTEXTS * model.context}.", param="tokens")
        return JSONResponse({"content": await self._service.host.ask(lambda model: model.detokenize(ids))})

    def _listed(self, name: str, model: Model) -> dict[str, Any]:
        meta = {
            "n_ctx": model.context,
            "n_params": model.info.parameters,
            "bits_per_weight": model.info.bits_per_weight,
            "architecture": model.info.architecture,
        }
        return {"id": name, "object": "model", "created": self._started, "owned_by": "edgeinfer", "meta": meta}


def _without_begin(model: Model, text: str, special: bool, parse: bool) -> list[int]:
    most = _MOST_CONTEXTS * _CHARACTERS * model.context
    if len(text) > most:
        raise RequestError(f"content has {len(text)} characters.", f"The limit is {most}.", param="content")
    ids, begin = model.tokenize(text, parse_special=parse), model.begin_ids
    return ids[len(begin) :] if begin and not special and ids[: len(begin)] == begin else ids
