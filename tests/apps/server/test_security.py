"""What the server lets in, by its configuration alone."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.errors import UsageError

pytest.importorskip("starlette", reason="the server extra is not installed")

from edgeinfer.apps.server.security import Security, is_loopback

KEY = "a-key-of-some-length"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "[::1]", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    assert Security(host=host).knows_host("localhost:80")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "localhost.example.com"])
def test_others_can_reach_what_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UsageError, match="no API key"):
        Security(host=host)
    Security(host=host, api_key=KEY)


@pytest.mark.parametrize("authority", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "LocalHost:80"])
def test_loopback_names_are_known(authority: str) -> None:
    assert Security().knows_host(authority)


@pytest.mark.parametrize(
    "authority",
    [
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
    ],
)
def test_other_names_are_not(authority: str | None) -> None:
    assert not Security().knows_host(authority)


def test_names_that_were_given_are_known() -> None:
    security = Security(host="box.lan", allowed_hosts=("models.example.com", "fe80::1"), api_key=KEY)
    for authority in ("box.lan:8080", "MODELS.example.com", "[fe80::1]:80", "localhost"):
        assert security.knows_host(authority)
    assert not security.knows_host("192.168.1.2")


def test_on_all_interfaces_any_address_is_known_and_no_name() -> None:
    security = Security(host="0.0.0.0", api_key=KEY)
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
    assert Security(allowed_origins=("*",), api_key=KEY).allows_origin("https://anything")


@pytest.mark.parametrize(
    ("authorization", "accepted"),
    [
        (f"Bearer {KEY}", True),
        (f"bearer {KEY}", True),
        (f"Bearer  {KEY} ", True),
        (f"Basic {KEY}", False),
        (f"Bearer {KEY}x", False),
        (f"Bearer {KEY[:-1]}", False),
        ("Bearer", False),
        ("Bearer \u00fc\u00e4", False),
        ("", False),
        (None, False),
    ],
)
def test_keys(authorization: str | None, accepted: bool) -> None:
    assert Security(api_key=KEY).accepts_key(authorization) == accepted
    assert Security().accepts_key(authorization)


def test_the_key_is_not_shown() -> None:
    assert KEY not in repr(Security(api_key=KEY))


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_key": ""},
        {"api_key": "short"},
        {"api_key": "with space in it"},
        {"api_key": "schlüssel-mit-umlaut"},
        {"allowed_origins": ("example.com",)},
        {"allowed_origins": ("https://example.com/path",)},
        {"allowed_hosts": ("http://example.com",)},
        {"allowed_hosts": ("a b",)},
        {"max_body": 0},
        {"max_depth": -1},
        {"body_seconds": 0.0},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Security(**wrong)
