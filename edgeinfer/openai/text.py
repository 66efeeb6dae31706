"""/v1/completions: a request's fields, and answers and chunks as OpenAI's reference has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from edgeinfer.core.options import LARGEST_COUNT
from edgeinfer.core.results import Chunk, Result, TokenLogprob
from edgeinfer.openai.contract import ChatModel, Event, StreamT
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.fields import (
    IGNORED,
    MOST_ALTERNATIVES,
    MOST_REPLIES,
    Fields,
    form,
    limit,
    sampling,
    usage_wanted,
    warnings,
)
from edgeinfer.openai.infill import Gap
from edgeinfer.openai.prompt import CompletionReplies, PromptTokens, TextPrompt
from edgeinfer.openai.replies import timings, token_table
from edgeinfer.runtime.sampling.distributions import token_logprobs

# OpenAI's default.
_DEFAULT_LENGTH = 16


class TextCompletion(CompletionReplies):
    """Implements `contract.Completion` for text completions."""

    def __init__(self, body: Mapping[str, Any], model: ChatModel[Any]) -> None:
        fields = Fields(body)
        stream, counted = fields.flag("stream"), usage_wanted(fields)
        prompts = _prompts(fields, model)
        self._given, each = _replies_each(fields, len(prompts), stream=stream)
        self._echo = fields.flag("echo")
        alternatives = fields.whole("logprobs", 0, MOST_ALTERNATIVES)
        self._logprobs_wanted = alternatives is not None
        if self._echo and self._logprobs_wanted and stream:
            raise fields.wrong("logprobs", alternatives, "With echo, leave out stream or logprobs.")
        self._with_reply = not (self._echo and body.get("max_tokens") == 0)
        options = _options(fields, with_reply=self._with_reply)
        if self._logprobs_wanted or each > self._given:
            options["logprobs"] = alternatives or 0
        fields.ignore(*IGNORED)
        suffix = fields.text("suffix")
        if suffix and (self._echo or not all(isinstance(prompt, str) for prompt in prompts)):
            raise fields.wrong("suffix", suffix, "It goes with texts in prompt, and without echo.")
        fields.end()
        super().__init__(
            *(TextPrompt(prompt, options, gap=_gap(prompt, suffix)) for prompt in prompts),
            each=each,
            fields=fields,
            model=model,
            kind="text_completion",
            prefix="cmpl",
            stream=stream,
            usage_wanted=counted,
        )
        self._offsets = [0] * self.n  # characters whose log-probabilities were sent
        self._alternatives = alternatives or 0
        self._scored: dict[int, list[TokenLogprob]] = {}  # of prompts; the first token's is no number
        texts = (prompt if isinstance(prompt, str) else model.detokenize(prompt) for prompt in prompts)
        self._echoed = list(texts) if self._echo else [""] * len(prompts)

    def start(self, model: ChatModel[StreamT], index: int, ended: Callable[[], bool] | None = None) -> StreamT:
        place = index // self._each
        if self._echo and self._logprobs_wanted and place not in self._scored:
            prompt = self._prompts[place] = self._prompts[place].prepared(model)
            assert isinstance(prompt, TextPrompt), "this path continues texts"
            ids = prompt.prompt.of(model) if isinstance(prompt.prompt, PromptTokens) else prompt.prompt
            self._scored[place] = _scored(model, list(map(int, ids)), self._alternatives, prompt.options, ended)
        return super().start(model, index, ended)

    def opening(self) -> list[Event]:
        return [self._event(i, self._echoed[i // self._each]) for i in range(self.n)] if self._echo else []

    def chunk(self, index: int, chunk: Chunk) -> list[Event]:
        reply = self._replies[index]
        reply.push(chunk)
        return [self._event(index, chunk.text, self._table(index))] if chunk.text else []

    def finished(self, index: int, result: Result) -> list[Event]:
        reply = self._replies[index]
        reply.finish(result)
        last = self._event(index, "", self._table(index), reply.finish_reason)
        return [last | {"timings": timings([result])}]

    def whole(self) -> Event:
        choices = [self._choice(place, index) for place, index in enumerate(self._best())]
        return {**self._head, "choices": choices, **self._figures()} | warnings(self.ignored)

    def _best(self) -> list[int]:
        """The replies to return for each prompt: all, or the likeliest ones, best first."""
        if self._given == self._each:
            return list(range(self.n))
        groups = (range(first, first + self._each) for first in range(0, self.n, self._each))
        ranked = (sorted(group, key=lambda index: -self._replies[index].mean_logprob) for group in groups)
        return [index for group in ranked for index in group[: self._given]]

    def _event(self, index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None) -> Event:
        return self._piece({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})

    def _table(self, index: int) -> dict[str, Any] | None:
        found = self._replies[index].take_logprobs()
        if not found:
            return None
        table, self._offsets[index] = token_table(found, self._offsets[index])
        return table

    def _choice(self, place: int, index: int) -> dict[str, Any]:
        reply = self._replies[index]
        table = None
        if self._logprobs_wanted:
            before = self._scored.get(index // self._each, [])
            table, _ = token_table([*before, *(reply.logprobs if self._with_reply else ())], 0)
            if before:
                table["token_logprobs"][0] = table["top_logprobs"][0] = None
        return {
            "index": place,
            "text": self._echoed[index // self._each] + (reply.text if self._with_reply else ""),
            "logprobs": table,
            "finish_reason": reply.finish_reason,
        }


def _options(fields: Fields, *, with_reply: bool) -> dict[str, Any]:
    """Options of the reply; a prompt that is only echoed takes one token, which is not given."""
    if not with_reply:
        fields.ignore("max_tokens")
    default = _DEFAULT_LENGTH if with_reply else 1
    options = {"max_tokens": default} | limit(fields, "max_tokens", "n_predict", "max_new_tokens")
    return options | sampling(fields) | form(fields, "response_format")


def _scored(
    model: ChatModel[Any],
    ids: list[int],
    alternatives: int,
    options: Mapping[str, Any],
    ended: Callable[[], bool] | None,
) -> list[TokenLogprob]:
    """Log-probabilities of a prompt's tokens, read in a pass of its own. Begin tokens are no text."""
    begin = model.begin_ids
    silent = len(begin) if ids[: len(begin)] == begin else 0

    def entry(token: int, logprob: float, others: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        return TokenLogprob(token, model.pieces([token])[0], logprob, others)

    found = [TokenLogprob(ids[0], b"" if silent else model.pieces(ids[:1])[0], math.nan)]
    for rows in model.logits(ids, options.get("adapter")):
        if ended is not None and ended():
            raise RequestError("The prompt was not read to its end.", "Ask again.", status=503, code="cancelled")
        for row in rows[: len(ids) - len(found)]:
            token = ids[len(found)]
            scores = token_logprobs(row, token, alternatives)
            others = tuple(entry(other, logprob) for other, logprob in scores.top)
            found.append(entry(token, scores.logprob, others))
    return found


def _gap(prompt: str | list[int], suffix: str | None) -> Gap | None:
    return Gap(prompt, suffix) if suffix and isinstance(prompt, str) else None


def _prompts(fields: Fields, model: ChatModel[Any]) -> list[str | list[int]]:
    prompt = fields.take("prompt", (str, list), "a string, token ids, or a list of either")
    if prompt is None:
        raise fields.missing("prompt", "Send text to continue.")
    several = isinstance(prompt, list) and prompt and not is_id(prompt[0])
    prompts = prompt if several else [prompt]
    if len(prompts) > MOST_REPLIES:
        raise fields.wrong("prompt", f"{len(prompts)} prompts", f"The limit is {MOST_REPLIES}.")
    # An empty text starts with the model's begin token.
    return [model.begin_ids if one == "" and model.begin_ids else _prompt(one, fields) for one in prompts]


def _prompt(prompt: Any, fields: Fields) -> str | list[int]:
    if not prompt or not (isinstance(prompt, str) or (isinstance(prompt, list) and all(map(is_id, prompt)))):
        raise fields.wrong("prompt", prompt, "Send a string, token ids, or a list of either; none may be empty.")
    return prompt


def is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def _replies_each(fields: Fields, prompts: int, *, stream: bool) -> tuple[int, int]:
    """How many replies to each prompt are returned, and how many are made."""
    given = fields.whole("n", 1, MOST_REPLIES) or 1
    made = fields.whole("best_of", 1, MOST_REPLIES)
    name, each = ("n", given) if made is None else ("best_of", made)
    if each * prompts > MOST_REPLIES:
        raise fields.wrong(name, each, f"All prompts together can have {MOST_REPLIES} replies.")
    if each < given:
        raise fields.wrong("best_of", each, f"Give at least n={given}, or leave it out.")
    if each > given and stream:
        raise fields.wrong("best_of", each, "Which replies are best is known when all have ended: leave out stream.")
    return given, each
