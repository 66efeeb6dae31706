"""What the server lets in, by its configuration alone."""

from __future__ import annotations

import math
from typing import Any

import pytest

from edgeinfer.errors import UsageError
from edgeinfer.openai.errors import RequestError
from tests.apps.server.served import served

pytest.importorskip("starlette", reason="the server extra is not installed")

from edgeinfer.apps.server.security import ApiKey, KeyUse, Security, is_loopback, parse_keys

KEY = "a-key-of-some-length"


def test_loopback() -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost", "LOCALHOST"):
        assert is_loopback(host), host
        assert Security(host=host).knows_host("localhost:80")


def test_others_can_reach_what_is_not_loopback() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.com", "localhost.example.com"):
        assert not is_loopback(host), host
        with pytest.raises(UsageError, match="no API key"):
            Security(host=host)
        Security(host=host, api_keys=(ApiKey(KEY),))


def test_loopback_names_are_known() -> None:
    for authority in ("localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "LocalHost:80"):
        assert Security().knows_host(authority), authority


def test_other_names_are_not() -> None:
    for authority in (
        None,
        "",
        "evil.com",
        "localhost.evil.com",
        "evil.com:8080",
        "192.168.1.2",
        "localhost:",
        "localhost:8080:1",
        "user@localhost",
        "localhost/",
        "localhost ",
        "[::2]",
        "::1",
        "127.0.0.1.evil.com",
        "localhost\n",
    ):
        assert not Security().knows_host(authority), authority


def test_names_that_were_given_are_known() -> None:
    security = Security(host="box.lan", allowed_hosts=("models.example.com", "fe80::1"), api_keys=(ApiKey(KEY),))
    for authority in ("box.lan:8080", "MODELS.example.com", "[fe80::1]:80", "localhost"):
        assert security.knows_host(authority)
    assert not security.knows_host("192.168.1.2")


def test_on_all_interfaces_any_address_is_known_and_no_name() -> None:
    security = Security(host="0.0.0.0", api_keys=(ApiKey(KEY),))
    assert security.knows_host("192.168.1.2:8080")
    assert security.knows_host("[fe80::1]:8080")
    assert not security.knows_host("evil.com")
    assert not security.knows_host("999.1.1.1")


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
    for wrong in ("", "# none", "short", f"{KEY} requests", f"{KEY} requests=-1", f"{KEY} requests=0", f"{KEY} a=1"):
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
