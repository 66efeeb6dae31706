"""The ASGI application: endpoints behind the guard, and errors as answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edgeinfer import Context
from edgeinfer.apps.server.anthropic import ANTHROPIC_KINDS, count_tokens
from edgeinfer.apps.server.completions import OPENAI_KINDS, completion_endpoint
from edgeinfer.apps.server.embeddings import Embedders, EmbeddingEndpoints
from edgeinfer.apps.server.errors import error_response
from edgeinfer.apps.server.guard import Guard, KeyRequired
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.info import InfoEndpoints
from edgeinfer.apps.server.llama import LLAMA_KINDS, LlamaEndpoints
from edgeinfer.apps.server.models import ModelActions
from edgeinfer.apps.server.ollama import OllamaEndpoints
from edgeinfer.apps.server.responses import ResponseEndpoints, ResponseStore
from edgeinfer.apps.server.security import KeyUse, Security
from edgeinfer.apps.server.service import Endpoint, NamedModels, Service
from edgeinfer.apps.server.switching import ModelSwitch
from edgeinfer.apps.server.verify import VerifySessions, verify_kinds
from edgeinfer.core.errors import EdgeInferError, UsageError
from edgeinfer.openai.errors import RequestError


def make_app(
    host: ModelHost,
    security: Security,
    *,
    aliases: Sequence[str] = (),
    switch: ModelSwitch | None = None,
    contexts: Sequence[Path] = (),
    embedders: Embedders | None = None,
    store: ResponseStore | None = None,
    downloads: bool = False,
    extra_routes: Sequence[BaseRoute] = (),
) -> Starlette:
    """Make the application; it closes the host when it ends. Without `switch`, only the loaded model is served;
    requests may name the files of `contexts` by their names; without `store`, no response is kept, and without
    `downloads` clients can have no model fetched."""
    embedding = embedders or Embedders()
    local = NamedModels(None if switch is None else switch.source, tuple(aliases))
    service = Service(host, security, tuple(aliases), switch, local, contexts=_by_name(contexts))
    responses, models = ResponseEndpoints(service, store), ModelActions(service, fetches=downloads)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            if switch is not None:
                await switch.close()
            await responses.close()
            await models.close()
            await host.close()
            embedding.close()
            service.readers.shutdown(wait=False)

    app = Starlette(
        routes=[
            *_routes(service, responses, models, embedding),
            *extra_routes,
            Route("/", InfoEndpoints(service).root),
        ],
        middleware=[Middleware(Guard, security=security, metrics=service.metrics)],
        exception_handlers={HTTPException: _http_error, EdgeInferError: _error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _by_name(files: Sequence[Path]) -> dict[str, Context]:
    contexts: dict[str, Context] = {}
    for file in files:
        if file.name in contexts:
            raise UsageError(f"Two contexts are named {file.name}.", "Rename one of the files.")
        contexts[file.name] = Context(file)
        contexts[file.name].text()
    return contexts


def _routes(
    service: Service, responses: ResponseEndpoints, models: ModelActions, embedders: Embedders
) -> list[BaseRoute]:
    """Make the routes, with and without /v1 as llama-server has them; health needs no key."""
    facts, llama, ollama = InfoEndpoints(service), LlamaEndpoints(service), OllamaEndpoints(service)
    count, embedding = partial(count_tokens, service), EmbeddingEndpoints(service, embedders)
    keys = service.security.api_keys
    key = [Middleware(KeyRequired, uses=[KeyUse(key) for key in keys])] if keys else []
    kinds = {**OPENAI_KINDS, **LLAMA_KINDS, **verify_kinds(VerifySessions())}
    completions = {path: completion_endpoint(service, kind) for path, kind in kinds.items()}
    messages = {path: completion_endpoint(service, kind) for path, kind in ANTHROPIC_KINDS.items()}
    table: list[tuple[str, Mapping[str, Endpoint]]] = []
    routes: list[BaseRoute] = []
    for prefix in ("/v1", ""):
        routes.append(Route(f"{prefix}/health", facts.health))
        table += [("GET", _under(prefix, {**models.asked, **facts.asked, **llama.asked, **responses.asked}))]
        posted = {**models.posted, **facts.posted, **llama.posted, **completions, **responses.posted}
        posted |= embedding.posted
        table += [("POST", _under(prefix, posted))]
        table += [("DELETE", _under(prefix, responses.deleted))]
    table += [("POST", {**messages, "/v1/messages/count_tokens": count})]
    table += [
        ("GET", ollama.asked),
        ("POST", {**ollama.posted, **models.pulled, **embedding.ollama}),
        ("DELETE", ollama.deleted),
    ]
    for method, endpoints in table:
        routes += [Route(path, endpoint, methods=[method], middleware=key) for path, endpoint in endpoints.items()]
    return routes


def _under(prefix: str, endpoints: Mapping[str, Endpoint]) -> dict[str, Endpoint]:
    return {prefix + path: endpoint for path, endpoint in endpoints.items()}


async def _error(request: Request, error: Exception) -> Response:
    return error_response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses."""
    assert isinstance(error, HTTPException)
    allowed = dict(error.headers or {})
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers={"Allow": ", ".join([allowed.get("Allow", ""), "OPTIONS"])})
    if error.status_code == 404:
        hint = "Try GET /v1/models or POST /v1/chat/completions."
        refusal = RequestError(f"There is no path {request.url.path!r}.", hint, status=404, code="not_found")
    elif error.status_code == 405:
        message = f"{request.method} is not supported on this path."
        hint = f"Use {allowed.get('Allow', 'another')}."
        refusal = RequestError(message, hint, status=405, code="method_not_allowed")
    else:
        refusal = RequestError(error.detail, status=error.status_code)
    response = error_response(refusal, request.url.path)
    response.headers.update(allowed)
    return response
