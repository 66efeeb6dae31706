"""Killed without warning, during a reply and during a write: what was complete is there, and the file is sound."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from edgeinfer.apps.desktop.history import History
from tests.apps.desktop.held_app import HeldApp, held
from tests.apps.desktop.served import served
from tests.apps.desktop.test_history_files import sound
from tests.cli import environment
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT, wait_until

# Answers questions without end, and tells of each once it is kept; answers grow, so that kills find every page state.
WRITER = """
import itertools, sys
from pathlib import Path
from edgeinfer.apps.desktop.history import History
history = History.open(Path(sys.argv[1]))
id, parent = history.create().id, None
print(id, flush=True)
for number in itertools.count():
    asked, reply = history.ask(id, parent, f"question {number} " + "q" * (number * 97 % 5000))
    history.write(reply.id, "half of ")
    history.finish(reply.id, f"answer {number} " + "a" * (number * 131 % 9000), "complete")
    parent = reply.id
    print(asked.id, reply.id, flush=True)
"""


@pytest.mark.parametrize("after", [1, 2, 7, 23, 60, 150])
def test_during_a_write(tmp_path: Path, after: int) -> None:
    path = tmp_path / "history.sqlite3"
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        try:
            id = writer.stdout.readline().strip()
            told = [writer.stdout.readline().split() for _ in range(after)]
        finally:
            writer.kill()
        told += [line.split() for line in writer.stdout.read().splitlines()]
    history = History.open(path)
    assert history.put_aside is None
    kept = {message.id: message for message in history.conversation(id).messages}
    for number, (asked, reply) in enumerate(told):
        assert kept[asked].content == f"question {number} " + "q" * (number * 97 % 5000)
        assert kept[reply].content == f"answer {number} " + "a" * (number * 131 % 9000)
        assert kept[asked].status == kept[reply].status == "complete"
    rest = [message for message in kept.values() if message.id not in {each for pair in told for each in pair}]
    assert {message.status for message in rest} <= {"complete", "interrupted"}
    assert len(history.summaries("question")) == 1
    # And it goes on from there.
    history.ask(id, None, "again")
    history.close()
    assert sound(path)


@pytest.mark.slow
@needs_builtin
def test_during_a_reply(tmp_path: Path) -> None:
    with held(tmp_path) as app:
        address = urlsplit(app.address)
        with httpx.Client(base_url=f"http://{address.netloc}", timeout=TIME_LIMIT) as http:
            http.get(f"/?{address.query}")
            id, first, shown = _killed_in_the_second_reply(app, http, tmp_path / "history.sqlite3")
    with served(tmp_path) as window:
        messages = window.call("GET", f"/conversations/{id}")["messages"]
        assert [message["status"] for message in messages] == ["complete", "complete", "complete", "interrupted"]
        assert messages[1] == first
        assert messages[3]["content"]
        assert messages[3]["content"].startswith(shown) or shown.startswith(messages[3]["content"])
        path = f"/conversations/{id}/messages/{messages[3]['id']}/continue"
        window.call("PATCH", f"/conversations/{id}", {"options": {"max_tokens": 4}})
        window.call("POST", path, status=202)
        assert window.end(id)["content"].startswith(messages[3]["content"])
    assert sound(tmp_path / "history.sqlite3")


def _killed_in_the_second_reply(app: HeldApp, http: httpx.Client, file: Path) -> tuple[str, Any, str]:
    """The conversation, its first reply, and the text of the second that was shown before the app was killed."""
    api = "/app/api/conversations"
    id = http.post(api, json={}).json()["id"]
    http.patch(f"{api}/{id}", json={"options": {"max_tokens": 3}})
    body: dict[str, Any] = {"parent": None, "content": "Tell me a story."}
    # More than the first reply takes, and less than the second: it stays in the middle.
    app.let(20)
    http.post(f"{api}/{id}/messages", json=body)
    with http.stream("GET", f"{api}/{id}/reply") as stream:
        stream.read()
    first = http.get(f"{api}/{id}").json()["messages"][1]
    http.patch(f"{api}/{id}", json={"options": {"max_tokens": 400}})
    http.post(f"{api}/{id}/messages", json=body | {"parent": first["id"], "content": "Tell me more."})
    with http.stream("GET", f"{api}/{id}/reply") as stream:
        told = (json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: "))
        shown = next(data["content"] for data in told if data["content"])
    history = History.open(file)
    try:
        wait_until(lambda: history.conversation(id).messages[3].content, "the text of the second reply in the file")
        assert history.conversation(id).messages[3].status == "replying"
    finally:
        history.close()
    app.kill()
    return id, first, shown
