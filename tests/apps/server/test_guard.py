"""What the server lets in: configuration and middleware: names, origins, keys, limits, paths. Without a model."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

pytest.importorskip("starlette", reason="the server extra is not installed")

from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.host import ModelHost
from edgeinfer.apps.server.security import ApiKey, KeyUse, Security, is_loopback, parse_keys
from edgeinfer.core.errors import UsageError
from edgeinfer.openai.errors import RequestError
from tests.apps.server.served import served
from tests.tables import each_row

KEY = "a-key-of-some-length"
BEARER = {"Authorization": f"Bearer {KEY}"}


def ask(
    *requests: tuple[str, str, dict[str, Any]], security: Security | None = None, routes: Any = ()
) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        host = ModelHost()
        app = make_app(host, security or Security(), extra_routes=routes)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8080") as client:
            answers = [await client.request(method, path, **options) for method, path, options in requests]
        await host.close()
        return answers

    return asyncio.run(run())


def ask_one(method: str, path: str, security: Security | None = None, **options: Any) -> httpx.Response:
    return ask((method, path, options), security=security)[0]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer in OpenAI's format."""
    inner: dict[str, Any] = answer.json()["error"]
    assert set(inner) == {"message", "type", "param", "code"}
    assert inner["message"]
    return inner


def test_unknown_paths_and_wrong_methods() -> None:
    requests = [("GET", path) for path in ("/v1/nothing", "/v1", "/v2/models", "/v1/chat/completions/", "/%00%0a")]
    requests += [("OPTIONS", "/v1/nothing")]
    for request, answer in zip(requests, ask(*((*each, {}) for each in requests)), strict=True):
        assert (answer.status_code, error_of(answer)["code"]) == (404, "not_found"), request
    requests = [
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/metrics"),
        ("DELETE", "/health"),
        ("PUT", "/v1/responses"),
    ]
    for request, answer in zip(requests, ask(*((*each, {}) for each in requests)), strict=True):
        assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed"), request
        assert answer.headers["allow"]
    answer = ask_one("OPTIONS", "/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (204, "POST, OPTIONS")


def test_without_a_model_requests_are_put_off() -> None:
    answers = ask(
        ("POST", "/v1/chat/completions", {"json": {"messages": [{"role": "user", "content": "Hello"}]}}),
        ("POST", "/v1/completions", {"json": {"prompt": "Hello"}}),
        ("POST", "/v1/responses", {"json": {"input": "Hello"}}),
        ("POST", "/tokenize", {"json": {"content": "Hello"}}),
        ("GET", "/props", {}),
    )
    for answer in answers:
        assert answer.status_code == 503
        assert error_of(answer)["code"] == "no_model"
        assert answer.headers["retry-after"]


def test_health_models_and_metrics_without_a_model() -> None:
    *health, models, metrics = ask(*(("GET", path, {}) for path in ("/health", "/v1/health", "/v1/models", "/metrics")))
    for answer in health:
        assert (answer.status_code, answer.json()["status"]) == (503, "empty")
        error_of(answer)
    assert models.json() == {"object": "list", "data": []}
    assert 'edgeinfer:requests_total{status="200"} 1' in metrics.text


@each_row(
    ("headers", "code"),
    [
        ({"Host": "evil.com"}, "host_not_allowed"),
        ({"Origin": "http://evil.com"}, "origin_not_allowed"),
        ({"Origin": "http://localhost:3000"}, "origin_not_allowed"),
        ({"Host": "localhost:80"}, None),
        ({"Origin": "http://localhost:8080"}, None),
    ],
)
def test_hosts_and_origins(headers: dict[str, str], code: str | None) -> None:
    """Which names and origins are known, the tests of `Security` below tell."""
    answer = ask_one("GET", "/v1/models", headers=headers)
    assert answer.status_code == (200 if code is None else 403)
    assert code is None or error_of(answer)["code"] == code
    assert "access-control-allow-origin" not in answer.headers


PREFLIGHT = {
    "Origin": "https://example.com",
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_origins_that_were_allowed() -> None:
    security = Security(allowed_origins=("https://example.com",), api_keys=(ApiKey(KEY),))
    answer = ask_one("GET", "/v1/models", security, headers=BEARER | {"Origin": "https://example.com"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://example.com"
    assert answer.headers["vary"] == "Origin"
    # What is refused must be readable too, or the page could not say why.
    refused = ask_one("GET", "/v1/models", security, headers={"Origin": "https://example.com"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.com"


def test_preflight() -> None:
    security = Security(allowed_origins=("https://example.com",), api_keys=(ApiKey(KEY),))
    answer = ask_one("OPTIONS", "/v1/chat/completions", security, headers=PREFLIGHT)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == "https://example.com"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
    assert ask_one("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT).status_code == 403


@each_row("headers", [{}, {"Authorization": "Bearer wrong-key"}, {"Authorization": f"Basic {KEY}"}])
def test_a_key_is_asked_for(headers: dict[str, str]) -> None:
    security = Security(api_keys=(ApiKey(KEY),))
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/v1/chat/completions")):
        answer = ask_one(method, path, security, headers=headers)
        assert answer.status_code == 401
        assert error_of(answer)["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert ask_one("GET", "/v1/models", security, headers=BEARER).status_code == 200
    # Health is everybody's to ask.
    assert ask_one("GET", "/health", security, headers=headers).status_code == 503


def test_extra_routes_ask_for_themselves() -> None:
    async def page(_: Request) -> Response:
        return PlainTextResponse("a page")

    routes = [Route("/page", page)]
    request: tuple[str, str, dict[str, Any]] = ("GET", "/page", {})
    assert ask(request, security=Security(api_keys=(ApiKey(KEY),)), routes=routes)[0].text == "a page"
    evil: tuple[str, str, dict[str, Any]] = ("GET", "/page", {"headers": {"Host": "evil.com"}})
    assert ask(evil, routes=routes)[0].status_code == 403


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"nonsense", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": -Infinity}', "invalid_json"),
        (b'{"a": 1e999}', "invalid_json"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'{"a": "\xff\xfe"}', "invalid_json"),
        (rb'{"a": "\ud800"}', "invalid_json"),
        (rb'{"\udc00": 1}', "invalid_json"),
        ('{"a": 1}'.encode("utf-16"), "invalid_json"),
        (b"[]", "invalid_json"),
        (b"3", "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"a": ' + b"[" * 150 + b"]" * 150 + b"}", "too_deep"),
        (b'{"a": ' * 150 + b"1" + b"}" * 150, "too_deep"),
        (b"[" * 200_000, "too_deep"),
        (b"{" + b"[" * 1_000_000, "too_many_values"),
        (b'{"a": [' + b"{}," * 1_000_000 + b"1]}", "too_many_values"),
        (json.dumps({"response_format": {"schema": {"enum": ["x" * 300_000]}}}).encode(), "schema_too_large"),
        (json.dumps({"tools": [{"name": "x" * 100}] * 3000}).encode(), "schema_too_large"),
    ],
)
def test_bodies_that_are_no_good(content: bytes, code: str) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
        answer = ask_one("POST", path, content=content)
        assert answer.status_code == 400, answer.text
        assert error_of(answer)["code"] == code


def test_large_bodies_are_refused_before_they_are_read() -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    headers = {"Content-Length": str(100 * 1000**2)}
    answer = ask_one("POST", "/v1/chat/completions", content=never(), headers=headers)
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"


def test_bodies_of_unknown_size_are_counted() -> None:
    sent = 0

    async def much() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 100_000
            yield b" " * 100_000

    answer = ask_one("POST", "/v1/chat/completions", content=much())
    assert answer.status_code == 413
    assert sent < 5_000_000


def test_slow_bodies_are_refused() -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.get_running_loop().create_future()

    answer = ask_one("POST", "/v1/chat/completions", Security(body_seconds=0.05), content=slow())
    assert answer.status_code == 408
    assert error_of(answer)["code"] == "request_timeout"
    assert answer.headers["connection"] == "close"


def test_faults_of_ours_say_nothing_of_the_inside(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_: Request) -> Response:
        raise ValueError("the prompt was: a secret")

    with caplog.at_level(logging.INFO, "edgeinfer.server"):
        answer = ask(("GET", "/broken?query=secret", {}), routes=[Route("/broken", broken)])[0]
    assert answer.status_code == 500
    assert error_of(answer)["code"] == "internal_error"
    assert "secret" not in answer.text
    # The log tells the place, and neither what was said nor the query.
    assert "ValueError" in caplog.text
    assert "test_guard.py" in caplog.text
    assert "secret" not in caplog.text


def test_the_log_cannot_be_written_by_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "edgeinfer.server"):
        ask_one("GET", "/a%0aGET '/forged' 200")
    assert all("\n" not in record.getMessage() for record in caplog.records)


def test_every_answer_has_an_id_and_is_what_it_says() -> None:
    answers = ask(("GET", "/v1/models", {}), ("GET", "/nothing", {}), ("GET", "/health", {}))
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "server" not in answer.headers


def test_what_is_loopback_and_what_others_can_reach() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost", "LOCALHOST"):
        assert is_loopback(host), host
        assert Security(host=host).knows_host("localhost:80")
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.com", "localhost.example.com"):
        assert not is_loopback(host), host
        with pytest.raises(UsageError, match="no API key"):
            Security(host=host)
        Security(host=host, api_keys=(ApiKey(KEY),))


NAMED = Security(host="box.lan", allowed_hosts=("models.example.com", "fe80::1"), api_keys=(ApiKey(KEY),))
ALL_INTERFACES = Security(host="0.0.0.0", api_keys=(ApiKey(KEY),))


@each_row(
    ("security", "known", "unknown"),
    [
        (
            Security(),
            ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "LocalHost:80"),
            (
                *(
                    None,
                    "",
                    "evil.com",
                    "localhost.evil.com",
                    "evil.com:8080",
                    "192.168.1.2",
                    "localhost:",
                    "[::2]",
                    "::1",
                ),
                *(
                    "localhost:8080:1",
                    "user@localhost",
                    "localhost/",
                    "localhost ",
                    "127.0.0.1.evil.com",
                    "localhost\n",
                ),
            ),
        ),
        (NAMED, ("box.lan:8080", "MODELS.example.com", "[fe80::1]:80", "localhost"), ("192.168.1.2",)),
        # Any address and no name.
        (ALL_INTERFACES, ("192.168.1.2:8080", "[fe80::1]:8080"), ("evil.com", "999.1.1.1")),
    ],
)
def test_known_names(security: Security, known: tuple[str, ...], unknown: tuple[str | None, ...]) -> None:
    assert [name for name in known if not security.knows_host(name)] == []
    assert [name for name in unknown if security.knows_host(name)] == []


def test_origins() -> None:
    security = Security(allowed_origins=("https://Example.com",))
    assert security.allows_origin("https://example.com")
    assert not security.allows_origin("http://example.com")
    assert not security.allows_origin("https://example.com.evil.com")
    assert not security.allows_origin("null")
    assert security.is_same_origin("http://localhost:8080", "LOCALHOST:8080")
    assert not security.is_same_origin("http://localhost:3000", "localhost:8080")
    assert not security.is_same_origin("null", "localhost:8080")


def test_all_origins_need_a_key() -> None:
    with pytest.raises(UsageError, match="any page"):
        Security(allowed_origins=("*",))
    assert Security(allowed_origins=("*",), api_keys=(ApiKey(KEY),)).allows_origin("https://anything")


def test_keys() -> None:
    key = ApiKey(KEY)
    for right in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY} "):
        assert key.is_given(right), right
    for wrong in (f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer", "Bearer \u00fc\u00e4", "", None):
        assert not key.is_given(wrong), wrong


def test_files_of_keys() -> None:
    text = f"# laptops\n{KEY}\n\n{KEY}-2 requests=3 tokens=500\n"
    assert parse_keys(text, "keys.txt") == (ApiKey(KEY), ApiKey(f"{KEY}-2", 3, 500))
    for wrong in (
        "",
        "# none",
        "short",
        *(f"{KEY} {limit}" for limit in ("requests", "requests=-1", "requests=0", "a=1")),
    ):
        with pytest.raises(UsageError) as caught:
            parse_keys(wrong, "keys.txt")
        assert KEY not in str(caught.value)


def test_keys_have_what_comes_back_within_the_minute() -> None:
    now = [0.0]
    use = KeyUse(ApiKey(KEY, requests=2), lambda: now[0])
    use.admit()
    use.admit()
    with pytest.raises(RequestError, match="has had its requests") as caught:
        use.admit()
    assert (caught.value.status, caught.value.code) == (429, "rate_limit_exceeded")
    now[0] = 31.0
    use.admit()
    with pytest.raises(RequestError):
        use.admit()
    # What was not asked for is not saved up for longer than a minute.
    now[0] = 10_000.0
    use.admit()
    use.admit()
    with pytest.raises(RequestError):
        use.admit()


def test_the_key_is_not_shown() -> None:
    assert KEY not in repr(Security(api_keys=(ApiKey(KEY),)))


def test_wrong_values_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        *({"key": key} for key in ("", "short", "with space in it", "schlüssel-mit-umlaut")),
        *({"allowed_origins": (origin,)} for origin in ("example.com", "https://example.com/path")),
        *({"allowed_hosts": (host,)} for host in ("http://example.com", "a b")),
        *(
            {"max_body": 0},
            {"max_depth": -1},
            {"body_seconds": 0.0},
            {"body_seconds": math.nan},
            {"body_rate": math.inf},
        ),
    ]
    for options in wrong:
        with pytest.raises(UsageError):
            (ApiKey if "key" in options else Security)(**options)


def test_bodies_take_a_share_of_the_budget() -> None:
    assert [Security().within(budget).max_bodies for budget in (160_000_000, 10**9, None)] == [
        *(10_000_000, 16_000_000, 16_000_000)
    ]
    assert Security(api_keys=(ApiKey(KEY),)).within(10**8).api_keys


@pytest.mark.slow
def test_a_served_key_has_its_limits() -> None:
    keys = (ApiKey(KEY, tokens=8), ApiKey(f"{KEY}-2"))
    with served(security=Security(api_keys=keys)) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}

        def ask(key: str, **more: Any) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return server.post("/v1/completions", body | more, headers=headers).status_code

        # Streamed or not, the tokens of a reply count when it is over; the other key has its own.
        assert [ask(KEY, stream=True), ask(KEY), ask(f"{KEY}-2"), ask(f"{KEY}-2")] == [200, 429, 200, 200]
        assert ask(f"{KEY}-3") == 401
