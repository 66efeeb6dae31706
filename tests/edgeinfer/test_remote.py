"""Replies that a server decides and this model drafts: edgeinfer's, and OpenAI's as a stub speaks."""

from __future__ import annotations

import json
import math
import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import edgeinfer
from edgeinfer.core.errors import CapabilityError, RemoteError, UsageError
from edgeinfer.core.options.load import RemoteApi
from edgeinfer.runtime.remote.channel import Channel
from edgeinfer.runtime.speculation.speculator import Speculator
from tests.edgeinfer.stub_engines import StubEngine, answering, stub
from tests.speculation import needs_builtin
from tests.tools.link import Link
from tests.waiting import TIME_LIMIT, wait_until

if TYPE_CHECKING:
    from tests.apps.server.served import Local

pytestmark = [pytest.mark.slow, needs_builtin]
PROMPTS = ("Once upon a time", "The little dog", 'Tom said: "', "A list of words:")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3},
    {"temperature": 1.2, "seed": 4, "repetition_penalty": 1.3, "top_k": 50, "logit_bias": {5: 2.0, 9: float("-inf")}},
    {"temperature": 0.7, "seed": 5, "regex": "[a-z ]{30,60}"},
)


@pytest.fixture(scope="module")
def server() -> Iterator[Local]:
    from tests.apps.server.served import served

    with served("small") as running:
        yield running


@pytest.fixture(scope="module")
def alone() -> Iterator[edgeinfer.Model]:
    with edgeinfer.load(speculation="off") as model:
        yield model


@pytest.fixture
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of any lengths and streams take turns, whatever the clock says of them."""
    chance = random.Random(1)
    monkeypatch.setattr(Channel, "length", lambda _: chance.choice((None, 0, 1, 4, 9)))
    monkeypatch.setattr(Channel, "tokens_of_stream", lambda _: chance.choice((3, None)))
    monkeypatch.setattr(Channel, "leaves", lambda _: chance.random() < 0.3)


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "drawn", "penalties", "regex"])
def test_the_text_is_the_servers(server: Local, alone: edgeinfer.Model, options: dict[str, Any]) -> None:
    with edgeinfer.load(remote=server.url) as model:
        for prompt in PROMPTS[:2]:
            wanted = alone.generate(prompt, max_tokens=50, **options)
            reply = model.generate(prompt, max_tokens=50, **options)
            assert (reply.token_ids, reply.text) == (wanted.token_ids, wanted.text)
            assert reply.finish_reason == wanted.finish_reason
            use = reply.remote
            assert use is not None and use.model == "tales" and use.digest == alone.digest
            assert not use.local
            assert use.rounds + use.accepted + use.streamed >= len(wanted.token_ids)


@pytest.mark.usefixtures("any_length")
def test_losses_and_delays_change_no_text(server: Local, alone: edgeinfer.Model) -> None:
    chance = random.Random(28)
    # Cut within headers, within events, and long after the first rounds. More than six in a row would end the reply.
    cuts = iter([10_000 if at % 5 == 4 else chance.choice((0, 40, 300, 900, 2_500)) for at in range(60)])
    rounds = streamed = retries = 0
    with (
        Link(server.port, rtt_ms=2.0, mbits=50.0, cuts=cuts) as link,
        edgeinfer.load(remote=link.url) as model,
    ):
        for prompt in PROMPTS[:2]:
            for options in OPTIONS[:3]:
                reply = model.generate(prompt, max_tokens=40, **options)
                assert reply.token_ids == alone.generate(prompt, max_tokens=40, **options).token_ids
                assert reply.remote is not None
                retries += reply.remote.retries
                rounds, streamed = rounds + reply.remote.rounds, streamed + reply.remote.streamed
        assert link.sent and link.received
    assert min(rounds, streamed, retries) > 10


@pytest.mark.usefixtures("any_length")
def test_a_reply_pauses_and_goes_on(server: Local, alone: edgeinfer.Model) -> None:
    wanted = alone.generate(PROMPTS[0], max_tokens=40)
    with edgeinfer.load(remote=server.url) as model:
        first = model.stream(PROMPTS[0], max_tokens=40)
        for _ in range(7):
            next(first)
        assert first.pause()
        assert (
            model.generate(PROMPTS[1], max_tokens=10).token_ids == alone.generate(PROMPTS[1], max_tokens=10).token_ids
        )
        assert first.complete().token_ids == wanted.token_ids
        left = model.stream(PROMPTS[0], max_tokens=400)
        next(left)
        left.close()
        assert left.result.finish_reason == "cancelled"


def test_a_lost_server_ends_the_reply_or_leaves_it_to_the_local_model(
    server: Local, alone: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgeinfer.runtime.remote import http

    monkeypatch.setattr(http, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(http, "_TRIES", 2)
    wanted = alone.generate(PROMPTS[0], max_tokens=60).token_ids
    for loss in ("stop", "local"):
        with Link(server.port) as link, edgeinfer.load(remote_loss=loss, remote=link.url) as model:
            stream = model.stream(PROMPTS[0], max_tokens=60)
            next(stream)
            link.close()
            if loss == "stop":
                with pytest.raises(RemoteError, match="cannot be reached") as caught:
                    stream.complete()
                assert caught.value.lost and caught.value.hint
                made = stream.result.token_ids
                assert made == wanted[: len(made)] and made
            else:
                # Both machines have the same model here.
                assert stream.complete().token_ids == wanted
                use = stream.result.remote
                assert use is not None and use.local


def test_other_models_and_keys_are_refused(server: Local, alone: edgeinfer.Model) -> None:
    with (
        edgeinfer.load(remote=server.url, remote_digest="0" * 64) as model,
        pytest.raises(RemoteError, match="with the digest"),
    ):
        model.generate(PROMPTS[0], max_tokens=4)
    answer = server.post("/v1/verify", {"prompt": [1, 2], "vocabulary": "0" * 64})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "vocabulary_differs")


def test_rounds_are_refused_that_make_no_sense(server: Local, alone: edgeinfer.Model) -> None:
    prompt = list(alone.tokenize_prompt(PROMPTS[0]))
    opened = server.post("/v1/verify", {"prompt": prompt, "draft": [3]}).json()
    session = {"session": opened["session"]}
    for body, status, param in (
        ({"draft": [1]}, 400, "prompt"),
        ({"prompt": ["a"]}, 400, "prompt"),
        ({"prompt": prompt, "draft": [0] * 65}, 400, "draft"),
        ({"prompt": prompt, "temperature": -1}, 400, "temperature"),
        ({"prompt": prompt, "n": 2}, 400, "n"),
        ({"prompt": prompt, "search": "beam"}, 400, "search"),
        ({"prompt": [10**8]}, 400, None),
        ({"prompt": prompt, "session": "easily guessed"}, 400, "session"),
        ({"prompt": prompt, "replaces": opened["session"], "n": 2}, 400, "n"),
        ({"prompt": [1] * (alone.context + 1)}, 400, "prompt"),
        ({**session, "draft": []}, 400, "base"),
        ({**session, "base": 1}, 400, "base"),
        ({**session, "base": 10_000}, 409, "base"),
        ({**session, "base": opened["base"], "temperature": 1}, 400, "temperature"),
        ({"session": "unknown", "base": 3}, 409, "session"),
    ):
        answer = server.post("/v1/verify", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), body
    # Nor does a round go on behind an opening whose options were refused.
    refused = {"session": "a" * 24}
    assert server.post("/v1/verify", {"prompt": prompt, "regex": "(", **refused}).status_code == 400
    assert server.post("/v1/verify", {**refused, "base": len(prompt)}).status_code == 400
    again = server.post("/v1/verify", {**session, "base": len(prompt), "draft": [3]}).json()
    assert again["tokens"] == opened["tokens"]


def test_devices_in_company_get_the_text_though_their_drafts_are_cut(
    server: Local, alone: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.apps.server.served import held

    # Whatever the clock says of passes.
    monkeypatch.setattr(Speculator, "pass_ms", property(lambda _: lambda rows: 5.0 + rows))
    wanted = [alone.generate(prompt, max_tokens=40, ignore_eos=True, **OPTIONS[1]).token_ids for prompt in PROMPTS]
    prompts = [list(alone.tokenize_prompt(prompt)) for prompt in PROMPTS]
    texts: list[list[int]] = [[] for _ in PROMPTS]
    answers: list[dict[str, Any]] = [{} for _ in PROMPTS]
    cut = 0

    def ask(place: int) -> None:
        text, known = texts[place], answers[place]
        draft = list(wanted[place][len(text) : len(text) + 9])
        draft[-1:] = [7]  # which is wrong
        opening = {"prompt": prompts[place], "ignore_eos": True, **OPTIONS[1]}
        session = {"session": known["session"], "base": known["base"]} if known else opening
        answers[place] = server.post("/v1/verify", {**session, "draft": draft}).json()

    with ThreadPoolExecutor(len(PROMPTS)) as devices:
        while min(map(len, texts)) < 30:
            with held(server.host):
                rounds = [devices.submit(ask, place) for place in range(len(PROMPTS))]
                wait_until(lambda: server.host.running == len(PROMPTS), "rounds of all devices")
            for each in rounds:
                each.result(timeout=TIME_LIMIT)
            if not cut:
                # All prompts were evaluated in one pass, so all drafts were in the next.
                assert all(answer["stream_ms"] > 5.0 + len(PROMPTS) for answer in answers)
                # A round takes more than rows of so cheap passes.
                assert not any(answer["draft_tokens"] for answer in answers)
            for text, answer in zip(texts, answers, strict=True):
                text += answer["tokens"]
                assert len(answer["tokens"]) <= answer["verified"] + 1
                cut += answer["verified"] < 9
    assert all(text == list(right[: len(text)]) for text, right in zip(texts, wanted, strict=True))
    assert cut


@pytest.mark.usefixtures("any_length")
def test_a_device_alone_has_no_company(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.apps.server.served import served

    # Whatever the clock says of passes.
    monkeypatch.setattr(Speculator, "pass_ms", property(lambda _: lambda rows: 5.0 + rows))
    told: list[object] = []
    monkeypatch.setattr(Channel, "joins", lambda _, company: told.append(company))
    # A server of its own, as devices of other tests are silent for a while.
    with served() as server, edgeinfer.load(remote=server.url) as model:
        for prompt in PROMPTS[:2]:
            # Streams are left on the way, one reply is cancelled, and one follows the other at once.
            model.generate(prompt, max_tokens=30, ignore_eos=True)
            with model.stream(prompt, max_tokens=40) as left:
                next(left)
    assert len(told) > 10 and not any(told)


def test_a_server_forgets_what_is_asked_for_longest_ago() -> None:
    from edgeinfer.apps.server.verify import VerifySessions, _Session

    model: Any = type("Served", (), {"digest": "d"})
    sessions = VerifySessions(most=3, tokens=100)

    def opened(tokens: int) -> str:
        return sessions.open(_Session("d", (1,) * tokens, [], {}))

    def known(*names: str) -> list[bool]:
        found = []
        for name in names:
            try:
                found.append(bool(sessions.find(name, model)))
            except UsageError:
                found.append(False)
        return found

    first, second, third = opened(10), opened(10), opened(10)
    assert known(first)
    fourth = opened(10)
    assert known(first, second, third, fourth) == [True, False, True, True]
    assert sessions.going_on() == 0  # as none of them was heard of
    reply = _Session("d", (1,), [], {}, heard=math.inf)
    sessions.open(reply, "second", third)
    reply.right = reply.seen / 4
    assert known(first, third, "second") == [True, False, True] and sessions.going_on() == 1
    again = _Session("d", (1,), [], {}, heard=math.inf)
    assert sessions.open(again, "third", "second") == "third"
    assert again.acceptance == 0.25 and sessions.going_on() == 1
    again.over = True
    assert sessions.going_on() == 0
    large = opened(1_000)
    assert known(first, fourth, "third", large) == [False, False, False, True]


def test_nothing_is_sent_unless_a_server_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with edgeinfer.load() as model:
        reply = model.generate(PROMPTS[0], max_tokens=8)
    assert reply.remote is None and reply.token_ids


def test_options_of_servers_are_checked() -> None:
    for options, says in (
        ({"remote": "example.com"}, "not the URL"),
        ({"remote": "http://example.com"}, "could read"),
        ({"remote": "ftp://localhost"}, "not the URL"),
        ({"remote": "http://localhost:99999"}, "not the URL"),
        ({"remote": "http://[::1"}, "not the URL"),
        ({"remote": "https://a..example.com"}, "not the URL"),
        # IDNA 2003 and 2008 make names of different servers of it.
        ({"remote": "https://straße.de"}, "outside ASCII.*xn--"),
        ({"remote": "https://\N{KELVIN SIGN}.example.com"}, "outside ASCII"),
        ({"remote_key": "secret-key"}, "needs a server"),
        ({"remote": "http://localhost:1", "remote_key": "secret—key"}, "no API key"),
        ({"remote": "http://localhost:1", "remote_key": "secret\nkey"}, "no API key"),
        ({"remote": "http://localhost:1", "overflow": "window"}, "overflow"),
        ({"remote": "http://localhost:1", "remote_loss": "never"}, "remote_loss"),
    ):
        with pytest.raises(UsageError, match=says):
            edgeinfer.LoadOptions.of(**options)
    for url in (
        "http://localhost:8080",
        "http://192.168.1.4",
        "http://10.0.0.2/v1",
        "https://xn--strae-oqa.de/straße",
        "http://nas",
    ):
        assert edgeinfer.LoadOptions(remote=url).remote == url


def test_two_models_write_where_each_is_needed(server: Local, alone: edgeinfer.Model) -> None:
    drafter = Path(edgeinfer.__file__).parent / "builtin" / "tales" / "drafter"
    with edgeinfer.load(drafter, remote=server.url) as model, edgeinfer.load(drafter, speculation="off") as small:
        for share in (0.0, 0.5, 1.0):
            replies = [
                model.generate(prompt, max_tokens=40, ignore_eos=True, compute="entropy", compute_share=share)
                for prompt in PROMPTS
            ]
            uses = [reply.compute for reply in replies if reply.compute is not None]
            assert len(uses) == len(PROMPTS)
            shares = [use.large_share for use in uses]
            if share == 1.0:
                assert shares == [1.0] * 4 and all(use.lossless for use in uses)
                wanted = [alone.generate(prompt, max_tokens=40, ignore_eos=True) for prompt in PROMPTS]
                assert [reply.token_ids for reply in replies] == [reply.token_ids for reply in wanted]
            else:
                assert not any(use.lossless for use in uses)
                assert all(use.tokens == 40 for use in uses)
                assert 0.25 < sum(use.reduced for use in uses) / 160 < 0.75 or share == 0.0
            if share == 0.0:
                # The server's are those of the first turn, which lasts some tokens at least.
                assert sum(use.reduced for use in uses) > 80
        with pytest.raises(UsageError, match="does not go with drafts"):
            model.generate(PROMPTS[0], compute="exit")
        assert small.generate(PROMPTS[0], max_tokens=4).remote is None


# Servers of others.

PROMPT, TOKENS = "Once upon a time", 40


@pytest.fixture(scope="module")
def text(alone: edgeinfer.Model) -> list[int]:
    """What a model says that mostly agrees with the built-in one, with its prompt."""
    ids = list(alone.tokenize_prompt(PROMPT))
    for place in (12, 20):
        ids += alone.generate(ids, max_tokens=place).token_ids
        ids.append(alone.tokenize("purple", parse_special=False)[-1])
    return [*ids, *alone.generate(ids, max_tokens=3 * TOKENS).token_ids]


@pytest.mark.usefixtures("any_length")
def test_the_text_is_that_of_any_server(alone: edgeinfer.Model, text: list[int]) -> None:
    engine = StubEngine(text, alone)
    begins = len(alone.tokenize_prompt(PROMPT))
    wanted = text[begins : begins + TOKENS]
    with stub(engine) as url, edgeinfer.load(remote=url) as model:
        stream = model.stream(PROMPT, max_tokens=TOKENS)
        for _ in range(5):
            next(stream)
        stream.pause()
        result = stream.complete()
        use = result.remote
        assert use is not None and use.model == "big" and not use.local and not use.accepted and use.streamed > 5
        assert result.text == alone.detokenize(wanted)
        for options in ({"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.2}, {"regex": "[a-z]+"}):
            with pytest.raises(UsageError, match="for replies that an edgeinfer server decides"):
                model.generate(PROMPT, **options)


def test_a_text_server_ends_its_replies(alone: edgeinfer.Model) -> None:
    ids = list(alone.tokenize_prompt(PROMPT))
    said = alone.generate(PROMPT, max_tokens=6).token_ids
    engine = StubEngine([*ids, *said], alone)
    engine.ending = "stop"
    with stub(engine) as url, edgeinfer.load(remote=url, remote_api="openai") as model:
        result = model.generate(PROMPT, max_tokens=30)
        assert (result.text, result.finish_reason) == (alone.detokenize(said), "stop")
        # A control token that a stranger spells is text.
        (spelled, control), *_ = model._parts.tokenizer.control_texts.items()
        engine.text = f"so {spelled} it goes"
        result = model.generate(PROMPT, max_tokens=30)
        assert result.text == engine.text and control not in result.token_ids


def test_what_another_server_lacks_is_refused(alone: edgeinfer.Model, text: list[int]) -> None:
    refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
        ({"remote_model": "small"}, RemoteError, "has 'big', not 'small'"),
        ({"remote_digest": "0" * 64}, CapabilityError, "digest"),
    )
    with stub(StubEngine(text, alone)) as url:
        for options, error, says in refused:
            with edgeinfer.load(remote=url, **options) as model, pytest.raises(error, match=says):
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
        for api in ("edgeinfer", "openai"):
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
