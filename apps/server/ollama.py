"""Ollama's API: /api/chat and /api/generate in lines of JSON, and the models of this machine."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgeinfer
from edgeinfer import ModelFacts
from edgeinfer.apps.server.bodies import read_json
from edgeinfer.apps.server.completions import CompletionKind, NoFrame, completion_endpoint
from edgeinfer.apps.server.events import JSON_LINES
from edgeinfer.apps.server.service import Endpoint, NamedModel, Service
from edgeinfer.core.errors import CapabilityError
from edgeinfer.core.results import Chunk, Result
from edgeinfer.openai.calls import Piece, ReasoningPiece, TextPiece
from edgeinfer.openai.contract import ChatModel, Event
from edgeinfer.openai.detection import dialect_of
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import MOST_ALTERNATIVES, Fields, sampling, thinking, warnings
from edgeinfer.openai.infill import Gap
from edgeinfer.openai.messages import Message, read_messages, split_prefill
from edgeinfer.openai.prompt import ChatPrompt, PromptReplies, TextPrompt
from edgeinfer.openai.replies import Call, entries, timings
from edgeinfer.openai.schemas import closed
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions

_TEXT_ONLY = "This model reads text only."
# Options of loading and of the machine, ignored for a model that is loaded already.
_OF_LOADING = (
    "num_batch", "num_gpu", "main_gpu", "use_mmap", "use_mlock", "num_thread", "numa", "low_vram", "f16_kv",
    "vocab_only", "logits_all", "draft_num_predict", "embedding_only",
)  # fmt: skip
_SEEDS = 2**64


class OllamaReply(NoFrame, PromptReplies):
    """A reply to /api/chat or /api/generate, in lines of JSON."""

    def __init__(self, chat: bool, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        fields = Fields(body)
        self._chat, self._started = chat, time.perf_counter()
        self._name = fields.text("model") or model.info.name
        stream = fields.take("stream", bool, "true or false")
        alternatives = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES)
        self._logprobs_wanted = fields.flag("logprobs")
        options = _options(fields, model) | _form(fields)
        if self._logprobs_wanted:
            options["logprobs"] = alternatives or 0
        prompt = (_chat_prompt if chat else _text_prompt)(fields, model, options)
        # The server decides how long the model stays, and refuses prompts that do not fit.
        fields.ignore("keep_alive", "truncate", "shift")
        fields.end()
        super().__init__(prompt, stream=stream is not False, ignored=fields.ignored)

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        return self._lines(self._reply.push(chunk))

    def finished(self, index: int, result: Result) -> list[Event]:
        lines = self._lines(self._reply.finish(result))
        if self._reply.calls:
            lines.append(self._line("", self._calls(), done=False))
        return [*lines, self._last("", [])]

    def whole(self) -> Event:
        return self._last(self._reply.text, self._calls(), self._reply.reasoning)

    def _lines(self, pieces: list[Piece]) -> list[Event]:
        lines = []
        for piece in pieces:
            if isinstance(piece, ReasoningPiece):
                lines.append(self._line("", [], piece.text, done=False))
            elif isinstance(piece, TextPiece):
                lines.append(self._line(piece.text, [], done=False))
        return lines

    def _line(self, text: str, calls: list[dict[str, Any]], thought: str = "", *, done: bool) -> Event:
        logprobs: list[Any] = []
        if self._logprobs_wanted:
            logprobs = entries(self._reply.take_logprobs() if self.stream or not done else self._reply.logprobs)
        line = {"model": self._name, "created_at": moment(), **_said(self._chat, text, calls, thought), "done": done}
        return line | ({"logprobs": logprobs} if logprobs else {})

    def _last(self, text: str, calls: list[dict[str, Any]], thought: str = "") -> Event:
        result = self._reply.result
        assert result is not None, "the reply is not finished"
        figures = timings([result])
        return {
            **self._line(text, calls, thought, done=True),
            "done_reason": "length" if self._reply.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds((time.perf_counter() - self._started) * 1e3),
            "load_duration": 0,
            "prompt_eval_count": result.usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(figures["prompt_ms"]),
            "eval_count": result.usage.completion_tokens,
            # Clients divide by this.
            "eval_duration": max(1, _nanoseconds(figures["predicted_ms"])),
            **warnings(self.ignored),
        }

    def _calls(self) -> list[dict[str, Any]]:
        return [called for place, call in enumerate(self._reply.calls) if (called := _called(place, call))]


def _said(chat: bool, text: str, calls: list[dict[str, Any]], thought: str = "") -> Event:
    """The part of a line with text, thought and calls."""
    thoughts = {"thinking": thought} if thought else {}
    if not chat:
        return {"response": text} | thoughts
    return {"message": {"role": "assistant", "content": text} | thoughts | ({"tool_calls": calls} if calls else {})}


def _chat_prompt(fields: Fields, model: ChatModel[Any], options: dict[str, Any]) -> ChatPrompt:
    messages, prefill = split_prefill(read_messages(_answered(fields.any("messages"))))
    functions = read_functions(fields.items("tools"), leave_out=fields.leave_out)
    use = ToolUse(dialect_of(model), read_choice(None, functions, True))
    variables = thinking(fields, options) or None
    prompt = ChatPrompt(messages, use, options, variables, prefill, fields=("messages", "format"))
    prompt.require_whole()
    return prompt


def _text_prompt(fields: Fields, model: ChatModel[Any], options: dict[str, Any]) -> ChatPrompt | TextPrompt:
    """An answer if the model has a chat template, else a continuation."""
    text, system = fields.text("prompt") or "", fields.text("system") or ""
    raw = fields.flag("raw") or model.chat_template_text is None
    fields.only("images", ([],), _TEXT_ONLY)
    suffix = fields.text("suffix")
    fields.only("template", ("",), "The model's own chat template is used; raw does without any.")
    fields.only("context", ([],), "Send the conversation to /api/chat.")
    variables = thinking(fields, options) or None
    if suffix:
        return TextPrompt(text, options, fields=("prompt", "format"), gap=Gap(text, suffix))
    if raw:
        return TextPrompt(f"{system}\n\n{text}" if system else text, options, fields=("prompt", "format"))
    said = [{"role": "system", "content": system}] if system else []
    messages = [*said, {"role": "user", "content": text}]
    use = ToolUse(dialect_of(model), read_choice(None, (), True))
    return ChatPrompt(messages, use, options, variables, fields=("prompt", "format"))


# By path, the field with the input, and its empty value.
_ASKING: Mapping[str, tuple[str, Any]] = {"/api/chat": ("messages", []), "/api/generate": ("prompt", "")}
# Fields of a request that generates nothing.
_ALLOWED_FIELDS = {"model", "keep_alive", "stream", "options"}


def _aside(service: Service, path: str, body: Mapping[str, Any]) -> Response | None:
    """Set how long the model stays loaded; answer a request that asks for nothing else."""
    seconds = keep_seconds(body.get("keep_alive"))
    if seconds is not None and service.switch is not None:
        service.switch.keep(None if math.isinf(seconds) else seconds)
    asking, nothing = _ASKING[path]
    given = {name for name, value in body.items() if value is not None}
    if body.get(asking) not in (None, nothing) or not given <= _ALLOWED_FIELDS | {asking}:
        return None
    head = {"model": body.get("model") or service.model().info.name, "created_at": moment()}
    reason = "unload" if seconds == 0 else "load"
    return JSONResponse(head | _said(path == "/api/chat", "", []) | {"done": True, "done_reason": reason})


OLLAMA_KINDS: Mapping[str, CompletionKind] = {
    "/api/chat": CompletionKind(partial(OllamaReply, True), JSON_LINES, aside=_aside),
    "/api/generate": CompletionKind(partial(OllamaReply, False), JSON_LINES, aside=_aside),
}


_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
# The longest timeout that every event loop takes.
_LONGEST_S = 4_000_000.0


def keep_seconds(value: Any) -> float | None:
    """Seconds of a `keep_alive`, a number or a text such as "5m"; infinite if negative, None if absent."""
    if value is None:
        return None
    seconds: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and len(value) < 40:
        sign, text = (-1, value[1:]) if value.startswith("-") else (1, value)
        if re.fullmatch(r"\d+(\.\d+)?", text):
            seconds = sign * float(text)
        elif text and not _PART.sub("", text):
            seconds = sign * sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if seconds is None:
        raise RequestError(
            "keep_alive is not a duration.", 'Send seconds, or a string such as "5m".', param="keep_alive"
        )
    return math.inf if seconds < 0 or seconds > _LONGEST_S else seconds


def moment(seconds: float | None = None) -> str:
    """A time in Ollama's format, from seconds since 1970; None is now."""
    time_ = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return time_.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


def _options(fields: Fields, model: ChatModel[Any]) -> dict[str, Any]:
    """Read generation options from the field `options`."""
    inner = fields.inner("options")
    if inner is None:
        return {}
    options: dict[str, Any] = {}
    most = inner.take("num_predict", int, "a whole number")
    if most is not None and most > 0:  # other values mean no limit
        options |= inner.checked("num_predict", "max_tokens", most)
    seed = inner.take("seed", int, "a whole number")
    if seed is not None and seed >= 0:
        options["seed"] = seed % _SEEDS
    context = inner.take("num_ctx", int, "a whole number")
    if context is not None and context > model.context:
        inner.leave_out("num_ctx")
    options |= sampling(inner)
    inner.ignore(*_OF_LOADING)
    inner.end()
    return options


def _form(fields: Fields) -> dict[str, Any]:
    """Read the field `format`."""
    value = fields.take("format", (str, dict), "json or a JSON Schema")
    if value in (None, ""):
        return {}
    if value == "json":
        return {"json_object": True}
    if isinstance(value, str):
        raise fields.wrong("format", value, "Give json or a JSON Schema.")
    return {"json_schema": closed(value)}


def _answered(messages: Any) -> Any:
    """Convert Ollama's messages to OpenAI's: calls get ids, and tool messages name theirs."""
    if not isinstance(messages, list):
        return messages
    open_calls: list[dict[str, Any]] = []
    return [_message(message, open_calls) if isinstance(message, dict) else message for message in messages]


def _message(message: Mapping[str, Any], open_calls: list[dict[str, Any]]) -> Message:
    if message.get("images"):
        raise RequestError("A message has images.", _TEXT_ONLY, param="messages", code="unsupported_content")
    changed = {name: value for name, value in message.items() if name != "images"}
    if isinstance(changed.get("role"), str):
        changed["role"] = changed["role"].lower()
    if changed.get("content") is None:
        changed["content"] = ""
    calls = changed.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        first = len(open_calls)
        changed["tool_calls"] = [
            {**call, "type": "function", "id": call.get("id") or f"call_{first + place}"}
            for place, call in enumerate(calls)
        ]
        open_calls += changed["tool_calls"]
    if changed.get("role") == "tool":
        name = changed.pop("tool_name", None)
        if not changed.get("tool_call_id"):
            changed["tool_call_id"] = _call_of(name, open_calls)
    return changed


def _call_of(name: Any, open_calls: list[dict[str, Any]]) -> str:
    """The id of the first unanswered call of a function, or of any function if none is named."""
    for place, call in enumerate(open_calls):
        function = call.get("function")
        if name is None or (isinstance(function, dict) and function.get("name") == name):
            return str(open_calls.pop(place)["id"])
    return "call_0"


def _called(place: int, call: Call) -> dict[str, Any] | None:
    """A call with its arguments as an object; None if they were cut off."""
    try:
        arguments = json.loads(call.arguments)
    except ValueError:
        return None
    return {"id": call.id, "function": {"index": place, "name": call.name, "arguments": arguments}}


# The version of Ollama's API that these endpoints follow; clients refuse older servers.
_FOLLOWED = "0.12.6"
_KEEP = "Manage models on the machine itself: edgeinfer models."
_REFUSED = {
    "/api/push": ("Models are not published from here.", _KEEP),
    "/api/create": ("Clients cannot make models.", _KEEP),
    "/api/copy": ("Clients cannot copy models.", _KEEP),
    "/api/delete": ("Clients cannot delete models.", _KEEP),
}
# A time that clients take for never.
_NEVER_S = 100 * 365 * 86400


class OllamaEndpoints:
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
        return JSONResponse({"version": _FOLLOWED, "edgeinfer": edgeinfer.__version__})

    async def tags(self, _: Request) -> Response:
        return JSONResponse({"models": [_listed(model) for model in await self._service.models()]})

    async def running(self, _: Request) -> Response:
        """Tell which model is loaded, and until when."""
        service = self._service
        loaded = await service.loaded()
        if loaded is None or not service.model().in_memory:
            return JSONResponse({"models": []})
        left = None if service.switch is None else service.switch.expires_in()
        model, planned = service.model(), service.model().plan.planned_bytes
        entry = {
            **{name: value for name, value in _listed(loaded).items() if name not in ("modified_at", "capabilities")},
            "size": planned,
            "size_vram": 0,
            "context_length": model.context,
            "expires_at": moment(time.time() + (_NEVER_S if left is None else left)),
        }
        return JSONResponse({"models": [entry]})

    async def show(self, request: Request) -> Response:
        """Describe a model without loading it."""
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
        """Refuse what clients cannot do here."""
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
    # Every chat model is given tools, in its own format or in plain text.
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
