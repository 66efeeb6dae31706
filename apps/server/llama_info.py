"""What llama.cpp's server tells beside completions: props, slots, the text that messages become, and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgeinfer
from edgeinfer import Model
from edgeinfer.apps.server.bodies import ignored_header, json_body, read_json
from edgeinfer.apps.server.llama import default_settings
from edgeinfer.apps.server.service import Endpoint, Service
from edgeinfer.errors import CapabilityError
from edgeinfer.openai.fields import Fields
from edgeinfer.openai.messages import read_messages
from edgeinfer.openai.tool_formats import dialect_of
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions

# By path, what is said of it.
_REFUSED = {
    "/embeddings": "{name} generates text and has no embeddings.",
    "/embedding": "{name} generates text and has no embeddings.",
    "/rerank": "{name} generates text and cannot rerank documents.",
    "/reranking": "{name} generates text and cannot rerank documents.",
    "/infill": "{name} continues text and cannot fill in the middle.",
}
_COMPLETE = "POST /completion continues text."
_OTHER = "Use another model."


class LlamaEndpoints:
    """The endpoints.

    Args:
        service: what is told of.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._marks: weakref.WeakKeyDictionary[Model, list[str]] = weakref.WeakKeyDictionary()
        # By path; they are also served under /v1.
        self.asked: Mapping[str, Endpoint] = {"/props": self.props, "/slots": self.slots}
        self.posted: Mapping[str, Endpoint] = {"/apply-template": self.apply_template} | dict.fromkeys(
            _REFUSED, self.refuse
        )

    async def props(self, _: Request) -> Response:
        """Tells how the model runs."""
        service = self._service
        model = service.model()
        loaded = await service.loaded()
        begin, marks = model.begin_ids, self._marks.get(model)
        if marks is None:
            ids = [*begin, *model.end_ids]
            marks = await service.host.ask(lambda asked: [asked.detokenize([id_], special=True) for id_ in ids])
            self._marks[model] = marks
        data = {
            "model": dataclasses.asdict(model.info),
            "model_alias": service.names(model)[-1],
            # Its own name there: where it lies on this machine is private.
            "model_path": "" if loaded is None else loaded.path.name,
            "context": model.context,
            "plan": model.plan.to_dict(),
            "total_slots": service.host.parallel,
            "default_generation_settings": _slot(0, model, processing=False),
            "chat_template": model.chat_template_text,
            "bos_token": "".join(marks[: len(begin)]),
            "eos_token": next(iter(marks[len(begin) :]), ""),
            "eos_tokens": marks[len(begin) :],
            "modalities": {"vision": False, "audio": False},
            "build_info": f"edgeinfer-{edgeinfer.__version__}",
            "is_sleeping": not model.in_memory,
        }
        if model.tool_template_text != model.chat_template_text:
            data["chat_template_tool_use"] = model.tool_template_text
        return JSONResponse(data)

    async def slots(self, request: Request) -> Response:
        """Tells which of the replies that can take turns are in progress; nothing of what they say."""
        service = self._service
        model, running = service.model(), service.host.running
        slots = [_slot(place, model, processing=place < running) for place in range(service.host.parallel)]
        full = running >= len(slots) and "fail_on_no_slot" in request.query_params
        return JSONResponse(slots, status_code=503 if full else 200)

    async def apply_template(self, request: Request) -> Response:
        """Gives the text that messages become in the model's chat template."""
        service = self._service
        async with (
            json_body(request, service.security, most=service.most_body()) as body,
            service.use(body.get("model"), request.receive) as model,
        ):
            fields = Fields(body)
            if model.tokenizes_beside:
                prompt = await asyncio.to_thread(_rendered, fields, model)
            else:
                prompt = await service.host.ask(lambda model: _rendered(fields, model))
        return JSONResponse({"prompt": prompt}, headers=ignored_header(fields.ignored))

    async def refuse(self, request: Request) -> Response:
        """Says what the model does not do."""
        body = await read_json(request, self._service.security)
        async with self._service.use(body.get("model"), request.receive) as model:
            path = request.url.path.removeprefix("/v1")
            hint = _COMPLETE if path == "/infill" else _OTHER
            raise CapabilityError(_REFUSED[path].format(name=model.info.name), hint)


def _slot(place: int, model: Model, *, processing: bool) -> dict[str, Any]:
    return {
        "id": place,
        "id_task": -1,
        "n_ctx": model.context,
        "speculative": model.plan.configuration.draft_max > 0,
        "is_processing": processing,
        "params": default_settings(model.context),
    }


def _rendered(fields: Fields, model: Model) -> str:
    messages = read_messages(fields.any("messages"))
    choice = read_choice(fields.any("tool_choice"), read_functions(fields.items("tools")), True)
    variables = fields.take("chat_template_kwargs", dict, "an object")
    if fields.take("add_generation_prompt", bool, "true or false") is False:
        variables = {**(variables or {}), "add_generation_prompt": False}
    fields.ignore("model")
    fields.end()
    use = ToolUse(dialect_of(model.tool_template_text), choice)
    return model.render_chat(use.messages(messages), tools=use.template_tools, variables=variables)
