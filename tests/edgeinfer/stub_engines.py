"""Servers that speak as SGLang, vLLM and OpenAI's completions are documented to, whose model has learnt one text."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import edgeinfer
from tests.waiting import TIME_LIMIT

# What follows a text that is not the learnt one, and what a cache that is not to be read says.
_ASTRAY, _STALE = 7, 3
_BLOCK = 16


class StubEngine:
    """A server of one text.

    Args:
        api: that it speaks.
        tokens: the text, with its prompt.
        model: whose vocabulary it has.
        has_tokens_path: of vLLM, whether tokens go in and out.
    """

    def __init__(
        self, api: str, tokens: Sequence[int], model: edgeinfer.Model, *, has_tokens_path: bool = True
    ) -> None:
        self._tokens, self._model, self._api = list(tokens), model, api
        self._has_tokens_path = has_tokens_path
        self._evaluated: dict[str, list[list[int]]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []  # paths and bodies of requests
        self.ending = "length"  # why replies in text end
        self.text: str | None = None  # that these have; None is the learnt one

    def likeliest(self, text: Sequence[int]) -> int:
        """The token that follows."""
        known = list(text) == self._tokens[: len(text)] and len(text) < len(self._tokens)
        return self._tokens[len(text)] if known else _ASTRAY

    def further(self, text: Sequence[int], count: int) -> list[int]:
        """The tokens that follow."""
        made = list(text)
        for _ in range(count):
            made.append(self.likeliest(made))
        return made[len(text) :]

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request: JSON, events as a list, or a status."""
        self.asked.append((path, body))
        if path == "/v1/models":
            owner = {"openai": "somebody"}.get(self._api, self._api)
            return {"object": "list", "data": [{"id": "big", "object": "model", "created": 1, "owned_by": owner}]}
        if self._api == "sglang" and path == "/generate":
            return self._sglang(body)
        if self._api == "vllm" and path == "/tokenize":
            ids = self._model.tokenize(body["prompt"])
            return {"tokens": ids, "count": len(ids), "max_model_len": 4096}
        if self._api == "vllm" and path == "/inference/v1/generate" and self._has_tokens_path:
            wanted = body["sampling_params"]
            assert wanted["skip_reading_prefix_cache"] is False
            scored = self._scored(body["token_ids"], body["cache_salt"])
            choice = {"index": 0, "finish_reason": "length", "token_ids": self.further(body["token_ids"], 1)}
            return {"request_id": "r", "choices": [choice], "prompt_logprobs": scored}
        if self._api == "vllm" and path == "/v1/completions":
            return self._vllm_completion(body)
        if self._api == "openai" and path == "/v1/completions":
            return self._openai(body)
        return 404

    def _sglang(self, body: dict[str, Any]) -> Any:
        known = {"text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"}
        assert body.keys() <= known | {"stream"}
        ids, count = body.get("input_ids"), body["sampling_params"]["max_new_tokens"]
        ids = self._model.tokenize(body["text"]) if ids is None else ids
        made = self.further(ids, count)
        meta: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": count, "e2e_latency": 0.01}
        if body.get("return_logprob"):
            start = body["logprob_start_len"]
            places = range(start + 1, len(ids))
            meta["input_token_logprobs"] = [[None, ids[start], None], *([-0.5, ids[at], None] for at in places)]
            best = [[[-0.1, self.likeliest(ids[:at]), None]] for at in places]
            meta["input_top_logprobs"] = [None, *best]
        if body.get("stream"):
            return [
                {"output_ids": made[:end], "meta_info": {**meta, "completion_tokens": end}}
                for end in range(1, count + 1)
            ]
        return {"text": "", "output_ids": made, "meta_info": meta}

    def _scored(self, ids: list[int], salt: str) -> list[Any]:
        """Log-probabilities of a prompt; those of rows in the cache are of something else."""
        before = self._evaluated.setdefault(salt, [])
        cached = max((_shared(ids, other) // _BLOCK * _BLOCK for other in before), default=0)
        before.append(ids)
        entries: list[Any] = [None]
        for at in range(1, len(ids)):
            best = self.likeliest(ids[:at]) if at > cached else _STALE
            own = {str(ids[at]): {"logprob": -0.5, "rank": 1 if ids[at] == best else 2, "decoded_token": ""}}
            entries.append(own | {str(best): {"logprob": -0.1, "rank": 1, "decoded_token": ""}})
        return entries

    def _vllm_completion(self, body: dict[str, Any]) -> Any:
        ids, made = body["prompt"], self.further(body["prompt"], body["max_tokens"])
        assert body["return_token_ids"] and body["ignore_eos"]
        if body.get("stream"):
            self._evaluated.setdefault(body["cache_salt"], []).append([*ids, *made[:-1]])
            return [{"choices": [{"index": 0, "text": "", "token_ids": [token]}]} for token in made]
        choice = {"index": 0, "text": "", "token_ids": made, "prompt_logprobs": self._scored(ids, str(len(self.asked)))}
        return {"choices": [choice]}

    def _openai(self, body: dict[str, Any]) -> Any:
        assert body.keys() <= {"model", "prompt", "max_tokens", "temperature", "top_p", "stream"}
        made = self._tokens[len(self._model.tokenize(body["prompt"])) :][: body["max_tokens"]]
        texts = [self._model.detokenize([token]) for token in made] if self.text is None else [self.text]
        events = [{"choices": [{"index": 0, "text": text}]} for text in texts]
        return [*events, {"choices": [{"index": 0, "text": "", "finish_reason": self.ending}]}]


def _shared(ids: Sequence[int], others: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(ids, others, strict=False)) if a != b), min(len(ids), len(others)))


@contextlib.contextmanager
def stub(engine: StubEngine) -> Iterator[str]:
    """A server of a stub's answers; gives its URL."""

    def answer(path: str, body: bytes) -> tuple[int, str, bytes]:
        told = engine.answer(path, json.loads(body or b"{}"))
        if isinstance(told, int):
            return told, "application/json", b'{"detail": "Not Found"}'
        if isinstance(told, list):
            lines = [f"data: {json.dumps(event)}\n\n" for event in told]
            return 200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode()
        return 200, "application/json", json.dumps(told).encode()

    with answering(answer) as url:
        yield url


@contextlib.contextmanager
def answering(answer: Callable[[str, bytes], tuple[int, str, bytes]]) -> Iterator[str]:
    """A server that answers each path and body with a status, a type and a body; gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, kind, told = answer(self.path, body)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(told)))
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(told)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(timeout=TIME_LIMIT)
        server.server_close()
