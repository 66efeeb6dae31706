"""Replies that SGLang, vLLM and servers of OpenAI's completions decide, as far as stubs speak as they do; and servers
that answer with anything."""

from __future__ import annotations

import json
import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import CapabilityError, RemoteError, UsageError
from edgeinfer.options.load import RemoteApi
from edgeinfer.runtime.remote.channel import Channel
from tests.edgeinfer.stub_engines import StubEngine, answering, stub
from tests.speculation import needs_builtin

pytestmark = [pytest.mark.slow, needs_builtin]
PROMPT, TOKENS = "Once upon a time", 40


@pytest.fixture(scope="module")
def alone() -> Iterator[edgeinfer.Model]:
    with edgeinfer.load(speculation="off") as model:
        yield model


@pytest.fixture(scope="module")
def text(alone: edgeinfer.Model) -> list[int]:
    """What a model says that mostly agrees with the built-in one, with its prompt."""
    ids = list(alone.tokenize_prompt(PROMPT))
    for place in (12, 20):
        ids += alone.generate(ids, max_tokens=place).token_ids
        ids.append(alone.tokenize("purple", parse_special=False)[-1])
    return [*ids, *alone.generate(ids, max_tokens=3 * TOKENS).token_ids]


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(2)
    monkeypatch.setattr(Channel, "length", lambda _: chance.choice((None, 0, 1, 4, 9)))
    monkeypatch.setattr(Channel, "tokens_of_stream", lambda _: chance.choice((3, None)))
    monkeypatch.setattr(Channel, "leaves", lambda _: chance.random() < 0.3)


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("api", ["sglang", "vllm", "vllm without tokens", "openai"])
def test_the_text_is_the_servers(api: str, alone: edgeinfer.Model, text: list[int]) -> None:
    engine = StubEngine(api.split()[0], text, alone, has_tokens_path=api == "vllm")
    begins = len(alone.tokenize_prompt(PROMPT))
    wanted = text[begins : begins + TOKENS]
    with stub(engine) as url, edgeinfer.load(remote=url) as model:
        rounds = accepted = streamed = 0
        for _ in range(3):
            # Pauses and a second reply to the same prompt find drafts in the server's cache.
            stream = model.stream(PROMPT, max_tokens=TOKENS)
            for _ in range(5):
                next(stream)
            stream.pause()
            result = stream.complete()
            use = result.remote
            assert use is not None and use.model == "big" and not use.local
            assert result.text == alone.detokenize(wanted)
            assert api == "openai" or list(result.token_ids) == wanted
            rounds, accepted, streamed = rounds + use.rounds, accepted + use.accepted, streamed + use.streamed
        assert streamed > 5 and (min(rounds, accepted) > 5) == (api != "openai")
        if api != "openai":
            drawn = model.generate(PROMPT, max_tokens=8, temperature=0.8, top_p=0.9)
            assert drawn.remote is not None and not drawn.remote.rounds
            body = engine.asked[-1][1]
            assert body.get("sampling_params", body)["temperature"] == 0.8
        for options in ({"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}, {"regex": "[a-z]+"}):
            with pytest.raises(UsageError, match="for replies that an edgeinfer server decides"):
                model.generate(PROMPT, **options)


def test_a_text_server_ends_its_replies(alone: edgeinfer.Model) -> None:
    ids = list(alone.tokenize_prompt(PROMPT))
    said = alone.generate(PROMPT, max_tokens=6).token_ids
    engine = StubEngine("openai", [*ids, *said], alone)
    engine.ending = "stop"
    with stub(engine) as url, edgeinfer.load(remote=url, remote_api="openai") as model:
        result = model.generate(PROMPT, max_tokens=30)
        assert (result.text, result.finish_reason) == (alone.detokenize(said), "stop")
        # A control token that a stranger spells is text.
        (spelled, control), *_ = model._parts.tokenizer.control_texts.items()
        engine.text = f"so {spelled} it goes"
        result = model.generate(PROMPT, max_tokens=30)
        assert result.text == engine.text and control not in result.token_ids


def test_a_model_of_another_kind_is_refused(alone: edgeinfer.Model, text: list[int]) -> None:
    for api in ("sglang", "vllm"):
        engine = StubEngine(api, text, alone)
        with stub(engine) as url:
            refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
                ({"remote_model": "small"}, RemoteError, "has 'big', not 'small'"),
                ({"remote_digest": "0" * 64}, CapabilityError, "digest"),
            )
            for options, error, says in refused:
                with edgeinfer.load(remote=url, **options) as model, pytest.raises(error, match=says):
                    model.generate(PROMPT, max_tokens=4)

            def shifted(told: str) -> list[int]:
                return [token + 1 for token in alone.tokenize(told)]

            engine._model = type("Shifted", (), {"tokenize": staticmethod(shifted), "begin_ids": ()})()
            with edgeinfer.load(remote=url) as model, pytest.raises(RemoteError, match="not those that drafts"):
                model.generate(PROMPT, max_tokens=4)


ANSWERS = {
    "not json": (200, "application/json", b"<html>"),
    "another shape": (200, "application/json", b'{"tokens": {"a": 1}, "session": 4}'),
    "a list": (200, "application/json", b"[1, 2]"),
    "deep": (200, "application/json", b"[" * 100_000),
    "no token ids": (200, "application/json", b'{"tokens": [-1], "session": "s"}'),
    "unknown tokens": (200, "application/json", b'{"tokens": [99999999], "session": "s"}'),
    "too many tokens": (200, "application/json", json.dumps({"tokens": [1] * 999, "session": "s"}).encode()),
    "no number": (200, "application/json", b'{"tokens": [1], "session": "s", "server_ms": "fast"}'),
    "a long answer": (200, "application/json", b" " * 600_000),
    "a long event": (200, "text/event-stream", b"data: " + b"1" * 2_000_000),
    "an endless end": (200, "text/event-stream", b"data: [DONE]\n\n"),
    "elsewhere": (302, "text/plain", b""),
    "a key": (401, "application/json", b'{"error": {"message": "no"}}'),
    "an error in words": (400, "application/json", b'{"error": "\\u001b[2Jbad"}'),
}


def test_servers_that_answer_with_anything_end_the_reply_alone(
    alone: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.runtime.remote.http._TRIES", 2)
    monkeypatch.setattr("edgeinfer.runtime.remote.http._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("edgeinfer.runtime.remote.http._LARGEST", 500_000)
    given: list[tuple[int, str, bytes]] = []
    with answering(lambda path, body: given[-1]) as url:
        for api in ("edgeinfer", "sglang"):
            with edgeinfer.load(remote=url, remote_api=api) as model:
                for name, answer in ANSWERS.items():
                    given.append(answer)
                    with pytest.raises(RemoteError) as caught:
                        model.generate(PROMPT, max_tokens=4)
                    assert "\n" not in caught.value.message and "\x1b" not in str(caught.value), (api, name)
                    assert len(str(caught.value)) < 600


class Handler(BaseHTTPRequestHandler):
    """Has a model, and refuses to decide with it."""

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "m", "owned_by": "edgeinfer"}]}')

    def do_POST(self) -> None:
        self._answer(400, b'{"error": {"message": "This server decides nothing."}}')

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Tests are quiet."""


@contextmanager
def listening(certificate: Path | None) -> Iterator[int]:
    """The port of a server, with TLS where it has a certificate."""
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, certificate.with_suffix(".key"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(60)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that this test vouches for alone, for this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    named = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(path), "-keyout", str(path.with_suffix(".key"))]
    subprocess.run([*made, *named], check=True, capture_output=True, timeout=300)
    return path


def refusal(url: str, api: RemoteApi | None = None) -> str:
    with edgeinfer.load(remote=url, remote_api=api) as model, pytest.raises(RemoteError) as caught:
        model.generate("Once", max_tokens=4)
    assert "\n" not in str(caught.value)
    return caught.value.message


def test_certificates_are_trusted_where_the_system_is_told_to(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listening(certificate) as port:
        assert "cannot be trusted: self-signed certificate" in refusal(f"https://127.0.0.1:{port}")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert "decides nothing" in refusal(f"https://127.0.0.1:{port}")
        assert "cannot be trusted: hostname mismatch" in refusal(f"https://localhost:{port}")
    with listening(None) as port:
        assert "cannot be trusted" in refusal(f"https://127.0.0.1:{port}")


def test_a_silent_server_ends_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.runtime.remote.http._READ_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "has sent nothing for 0.2 seconds" in refusal(url, "edgeinfer")
