"""Opening the app from the command line, in a window or in the browser; access to its page; and its end."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import types
import webbrowser
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from edgeinfer.apps.cli.main import main
from edgeinfer.apps.desktop import app
from edgeinfer.apps.desktop.app import STATIC, DesktopConfig, run
from edgeinfer.apps.desktop.settings import data_folder
from tests.apps.desktop.served import Window, served
from tests.cli import TIME_LIMIT, command, edgeinfer, environment, refuses
from tests.speculation import needs_builtin
from tests.tables import each_row

pytestmark = [
    needs_builtin,
    pytest.mark.skipif(not (STATIC / "index.html").is_file(), reason="this copy comes without the page"),
]


@needs_builtin
@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_without_a_window(tmp_path: Path, number: signal.Signals) -> None:
    words = command("chat", "--no-window", "--data", tmp_path, "--temperature", "0", "-n", "5", "--system", "Be kind.")
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(words, env=environment(), stdout=pipe, stderr=pipe, text=True) as app,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(app.kill)
        assert app.stdout is not None
        address = urlsplit(app.stdout.readline().strip())
        with httpx.Client(base_url=f"http://{address.netloc}", timeout=TIME_LIMIT) as http:
            assert http.get(f"/?{address.query}").status_code == 303
            settings = http.get("/app/api/state").json()["settings"]
            assert (settings["options"], settings["system"]) == ({"temperature": 0.0, "max_tokens": 5}, "Be kind.")
            # A stream that is open does not keep it from ending.
            with http.stream("GET", "/app/api/events") as events:
                next(events.iter_lines())
                app.send_signal(number)
                assert app.wait(TIME_LIMIT) == 0
        said = app.communicate(timeout=TIME_LIMIT)
    assert said == ("", "")
    assert (tmp_path / "history.sqlite3").is_file()


@needs_builtin
def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refuses(2, "is in use", edgeinfer("chat", "--no-window", "--data", tmp_path, "--port", port))


def test_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--terminal", "--port", "80"]) == 2
    assert "--port belongs to the window" in capsys.readouterr().err
    assert main(["chat", "--no-window", "--data", str(tmp_path), "--stop", "x"]) == 2
    assert "Unknown option 'stop'" in capsys.readouterr().err
    assert main(["chat", "--no-window", "--data", str(tmp_path), "-m", "/no/such/model"]) == 3
    assert "No model at" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["chat", "--no-window", "--data", str(tmp_path / "file")]) == 5
    assert "--data" in capsys.readouterr().err


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("edgeinfer.apps.desktop")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    assert main(["chat", "--no-window"]) == 2
    said = capsys.readouterr().err
    assert "pip install 'edgeinfer[desktop]'" in said
    assert "edgeinfer chat --terminal" in said
    assert said.count("\n") == 1


def test_the_users_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert data_folder().history == tmp_path / "edgeinfer" / "history.sqlite3"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder().path == tmp_path / ".local" / "share" / "edgeinfer"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert data_folder().path == tmp_path / "Library" / "Application Support" / "edgeinfer"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert data_folder().path == tmp_path / "local" / "edgeinfer"


@needs_builtin
def test_a_window_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def start(**options: object) -> None:
        # What the window would do before it is closed.
        assert threading.current_thread() is threading.main_thread()
        assert httpx.get(shown[0], timeout=TIME_LIMIT).status_code == 303

    toolkit = types.ModuleType("webview")
    toolkit.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    toolkit.create_window = lambda title, url, **_: shown.append(url)  # type: ignore[attr-defined]
    toolkit.start = start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "webview", toolkit)
    monkeypatch.setenv("DISPLAY", ":0")
    told: list[str] = []
    run(DesktopConfig(data=tmp_path), told.append)
    assert told == []
    with pytest.raises(httpx.ConnectError):
        httpx.get(shown[0])


@needs_builtin
def test_the_browser_where_there_is_no_window_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_has_display", lambda: False)
    opened: list[str] = []

    def open_browser(url: str) -> bool:
        opened.append(url)
        signal.raise_signal(signal.SIGINT)
        return True

    monkeypatch.setattr(webbrowser, "open", open_browser)
    told: list[str] = []
    run(DesktopConfig(data=tmp_path), told.append)
    assert told == [f"edgeinfer is open at {opened[0]}", "Ctrl-C ends it."]


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
