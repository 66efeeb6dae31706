"""Rounds that a vLLM server decides: log-probabilities of prompts verify greedy text, drawn text is streamed."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgeinfer.runtime.remote.contract import Decided, RemoteAccess
from edgeinfer.runtime.remote.http import RemoteRefusalError, tokens_in
from edgeinfer.runtime.remote.openai_server import OtherEngine, OtherEngineReply, decided_greedily

# Token ids in and out, where a server has it; the other evaluates the whole text again in each round.
_TOKENS_PATH, _TEXT_PATH = "/inference/v1/generate", "/v1/completions"


class VLLMReply(OtherEngineReply):
    """One reply; fields as vllm/entrypoints/serve/disagg/protocol.py and openai/completion/protocol.py have them.
    Log-probabilities of a prompt are right only where it is evaluated, not where rows come from the cache (vllm#42245).
    So a salt makes the cache this reply's own, which changes where it may hold rows of a draft."""

    def __init__(self, access: RemoteAccess, prompt: Sequence[int], sampling: Mapping[str, Any]) -> None:
        super().__init__(access, prompt, sampling)
        self._salt = ""
        self._reached = -1  # tokens of text when the last answer had come, whose rows alone the cache has
        self._has_tokens_path = True

    def _spelled(self, text: str) -> Sequence[int]:
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return tokens_in(self._connection.post("/tokenize", body)["tokens"])

    def _verified(self, text: Sequence[int], draft: Sequence[int]) -> tuple[tuple[int, ...], float]:
        self._renew_salt(text)
        answer = self._scored([*text, *draft])
        choice = answer["choices"][0]
        (beyond,) = tokens_in(choice["token_ids"])
        likeliest: list[int] = []
        if draft:
            scored = answer.get("prompt_logprobs") or choice["prompt_logprobs"]
            if len(scored) != len(text) + len(draft):
                raise ValueError("another number of tokens was scored")
            likeliest = [_likeliest(entries) for entries in scored[len(text) :]]
        tokens = decided_greedily(likeliest, draft, beyond)
        self._reached = len(text) + len(tokens)
        return tokens, 0.0

    def _scored(self, ids: Sequence[int]) -> Any:
        """The answer to a prompt, one token, and the likeliest token at each place of the prompt."""
        common = {"model": self.model, "cache_salt": self._salt}
        sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 1, "ignore_eos": True}
        if self._has_tokens_path:
            wanted = {**sampling, "skip_reading_prefix_cache": False}
            try:
                return self._connection.post(
                    _TOKENS_PATH, {**common, "token_ids": list(ids), "sampling_params": wanted}
                )
            except RemoteRefusalError as error:
                if error.status not in (404, 405):
                    raise
            self._has_tokens_path = False
        return self._connection.post(
            _TEXT_PATH,
            {**common, **sampling, "prompt": list(ids), "return_token_ids": True, "add_special_tokens": False},
        )

    def _streamed(self, text: Sequence[int], tokens: int) -> Iterator[Decided]:
        self._renew_salt(text)
        body = {"model": self.model, "cache_salt": self._salt, "prompt": list(text), "max_tokens": tokens}
        body |= {**self._sampling, "ignore_eos": True, "return_token_ids": True, "stream": True}
        came = len(text)
        for event in self._connection.events(_TEXT_PATH, body | {"add_special_tokens": False}):
            for choice in event["choices"]:
                new = tokens_in(choice.get("token_ids") or [])
                came += len(new)
                if new:
                    yield Decided(new, last=False)
        self._reached = came
        yield Decided(())

    def _renew_salt(self, text: Sequence[int]) -> None:
        """Takes a salt under which nothing behind the text can have been evaluated."""
        if self._reached != len(text):
            self._salt = secrets.token_urlsafe(32)
        self._reached = -1


def _likeliest(entries: Mapping[str, Any]) -> int:
    """The first of the tokens at one place of a prompt, whose own token is among them whatever its rank."""
    return next(int(token) for token, entry in entries.items() if entry["rank"] == 1)


class VLLMServer(OtherEngine):
    """Implements `contract.RemoteServer` by requests to vLLM."""

    reply = VLLMReply
