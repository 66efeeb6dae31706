"""A server that speaks as OpenAI's completions are documented to, whose model has learnt one text."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import edgeinfer
from tests.waiting import TIME_LIMIT


class StubEngine:
    """A server of one text, with its prompt, in tokens of a model."""

    def __init__(self, tokens: Sequence[int], model: edgeinfer.Model) -> None:
        self._tokens, self._model = list(tokens), model
        self.asked: list[tuple[str, dict[str, Any]]] = []  # paths and bodies of requests
        self.ending = "length"  # why replies in text end
        self.text: str | None = None  # that these have; None is the learnt one

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a request: JSON, events as a list, or a status."""
        self.asked.append((path, body))
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "big", "object": "model", "created": 1, "owned_by": "somebody"}]}
        if path == "/v1/completions":
            return self._openai(body)
        return 404

    def _openai(self, body: dict[str, Any]) -> Any:
        assert body.keys() <= {"model", "prompt", "max_tokens", "temperature", "top_p", "stream"}
        made = self._tokens[len(self._model.tokenize(body["prompt"])) :][: body["max_tokens"]]
        texts = [self._model.detokenize([token]) for token in made] if self.text is None else [self.text]
        events = [{"choices": [{"index": 0, "text": text}]} for text in texts]
        return [*events, {"choices": [{"index": 0, "text": "", "finish_reason": self.ending}]}]


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
