"""/v1/chat/completions: a request's fields, and answers and chunks as OpenAI's reference has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from edgeinfer.core.contexts import Context
from edgeinfer.core.results import Chunk, Result, TokenLogprob
from edgeinfer.openai.calls import ArgumentsPiece, CallPiece, Piece, ReasoningPiece, TextPiece
from edgeinfer.openai.contract import ChatModel, Event
from edgeinfer.openai.detection import dialect_of
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import (
    IGNORED,
    MOST_ALTERNATIVES,
    MOST_REPLIES,
    Fields,
    form,
    limit,
    sampling,
    thinking,
    usage_wanted,
    warnings,
)
from edgeinfer.openai.messages import (
    Message,
    older_tools,
    read_messages,
    split_prefill,
    with_function_call,
    with_tool_calls,
)
from edgeinfer.openai.prompt import ChatPrompt, CompletionReplies
from edgeinfer.openai.replies import Call, Reply, entries, timings
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions


class ChatCompletion(CompletionReplies):
    """Implements `contract.Completion` for a chat completion."""

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        fields = Fields(body)
        stream, counted = fields.flag("stream"), usage_wanted(fields)
        n = fields.whole("n", 1, MOST_REPLIES) or 1
        self._logprobs_wanted, options = _read_logprobs(fields)
        options |= sampling(fields) | form(fields, "response_format")
        options |= limit(fields, "max_completion_tokens", "max_tokens", "n_predict", "max_new_tokens")
        given, chosen = older_tools(fields)
        self._older = bool(given)
        prompt = _prompt(fields, model, options, given, chosen)
        fields.ignore(*IGNORED)
        fields.end()
        kind = "chat.completion.chunk" if stream else "chat.completion"
        super().__init__(
            prompt,
            each=n,
            fields=fields,
            model=model,
            kind=kind,
            prefix="chatcmpl",
            stream=stream,
            usage_wanted=counted,
        )

    def opening(self) -> list[Event]:
        return [self._event(index, {"role": "assistant", "content": "", "refusal": None}) for index in range(self.n)]

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        return self._events(index, self._replies[index].push(chunk))

    def finished(self, index: int, result: Result) -> list[Event]:
        reply = self._replies[index]
        events = self._events(index, reply.finish(result))
        last = self._event(index, {}, self._logprobs(reply), self._reason(reply))
        return [*events, last | {"timings": timings([result])} | _notes(result)]

    def whole(self) -> Event:
        choices = [self._choice(index, reply) for index, reply in enumerate(self._replies)]
        first = self._replies[0].result
        used = {} if first is None else _notes(first)
        return {**self._head, "choices": choices, **self._figures(), **used} | warnings(self.ignored)

    def _events(self, index: int, pieces: list[Piece]) -> list[Event]:
        reply = self._replies[index]
        return [self._event(index, _delta(piece), self._logprobs(reply)) for piece in pieces]

    def _reason(self, reply: Reply) -> str:
        return "function_call" if self._older and reply.finish_reason == "tool_calls" else reply.finish_reason

    def _logprobs(self, reply: Reply) -> list[TokenLogprob]:
        return reply.take_logprobs() if self._logprobs_wanted else []

    def _event(
        self, index: int, delta: dict[str, Any], found: list[TokenLogprob] | None = None, reason: str | None = None
    ) -> Event:
        logprobs = {"content": entries(found), "refusal": None} if found else None
        delta = with_function_call(delta) if self._older else delta
        return self._piece({"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason})

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        if reply.reasoning:  # by DeepSeek's name and by OpenRouter's and vLLM's
            message |= {"reasoning_content": reply.reasoning, "reasoning": reply.reasoning}
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = list(map(_call, reply.calls))
        logprobs = {"content": entries(reply.logprobs), "refusal": None} if self._logprobs_wanted else None
        message = with_function_call(message) if self._older else message
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._reason(reply)}


def _notes(result: Result) -> Event:
    used = {} if result.contexts is None else {"contexts": asdict(result.contexts)}
    # A thought that its model ended needs no word.
    return used if result.thought_end in (None, "model") else used | {"thought_end": result.thought_end}


def _delta(piece: Piece) -> dict[str, Any]:
    match piece:
        case TextPiece(text):
            return {"content": text}
        case ReasoningPiece(text):
            return {"reasoning_content": text, "reasoning": text}
        case CallPiece(place, id_, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": place, "id": id_, "type": "function", "function": function}]}
        case ArgumentsPiece(place, text):
            return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _read_logprobs(fields: Fields) -> tuple[bool, dict[str, Any]]:
    wanted = fields.flag("logprobs")
    alternatives = fields.whole("top_logprobs", 0, MOST_ALTERNATIVES)
    if alternatives and not wanted:
        raise RequestError("top_logprobs needs logprobs.", "Set logprobs to true.", param="top_logprobs")
    return wanted, {"logprobs": alternatives or 0} if wanted else {}


def _prompt(
    fields: Fields, model: ChatModel[Any], options: dict[str, Any], older: list[Any], chosen: Any
) -> ChatPrompt:
    messages = read_messages(with_tool_calls(fields.any("messages")))
    functions = read_functions([*older, *fields.items("tools")], leave_out=fields.leave_out)
    several = fields.take("parallel_tool_calls", bool, "true or false")
    wanted = fields.any("tool_choice")
    choice = read_choice(chosen if wanted is None else wanted, functions, several is not False and not older)
    variables = dict(fields.take("chat_template_kwargs", dict, "an object") or {})
    variables |= thinking(fields, options)
    if documents := fields.items("documents"):  # some templates write them into the prompt, as with vLLM
        variables["documents"] = documents
    prefill, introduced = "", fields.take("add_generation_prompt", bool, "true or false") is not False
    if fields.flag("continue_final_message"):
        messages, prefill = _continued(messages)
    elif not introduced:
        variables["add_generation_prompt"] = False
    tools = ToolUse(dialect_of(model), choice)
    contexts = _contexts(fields)
    if contexts and (functions or variables):
        message = "contexts cannot be combined with tools, chat_template_kwargs or reasoning_effort."
        raise RequestError(message, "Leave these out, or contexts.", param="contexts")
    return ChatPrompt(messages, tools, options, variables or None, prefill, contexts=contexts)


def _contexts(fields: Fields) -> tuple[Context, ...]:
    """Texts to evaluate before the messages. The server maps names to texts: a name never becomes a path here."""
    given = fields.items("contexts")
    if not all(isinstance(each, Context) for each in given):
        raise fields.wrong("contexts", given, "They are names of texts that the server was started with.")
    return tuple(given)


def _continued(messages: list[Message]) -> tuple[list[Message], str]:
    """The messages before the last, and the text of the last, which the reply continues."""
    before, prefill = split_prefill(messages)
    if before is messages:
        message = "continue_final_message needs an assistant message with text at the end."
        raise RequestError(message, "Leave it out, or add that message.", param="continue_final_message")
    return before, prefill
