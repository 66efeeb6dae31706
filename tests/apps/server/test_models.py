"""Models that clients load, unload and have fetched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer import hub
from edgeinfer.core.errors import HubError
from tests.apps.server.served import Local, chat_body, served
from tests.speculation import needs_builtin
from tests.waiting import wait_until

pytestmark = needs_builtin


@pytest.fixture(scope="module")
def switching() -> Iterator[Local]:
    """A server whose clients may have models loaded and fetched."""
    with served(models=True, downloads=True) as running:
        yield running


def status(server: Local) -> str:
    return str(server.get("/v1/models").json()["data"][0]["status"]["value"])


def events(server: Local, last: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The events of models up to one."""
    found: list[dict[str, Any]] = []
    with server.http.stream("GET", f"{server.url}/models/sse") as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if last(found[-1]):
                    return found
    return found


def test_a_model_is_unloaded_and_loaded(switching: Local) -> None:
    assert events(switching, lambda _: True) == [
        {"model": "tales", "event": "status_change", "data": {"status": "loaded"}}
    ]
    assert status(switching) == "loaded"
    assert switching.post("/models/unload", {"model": "tales"}).json() == {"success": True}
    wait_until(lambda: status(switching) == "sleeping", "the model is unloaded")
    assert switching.post("/models/unload", {"model": "tales"}).status_code == 400
    assert switching.post("/v1/models/load", {"model": "tales"}).json() == {"success": True}
    wait_until(lambda: status(switching) == "loaded", "the model is loaded")
    unknown = switching.post("/models/load", {"model": "nothing"})
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert switching.post("/models/load", {}).json()["error"]["param"] == "model"
    assert switching.post("/v1/chat/completions", chat_body(max_tokens=1)).status_code == 200


def test_a_model_is_fetched_with_progress(switching: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def resolve(name: str, *, progress: Callable[[str, int, int], None], **_: Any) -> Path:
        asked.append(name)
        if name == "org/none":
            raise HubError("The hub has no org/none.", "Check the name.")
        for done in (5, 10):
            progress("downloading", done, 10)
        return Path("here")

    monkeypatch.setattr(hub, "resolve", resolve, raising=False)
    lines = [json.loads(line) for line in switching.post("/api/pull", {"model": "hf.co/org/some:Q4_K_M"}).iter_lines()]
    assert lines[0] == {"status": "pulling manifest"} and lines[-1] == {"status": "success"}
    assert all(line["total"] == 10 and line["status"] == "downloading" for line in lines[1:-1])
    assert switching.post("/api/pull", {"name": "org/some", "stream": False}).json() == {"status": "success"}
    (*_, failed) = map(json.loads, switching.post("/api/pull", {"model": "org/none"}).iter_lines())
    assert failed["error"].startswith("The hub has no org/none.")
    assert switching.post("/api/pull", {"model": "org/none", "stream": False}).status_code == 502
    assert switching.post("/models", {"model": "org/other"}).json() == {"success": True}
    found = events(switching, lambda event: (event["model"], event["event"]) == ("org/other", "download_finished"))
    assert {event["model"] for event in found} >= {"tales", "org/other"}
    assert asked == ["org/some:Q4_K_M", "org/some", "org/none", "org/none", "org/other"]
    for path in ("/etc/passwd", "../x", "a/b/c", "", "~/m"):
        assert switching.post("/models", {"model": path}).status_code == 400
    assert len(asked) == 5


def test_nothing_is_fetched_unless_the_server_was_started_so(server: Local) -> None:
    for path in ("/api/pull", "/models"):
        refused = server.post(path, {"model": "org/some"})
        assert refused.status_code == 501 and "--downloads on" in refused.text
