"""Embeddings and reranking in the shapes of OpenAI (/v1/embeddings), Jina and llama-server (/v1/rerank), and Ollama."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgeinfer
from edgeinfer import Model
from edgeinfer.apps.server.bodies import ignored_header, read_json
from edgeinfer.apps.server.service import Endpoint, Service, plain_name
from edgeinfer.core.results import Embeddings, Ranking
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import Fields

Answer = Callable[[Model], dict[str, Any]]

_INPUT = "Give a text, a list of texts, token ids, or lists of them."
# Texts of one request, as OpenAI allows.
_MOST_TEXTS = 2048
# Fields that change nothing here.
_UNUSED = ("user", "keep_alive", "options", "input_type", "embedding_types", "task", "priority")


class Embedders:
    """The models that are served for embeddings and scores next to the one that generates."""

    def __init__(self, sources: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> None:
        self._sources, self._options = sources, dict(options or {})
        self.models: list[tuple[str, Model]] = []

    def load(self) -> None:
        """Load all; errors as of `edgeinfer.load`."""
        for source in self._sources:
            self.models.append((source, edgeinfer.load(source, **self._options)))

    def find(self, name: str | None, *, scores: bool) -> Model | None:
        """The model of a name; without one, the first that does what is asked for, if any."""
        for source, model in self.models:
            if name and plain_name(name) in (plain_name(source), plain_name(model.info.name)):
                return model
        fitting = (model for _, model in self.models if getattr(model, "scores", False) == scores)
        return None if name else next(fitting, None)

    def close(self) -> None:
        while self.models:
            self.models.pop()[1].close()


class EmbeddingEndpoints:
    def __init__(self, service: Service, embedders: Embedders) -> None:
        self._service, self._embedders = service, embedders
        self.posted: Mapping[str, Endpoint] = {
            "/embeddings": self._endpoint(_openai),
            "/rerank": self._endpoint(_rerank, scores=True),
            "/reranking": self._endpoint(_rerank, scores=True),
        }
        self.ollama: Mapping[str, Endpoint] = {
            "/api/embed": self._endpoint(_ollama),
            "/api/embeddings": self._endpoint(_ollama_single),
        }

    def _endpoint(self, read: Callable[[Fields], Answer], *, scores: bool = False) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            body = await read_json(request, self._service.security)
            name = body.pop("model", None)
            fields = Fields(body)
            fields.ignore(*_UNUSED)
            answer = read(fields)
            fields.end()
            made = await self._made(name, request, answer, scores=scores)
            return JSONResponse(made, headers=ignored_header(fields.ignored))

        return endpoint

    async def _made(self, name: Any, request: Request, answer: Answer, *, scores: bool) -> dict[str, Any]:
        embedder = self._embedders.find(name, scores=scores) if name is None or isinstance(name, str) else None
        if embedder is not None:
            # Not on the thread of the model that generates: its replies go on meanwhile.
            return {"model": embedder.info.name, **await asyncio.to_thread(answer, embedder)}
        async with self._service.use(name, request.receive) as model:
            return {"model": model.info.name, **await self._service.host.ask(answer)}


def _texts(value: Any, name: str) -> list[Any]:
    """A text, token ids, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(each, int) for each in value)):
        return [value]
    kinds = isinstance(value, list) and all(isinstance(each, str | list) for each in value)
    if not kinds or len(value) > _MOST_TEXTS:
        raise RequestError(f"{name} is missing, or no text.", f"{_INPUT} At most {_MOST_TEXTS}.", param=name)
    return list(value)


def _openai(fields: Fields) -> Answer:
    texts, encoding = _texts(fields.any("input"), "input"), fields.text("encoding_format") or "float"
    if encoding not in ("float", "base64"):
        raise fields.wrong("encoding_format", encoding, "Choose float or base64.")
    options = _options(fields)

    def answer(model: Model) -> dict[str, Any]:
        made = model.embed(texts, **options)
        data = [{"object": "embedding", "index": place, "embedding": row} for place, row in _rows(made, encoding)]
        return {"object": "list", "data": data, "usage": _usage(made.tokens)}

    return answer


def _options(fields: Fields) -> dict[str, Any]:
    """Options of `Model.embed`; `prompt_name` is that of text-embeddings-inference."""
    dimensions = fields.whole("dimensions", 1, 1 << 20)
    return {"dimensions": dimensions, "prompt": fields.text("prompt_name"), "truncate": fields.flag("truncate")}


def _rows(made: Embeddings, encoding: str) -> list[tuple[int, Any]]:
    if encoding == "float":
        return [*enumerate(made.vectors.tolist())]
    # Little-endian float32, as OpenAI's client reads it.
    return [(place, base64.b64encode(row.astype("<f4").tobytes()).decode()) for place, row in enumerate(made.vectors)]


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _rerank(fields: Fields) -> Answer:
    query, returned = fields.text("query"), fields.flag("return_documents")
    if not query:
        raise fields.missing("query", "Give the text that documents are ranked for.")
    documents: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in fields.items("documents")]
    if not documents or len(documents) > _MOST_TEXTS or not all(isinstance(each, str) for each in documents):
        hint = f"Give a list of 1 to {_MOST_TEXTS} texts, or of objects with a text."
        raise RequestError("documents is no list of texts.", hint, param="documents")
    options: dict[str, Any] = {"top_n": fields.whole("top_n", 1, _MOST_TEXTS), "truncate": fields.flag("truncate")}
    if (instruction := fields.text("instruction")) is not None:
        options["instruction"] = instruction

    def answer(model: Model) -> dict[str, Any]:
        ranking: Ranking = model.rerank(query, documents, **options)
        results = [
            {"index": each.index, "relevance_score": each.score}
            | ({"document": {"text": documents[each.index]}} if returned else {})
            for each in ranking.documents
        ]
        return {"object": "list", "results": results, "usage": _usage(ranking.tokens)}

    return answer


def _ollama(fields: Fields) -> Answer:
    started, texts = time.perf_counter(), _texts(fields.any("input"), "input")
    truncate = fields.any("truncate") is not False  # Ollama leaves out the end unless it is asked not to
    dimensions = fields.whole("dimensions", 1, 1 << 20)

    def answer(model: Model) -> dict[str, Any]:
        made = model.embed(texts, truncate=truncate, dimensions=dimensions)
        took = round((time.perf_counter() - started) * 1e9)
        times = {"total_duration": took, "load_duration": 0, "prompt_eval_count": made.tokens}
        return {"embeddings": made.vectors.tolist()} | times

    return answer


def _ollama_single(fields: Fields) -> Answer:
    text = fields.text("prompt") or ""
    return lambda model: {"embedding": model.embed(text, truncate=True).vectors[0].tolist()}
