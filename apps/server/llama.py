"""llama-server's /completion, /infill, /props, /slots and /apply-template."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import edgeinfer
from edgeinfer import Model
from edgeinfer.apps.server.bodies import ignored_header, json_body, read_json
from edgeinfer.apps.server.completions import CompletionKind, NoFrame
from edgeinfer.apps.server.events import SERVER_SENT
from edgeinfer.apps.server.service import Endpoint, Service
from edgeinfer.core.errors import CapabilityError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import Chunk, Result, TokenLogprob
from edgeinfer.openai.contract import ChatModel, Event, StreamT
from edgeinfer.openai.detection import dialect_of
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import MOST_ALTERNATIVES, MOST_REPLIES, Fields, sampling, warnings
from edgeinfer.openai.infill import Gap
from edgeinfer.openai.messages import read_messages
from edgeinfer.openai.prompt import TextPrompt
from edgeinfer.openai.replies import Reply, timings, token_text
from edgeinfer.openai.schemas import closed
from edgeinfer.openai.text import is_id
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions

_SEEDS = 2**64
_ANY_SEED = 2**32 - 1
_HINT = "Send a string, token ids, or a list of either; none may be empty."


class LlamaCompletion(NoFrame):
    """Implements `contract.Completion` for /completion."""

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        fields = Fields(body)
        self.stream = fields.flag("stream")
        prompts, self._several = _prompts(fields, model)
        self._each = fields.whole("n_cmpl", 1, MOST_REPLIES) or 1
        self.n = self._each * len(prompts)
        if self.n > MOST_REPLIES:
            raise fields.wrong("n_cmpl", self._each, f"All prompts together can have {MOST_REPLIES} replies.")
        self._several = self._several or self.n > 1
        self._tokens_wanted = fields.flag("return_tokens")
        self._alternatives = fields.whole("n_probs", 0, MOST_ALTERNATIVES) or 0
        options, self._with_text = _options(fields)
        if self._alternatives:
            options["logprobs"] = self._alternatives
        fields.ignore("model")
        fields.end()
        self.ignored = tuple(fields.ignored)
        self._asked = prompts
        self._prompts = [TextPrompt("", options, fields=("prompt", "json_schema"))] * len(prompts)
        self._shown: list[str] = []
        self._settings = {**default_settings(model.context), **_described(options)}
        self._name = model.info.name
        self._replies = [Reply() for _ in range(self.n)]

    def check(self, model: ChatModel[Any]) -> None:
        self._prompts[0].check(model)

    def prepare(self, model: ChatModel[Any]) -> None:
        """Tokenize the prompts."""
        for place, prompt in enumerate(self._asked):
            known = prompt if isinstance(prompt, str) else _ids(prompt, model)
            self._shown.append(known if isinstance(known, str) else model.detokenize(known))
            self._prompts[place] = replace(self._prompts[place], prompt=known).prepared(model)
        self._asked = []

    def start(self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None) -> StreamT:
        if self._asked:
            self.prepare(model)
        place, reply = divmod(index, self._each)
        return self._prompts[place].start(model, reply)[0]

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        reply = self._replies[index]
        reply.push(chunk)
        if not (chunk.text and self._with_text):
            return []
        tokens = list(chunk.token_ids)
        event = {"index": index, "content": chunk.text, "tokens": tokens, "stop": False, "id_slot": index}
        return [event | self._probabilities(reply.take_logprobs())]

    def finished(self, index: int, result: Result) -> list[Event]:
        self._replies[index].finish(result)
        return [self._last(index, "", [])]

    def whole(self) -> Any:
        answers = []
        for index, reply in enumerate(self._replies):
            assert reply.result is not None, "the reply is not finished"
            tokens = list(reply.result.token_ids) if self._tokens_wanted and self._with_text else []
            text, logprobs = (reply.text, reply.logprobs) if self._with_text else ("", [])
            last = self._last(index, text, tokens) | self._probabilities(logprobs)
            answers.append(last | warnings(self.ignored))
        return answers if self._several else answers[0]

    def _last(self, index: int, text: str, tokens: list[int]) -> Event:
        reply = self._replies[index]
        result = reply.result
        assert result is not None, "the reply is not finished"
        usage = result.usage
        kind, word = self._stopped(result)
        return {
            "index": index,
            "content": text,
            "tokens": tokens,
            "id_slot": index,
            "stop": True,
            "model": self._name,
            "tokens_predicted": usage.completion_tokens if self._with_text else 0,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": self._settings,
            "prompt": self._shown[index // self._each],
            "has_new_line": "\n" in result.text,
            "truncated": not result.overflow.lossless,
            "stop_type": kind,
            "stopping_word": word,
            "tokens_cached": usage.total_tokens,
            "timings": timings([result]),
        }

    def _stopped(self, result: Result) -> tuple[str, str]:
        """Why a reply ended, and the stop word if any."""
        if result.finish_reason != "stop" or not self._with_text:
            return "limit", ""
        return ("word", result.stop_string) if result.stop_string else ("eos", "")

    def _probabilities(self, logprobs: Sequence[TokenLogprob]) -> Event:
        if not self._alternatives or not logprobs:
            return {}
        entries = [
            {**_entry(logprob), "top_logprobs": [_entry(other) for other in logprob.alternatives]}
            for logprob in logprobs
        ]
        return {"completion_probabilities": entries}


class InfillCompletion(LlamaCompletion):
    """Implements `contract.Completion` for /infill."""

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        names = ("input_prefix", "input_suffix", "prompt", "input_extra")
        fields = Fields({name: body.get(name) for name in names})
        prefix, suffix, started = (fields.text(name) or "" for name in names[:3])
        others = tuple(_other(item, place, fields) for place, item in enumerate(fields.items("input_extra")))
        if not (prefix or suffix or started):
            raise fields.missing("input_prefix", "Send the text before the gap, or input_suffix, that behind it.")
        super().__init__({name: value for name, value in body.items() if name not in names} | {"prompt": "."}, model)
        self._gap = Gap(prefix, suffix, started, others)

    def prepare(self, model: ChatModel[Any]) -> None:
        ids, ends = self._gap.ids(model, "input_prefix")
        (prompt,) = self._prompts
        stops = {"stop_token_ids": [*prompt.options.get("stop_token_ids", ()), *ends]}
        self._asked, self._prompts = [[*ids]], [replace(prompt, options={**prompt.options, **stops})]
        super().prepare(model)


def _other(item: Any, place: int, fields: Fields) -> tuple[str, str]:
    inner = Fields(item, f"input_extra[{place}].", fields.ignored)
    other = inner.text("filename") or "tmp", inner.text("text") or ""
    inner.end()
    return other


LLAMA_KINDS: Mapping[str, CompletionKind] = {
    # Its streams have no end mark.
    "/completion": CompletionKind(LlamaCompletion, replace(SERVER_SENT, last=b"")),
    "/infill": CompletionKind(InfillCompletion, replace(SERVER_SENT, last=b"")),
}


def default_settings(context: int) -> Event:
    """The options of a completion that sets none, under llama-server's names."""
    return {"n_ctx": context} | _described({}) | {"seed": _ANY_SEED, "n_predict": -1, "max_tokens": -1}


# Options of ReplyOptions that llama.cpp's server calls by the same names.
_SAME_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "ignore_eos", "top_n_sigma",
    "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "dry_multiplier", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n",
)  # fmt: skip


def _described(options: Mapping[str, Any]) -> Event:
    config = ReplyOptions().replace(**options)
    described: Event = {name: getattr(config, name) for name in _SAME_NAMES}
    described |= {"repeat_penalty": config.repetition_penalty, "stop": list(config.stop)}
    described["dry_sequence_breakers"] = list(config.dry_sequence_breakers)
    described |= {"n_probs": config.logprobs or 0, "grammar": config.grammar or ""}
    if config.seed is not None:
        described["seed"] = config.seed
    if config.max_tokens is not None:
        described |= {"n_predict": config.max_tokens, "max_tokens": config.max_tokens}
    return described


def _options(fields: Fields) -> tuple[dict[str, Any], bool]:
    """Read generation options, and whether the reply is returned: 0 tokens only fill the cache, which takes one token
    here."""
    options: dict[str, Any] = {}
    shown = True
    for name in ("n_predict", "max_tokens"):
        most = fields.take(name, int, "a whole number")
        if most is not None and most >= 0 and not options:  # -1 is no limit
            shown = most > 0
            options |= fields.checked(name, "max_tokens", most or 1)
    seed = fields.take("seed", int, "a whole number")
    if seed is not None and seed >= 0 and seed != _ANY_SEED:
        options["seed"] = seed % _SEEDS
    bias = fields.any("logit_bias")
    if bias not in (None, [], {}):
        options |= fields.checked("logit_bias", "logit_bias", _bias(bias))
    schema = fields.take("json_schema", dict, "a JSON Schema, an object")
    if schema is not None:
        options["json_schema"] = closed(schema)
    return options | sampling(fields), shown


def _bias(value: Any) -> Any:
    """Read pairs of a token id and a number, or false for a forbidden token."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        return value
    known: dict[Any, Any] = {}
    for token, bias in pairs:
        name = int(token) if isinstance(token, str) and token.isdecimal() else token
        if isinstance(name, list | dict):
            return value
        known[name] = float("-inf") if bias is False else bias
    return known


_Prompt = str | list[int | str]


def _prompts(fields: Fields, model: ChatModel[Any]) -> tuple[list[_Prompt], bool]:
    """Read the prompts, and whether they came as a list."""
    prompt = fields.any("prompt")
    if prompt is None:
        raise fields.missing("prompt", "Send text to continue.")
    several = isinstance(prompt, list) and bool(prompt) and not any(map(is_id, prompt))
    prompts = prompt if several else [prompt]
    if len(prompts) > MOST_REPLIES:
        raise fields.wrong("prompt", f"{len(prompts)} prompts", f"The limit is {MOST_REPLIES}.")
    return [_prompt(one, fields, model) for one in prompts], several


def _prompt(prompt: Any, fields: Fields, model: ChatModel[Any]) -> _Prompt:
    """Read a text, or a list of ids and texts."""
    if isinstance(prompt, dict) and set(prompt) <= {"prompt_string", "multimodal_data"}:
        if prompt.get("multimodal_data"):
            message = "prompt has images or sound."
            raise RequestError(message, "This model reads text only.", param="prompt", code="unsupported_content")
        prompt = prompt.get("prompt_string")
    if prompt == "" and model.begin_ids:  # an empty text is the begin token
        return [*model.begin_ids]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt or not all(is_id(part) or isinstance(part, str) for part in prompt):
        raise fields.wrong("prompt", prompt, _HINT)
    if sum(isinstance(part, str) for part in prompt) > MOST_REPLIES:
        raise fields.wrong("prompt", "a list of many texts", f"The limit is {MOST_REPLIES}.")
    return prompt


def _ids(parts: Sequence[int | str], model: ChatModel[Any]) -> list[int]:
    """The ids of a mixed prompt; only the first text gets a begin token."""
    ids: list[int] = []
    for place, part in enumerate(parts):
        if isinstance(part, str):
            ids += model.tokenize_prompt(part, add_special=place == 0) if part else []
        else:
            ids.append(part)
    return ids


def _entry(logprob: TokenLogprob) -> Event:
    token = {"id": logprob.token_id, "token": token_text(logprob), "bytes": list(logprob.bytes)}
    return {**token, "logprob": logprob.logprob}


# Refusals by path.
_REFUSED = {
    "/embedding": "Embeddings are made at /v1/embeddings.",
}
_END_THOUGHT = "reasoning_end"
_OTHER = "Use another model."


class LlamaEndpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._marks: weakref.WeakKeyDictionary[Model, list[str]] = weakref.WeakKeyDictionary()
        # By path; they are also served under /v1.
        self.asked: Mapping[str, Endpoint] = {"/props": self.props, "/slots": self.slots}
        self.posted: Mapping[str, Endpoint] = {
            "/apply-template": self.apply_template,
            "/chat/completions/control": self.control,
            **dict.fromkeys(_REFUSED, self.refuse),
        }

    async def props(self, _: Request) -> Response:
        """Describe how the model runs."""
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
            # The file name only: its place on this machine is private.
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
        """List the slots and which are busy, without any text."""
        service = self._service
        model, running = service.model(), service.host.running
        slots = [_slot(place, model, processing=place < running) for place in range(service.host.parallel)]
        full = running >= len(slots) and "fail_on_no_slot" in request.query_params
        return JSONResponse(slots, status_code=503 if full else 200)

    async def apply_template(self, request: Request) -> Response:
        """Render messages with the chat template."""
        service = self._service
        async with (
            json_body(request, service.security, most=service.most_body()) as body,
            service.use(body.get("model"), request.receive) as model,
        ):
            fields = Fields(body)
            prompt = await service.host.tokenize(model, partial(_rendered, fields))
        return JSONResponse({"prompt": prompt}, headers=ignored_header(fields.ignored))

    async def control(self, request: Request) -> Response:
        """End the thought of an answer that is being made, so that its reply begins."""
        fields = Fields(await read_json(request, self._service.security))
        fields.only("action", (_END_THOUGHT,), f"The action is {_END_THOUGHT}.")
        asked = fields.text("id") or ""
        answer = self._service.answering.get(asked)
        if answer is None:
            hint = "Take the id from the first event of its stream."
            raise RequestError(f"No answer {asked!r} is being made.", hint, status=404, param="id", code="not_found")
        fields.ignore("model")
        fields.end()
        return JSONResponse({"success": answer.answer_now() > 0})

    async def refuse(self, request: Request) -> Response:
        """Refuse what the model cannot do."""
        body = await read_json(request, self._service.security)
        async with self._service.use(body.get("model"), request.receive) as model:
            path = request.url.path.removeprefix("/v1")
            raise CapabilityError(_REFUSED[path].format(name=model.info.name), _OTHER)


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
    use = ToolUse(dialect_of(model), choice)
    return model.render_chat(use.messages(messages), tools=use.template_tools, variables=variables)
