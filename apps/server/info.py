"""Endpoints about the models and the server: models, health, metrics, tokens, contexts."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

import edgeinfer
from edgeinfer import Model
from edgeinfer.apps.server.bodies import ignored_header, read_json
from edgeinfer.apps.server.metrics import CONTENT_TYPE
from edgeinfer.apps.server.service import Endpoint, NamedModel, Service
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields

_HIGHEST_ID = 2**31
# Largest input of /tokenize and /detokenize, in contexts of the model.
_MOST_CONTEXTS = 16
# Characters per token of ordinary text.
_CHARACTERS = 4


# Paths listed at the root, by API.
_SERVED = {
    "OpenAI": ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models", "/v1/contexts"],
    "Anthropic": ["/v1/messages", "/v1/messages/count_tokens"],
    "Ollama": ["/api/chat", "/api/generate", "/api/tags", "/api/show", "/api/ps", "/api/version", "/api/pull"],
    "llama.cpp": [
        "/completion", "/infill", "/tokenize", "/detokenize", "/apply-template", "/props", "/slots", "/metrics",
        "/models/load", "/models/unload", "/models/sse",
    ],
    "all": ["/health"],
}  # fmt: skip
_PAGE = (
    "<!doctype html><html lang='en'><title>edgeinfer</title><h1>edgeinfer</h1>"
    "<p>A language model is served here to programs, as OpenAI's API and others do. For a chat window, run "
    "<code>edgeinfer chat</code>.</p>"
    + "".join(f"<h2>{whose}</h2><p>{', '.join(paths)}</p>" for whose, paths in _SERVED.items())
    + "<p><a href='/v1/models'>Models</a> · <a href='/health'>health</a> · <a href='/metrics'>metrics</a></p></html>"
)


class InfoEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._started = int(time.time())
        # By path; also served under /v1.
        self.asked: dict[str, Endpoint] = {
            "/models": self.models,
            "/models/{name:path}": self.model,
            "/contexts": self.contexts,
            "/metrics": self.metrics,
        }
        self.posted: dict[str, Endpoint] = {"/tokenize": self.tokenize, "/detokenize": self.detokenize}

    async def root(self, request: Request) -> Response:
        """List what is served here."""
        if "text/html" in request.headers.get("accept", ""):
            return HTMLResponse(_PAGE, headers={"Content-Security-Policy": "default-src 'none'"})
        return JSONResponse({"name": "edgeinfer", "version": edgeinfer.__version__, "endpoints": _SERVED})

    async def models(self, _: Request) -> Response:
        """List the loaded or loading model under each of its names, then the other models that requests may name."""
        service, listed = self._service, await self._service.models()
        answer: list[dict[str, Any]] = []
        for place, local in enumerate(listed):
            model = service.model() if place == 0 and service.host.state.status == "ready" else None
            names = [*local.names, *(service.aliases if service.switch is None else ())]
            names += () if model is None else model.adapters
            answer += [self._listed(name, local, model) for name in dict.fromkeys(names)]
        return JSONResponse({"object": "list", "data": answer})

    async def model(self, request: Request) -> Response:
        service, name = self._service, request.path_params["name"]
        local = await service.find(name)
        loaded = await service.loaded()
        model = service.model() if loaded is not None and loaded.source == local.source else None
        return JSONResponse(self._listed(name, local, model))

    async def health(self, _: Request) -> Response:
        """Report whether requests will be answered, or the progress of loading."""
        state = self._service.host.state
        answer: dict[str, Any] = {"status": "ok" if state.status == "ready" else state.status}
        loads = state.status != "closed" and self._service.switch is not None and self._service.switch.opened
        if state.status == "ready" or loads:
            return JSONResponse({"status": "ok"})
        if state.status == "loading":
            answer |= {"stage": state.stage, "done": state.done, "total": state.total}
        reason = str(state.error) if state.error is not None else f"The model is not ready: {state.status}."
        answer["error"] = {"message": reason, "type": "unavailable_error", "param": None, "code": "not_ready"}
        return JSONResponse(answer, status_code=503, headers={"Retry-After": "1"})

    async def contexts(self, _: Request) -> Response:
        """List the texts that requests may name."""
        listed = [{"id": name, "object": "context"} for name in self._service.contexts]
        return JSONResponse({"object": "list", "data": listed})

    async def metrics(self, _: Request) -> Response:
        text = self._service.metrics.text(self._service.load())
        return PlainTextResponse(text, headers={"Content-Type": CONTENT_TYPE})

    async def tokenize(self, request: Request) -> Response:
        """Tokenize a text as llama-server does: without the begin token unless `add_special` is set, with special
        tokens parsed unless `parse_special` is false; `with_pieces` adds the text of each token."""
        fields = Fields(await read_json(request, self._service.security, most=self._service.most_body()))
        content = fields.text("content")
        if content is None:
            raise fields.missing("content", 'Send {"content": "..."}.')
        special, with_pieces = fields.flag("add_special"), fields.flag("with_pieces")
        parse = fields.take("parse_special", bool, "true or false") is not False

        def tokenized(model: Model) -> list[Any]:
            ids = _ids(model, content, special, parse)
            return list(map(_piece, ids, model.pieces(ids))) if with_pieces else ids

        named = fields.any("model")
        fields.end()
        async with self._service.use(named, request.receive) as model:
            tokens = await self._service.host.tokenize(model, tokenized)
        return JSONResponse({"tokens": tokens}, headers=ignored_header(fields.ignored))

    async def detokenize(self, request: Request) -> Response:
        """Turn token ids into text, special tokens spelled out."""
        fields = Fields(await read_json(request, self._service.security, most=self._service.most_body()))
        ids, named = fields.any("tokens"), fields.any("model")
        fields.end()
        if not isinstance(ids, list) or not all(type(id) is int and 0 <= id < _HIGHEST_ID for id in ids):
            raise RequestError("tokens are not token ids.", 'Send {"tokens": [1, 2, 3]}.', param="tokens")
        async with self._service.use(named, request.receive) as model:
            if len(ids) > _MOST_CONTEXTS * model.context:
                message = f"There are {len(ids)} token ids."
                raise RequestError(message, f"The limit is {_MOST_CONTEXTS * model.context}.", param="tokens")
            text = await self._service.host.ask(lambda model: model.detokenize(ids, special=True))
        return JSONResponse({"content": text}, headers=ignored_header(fields.ignored))

    def _listed(self, name: str, local: NamedModel, model: Model | None) -> dict[str, Any]:
        facts = local.facts
        meta = {
            "n_ctx_train": facts.context,
            "n_vocab": facts.vocabulary,
            "n_embd": facts.width,
            "n_params": facts.parameters,
            "size": facts.bytes,
            "bits_per_weight": facts.bits_per_weight,
            "architecture": facts.architecture,
        }
        meta |= {} if model is None else {"n_ctx": model.context}
        state = self._service.host.state
        own = state.model == local.source
        value: str = state.status if own and state.status in ("loading", "failed") else "unloaded"
        if model is not None:
            value = "loaded" if model.in_memory else "sleeping"
        status = {"value": value}
        answer = {"id": name, "object": "model", "created": self._started, "owned_by": "edgeinfer"}
        return {**answer, "meta": meta, "status": status}


def _ids(model: Model, text: str, special: bool, parse: bool) -> list[int]:
    most = _MOST_CONTEXTS * _CHARACTERS * model.context
    if len(text) > most:
        raise RequestError(f"content has {len(text)} characters.", f"The limit is {most}.", param="content")
    return model.tokenize(text, add_special=special, parse_special=parse)


def _piece(id_: int, piece: bytes) -> dict[str, Any]:
    """A token as llama-server shows it: bytes that are not text become a list of numbers."""
    try:
        return {"id": id_, "piece": piece.decode("utf-8")}
    except UnicodeDecodeError:
        return {"id": id_, "piece": list(piece)}
