"""Who may see the page and what is behind it, and what browsers are told."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from edgeinfer.apps.desktop.app import STATIC
from tests.apps.desktop.served import Window, served
from tests.speculation import needs_builtin
from tests.tables import each_row
from tests.waiting import TIME_LIMIT

pytestmark = [
    needs_builtin,
    pytest.mark.skipif(not (STATIC / "index.html").is_file(), reason="this copy comes without the page"),
]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    with served(tmp_path_factory.mktemp("data")) as opened:
        yield opened


@pytest.fixture
def stranger(window: Window) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=window.http.base_url, timeout=TIME_LIMIT) as http:
        yield http


def test_the_key_is_changed_for_a_cookie(window: Window, stranger: httpx.Client) -> None:
    answer = stranger.get("/", params={"key": window.key})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert window.key not in cookie
    assert stranger.get("/").status_code == 200


def test_strangers_see_nothing(window: Window, stranger: httpx.Client) -> None:
    for path in ("/", "/?key=wrong", "/?key="):
        answer = stranger.get(path)
        assert answer.status_code == 401
        assert "the address that edgeinfer showed" in answer.text
        assert "set-cookie" not in answer.headers
    for method, path in (("GET", "/state"), ("GET", "/conversations"), ("POST", "/import"), ("GET", "/events")):
        refused = stranger.request(method, f"/app/api{path}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "signed_out")
    wrong = stranger.get("/app/api/state", headers={"Cookie": f"edgeinfer_{stranger.base_url.port}=wrong"})
    assert wrong.status_code == 401
    assert stranger.get("/app/api/state", headers={b"Authorization": "Bearer é".encode()}).status_code == 401
    assert stranger.get("/app/api/state", headers={"Authorization": f"Bearer {window.key}"}).status_code == 200


@each_row("headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "http://127.0.0.1:1"}])
def test_other_sites_are_refused(window: Window, headers: dict[str, str]) -> None:
    assert window.http.get("/app/api/state", headers=headers).status_code == 403
    assert window.http.post("/app/api/conversations", json={}, headers=headers).status_code == 403


def test_browsers_are_told_to_load_nothing_from_elsewhere(window: Window) -> None:
    files = [f"/{path.relative_to(STATIC).as_posix()}" for path in STATIC.rglob("*") if path.is_file()]
    for path in ("/", *(file for file in files if file != "/index.html")):
        answer = window.http.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["content-security-policy"] == (
            "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@each_row("path", ["/app.py", "/static/index.html", "/css/../../app.py", "/css/%2e%2e/%2e%2e/app.py"])
def test_other_files_are_not_served(window: Window, path: str) -> None:
    assert window.http.get(path).status_code == 404


def test_programs_with_the_key_are_served_beside_the_page(stranger: httpx.Client, window: Window) -> None:
    window.wait("model", status="ready")
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    assert stranger.post("/v1/chat/completions", json=body).status_code == 401
    bearer = {"Authorization": f"Bearer {window.key}"}
    answer = stranger.post("/v1/chat/completions", json=body, headers=bearer)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
