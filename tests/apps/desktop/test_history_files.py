"""The history as a file: its mode, damage, versions, other machines' SQLite, several processes, full disks, kills."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from edgeinfer.apps.desktop import database
from edgeinfer.apps.desktop.checks import DiskFullError
from edgeinfer.apps.desktop.database import Reserve
from edgeinfer.apps.desktop.history import History
from edgeinfer.core.errors import StorageError
from tests.apps.desktop.held_app import HeldApp, held
from tests.apps.desktop.served import served
from tests.cli import TIME_LIMIT, environment
from tests.speculation import needs_builtin
from tests.tables import each_row
from tests.waiting import wait_until

WRITER = """
import sys
from pathlib import Path
from edgeinfer.apps.desktop.history import History
history = History.open(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    id = history.create().id
    _, reply = history.ask(id, None, f"question {number}")
    history.write(reply.id, "half")
    history.finish(reply.id, "answer " * 50, "complete")
history.close()
"""

# Fills a disk with conversations, whose texts are random, deletes them one by one, and checks what is left each time.
FILL = """
import random
import sys
from pathlib import Path
from edgeinfer.apps.desktop.checks import DiskFullError
from edgeinfer.apps.desktop.history import History

folder, length = Path(sys.argv[1]), int(sys.argv[2])
draw = random.Random(1)
def text(length):
    return "".join(draw.choices("abcdefghij klmnop\\n", k=length))

history, kept = History.open(folder / "history.sqlite3"), {}
while True:
    id = None
    try:
        id = history.create().id
        asked, reply = history.ask(id, None, text(length))
        answer = text(length)
        history.finish(reply.id, answer, "complete")
        kept[id] = [asked.content, answer]
    except DiskFullError as error:
        assert error.hint
        if id is not None:
            kept[id] = [message.content for message in history.conversation(id).messages]
        break
# The smallest things take what is left.
try:
    for _ in range(1_000_000):
        kept[history.create("x" * 200).id] = []
except DiskFullError:
    pass
(folder / "rest").write_bytes(b"")
try:
    with (folder / "rest").open("wb", buffering=0) as file:
        while file.write(bytes(512)):
            pass
except OSError:
    pass
print("full", len(kept))
large = [id for id, texts in kept.items() if texts]
for id in large:
    history.delete(id)
    del kept[id]
    assert {summary.id for summary in history.summaries()} == set(kept)
    for other, texts in list(kept.items())[:20]:
        assert [message.content for message in history.conversation(other).messages] == texts
history.ask(history.create().id, None, text(2_000))
history.close()
History.open(folder / "history.sqlite3").close()
import sqlite3
connection = sqlite3.connect(folder / "history.sqlite3")
assert list(connection.execute("PRAGMA integrity_check")) == [("ok",)]
print("done", len(large))
"""


def sound(path: Path) -> bool:
    """Whether SQLite finds nothing wrong with a file."""
    connection = sqlite3.connect(path)
    try:
        return list(connection.execute("PRAGMA integrity_check")) == [("ok",)] and not list(
            connection.execute("PRAGMA foreign_key_check")
        )
    finally:
        connection.close()


def filled(path: Path) -> str:
    """Make a history with one finished exchange; return the conversation's id."""
    history = History.open(path)
    id = history.create().id
    _, reply = history.ask(id, None, "hello world")
    history.finish(reply.id, "good day", "complete")
    history.close()
    return id


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps no modes")
def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    path.touch(0o644)
    path.chmod(0o644)
    history = History.open(path)
    history.create()
    files = [path, *tmp_path.glob("history.sqlite3-*")]
    assert len(files) == 3
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    history.close()


def test_every_change_is_on_the_disk(tmp_path: Path) -> None:
    history = History.open(tmp_path / "history.sqlite3")
    settings = {name: history._database.rows(f"PRAGMA {name}")[0][0] for name in ("journal_mode", "synchronous")}
    assert settings == {"journal_mode": "wal", "synchronous": 2}
    history.close()


@each_row("damage", ["no database", "torn", "cut"])
def test_a_damaged_file_is_put_aside(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "history.sqlite3"
    filled(path)
    data = path.read_bytes()
    damaged = {
        "no database": b"once upon a time" * 400,
        "torn": data[:4096] + b"\x5a" * (len(data) - 4096),
        "cut": data[: len(data) // 2],
    }[damage]
    path.write_bytes(damaged)
    history = History.open(path)
    assert history.summaries() == []
    assert history.put_aside is not None
    assert history.put_aside.read_bytes() == damaged
    history.create()
    history.close()
    again = History.open(path)
    assert again.put_aside is None
    assert len(again.summaries()) == 1
    again.close()


def test_a_file_of_another_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    filled(path)
    for version in (1, 99):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
        before = path.read_bytes()
        with pytest.raises(StorageError, match="written by another edgeinfer"):
            History.open(path)
        assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if "damaged" in file.name] == []


def test_a_place_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be used"):
        History.open(tmp_path)
    with pytest.raises(StorageError, match="cannot be used"):
        History.open(tmp_path / "missing" / "history.sqlite3")


def test_a_full_disk_leaves_what_there_was(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    id = filled(path)
    history = History.open(path)
    pages = history._database.rows("PRAGMA page_count")[0][0]
    history._database.rows(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFullError, match="disk is full") as caught:
        history.ask(id, None, "x" * 1_000_000)
    assert (caught.value.status, caught.value.code, "delete" in caught.value.hint) == (507, "storage", True)
    assert len(history.conversation(id).messages) == 2
    history.close()
    assert sound(path)


def test_a_failed_change_is_undone(tmp_path: Path) -> None:
    history = History.open(tmp_path / "history.sqlite3")
    with pytest.raises(ZeroDivisionError), history._database.transaction() as connection:
        connection.execute(
            "INSERT INTO conversations (id, title, system, options, created, updated) VALUES ('a', '', '', '{}', 0, 0)"
        )
        _ = 1 / 0
    assert history.summaries() == []
    history.close()


def test_a_file_goes_between_machines_with_and_without_fts5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history.sqlite3"
    filled(path)
    with monkeypatch.context() as patch:
        patch.setattr(database, "_has_fts5", lambda connection: False)
        history = History.open(path)
        _, reply = history.ask(history.create().id, None, "written without an index")
        history.finish(reply.id, "indeed", "complete")
        assert len(history.summaries("index")) == 1
        assert history._database.rows("SELECT name FROM sqlite_master WHERE type = 'trigger'") == []
        history.close()
    history = History.open(path)
    assert len(history.summaries("index")) == len(history.summaries("world")) == 1
    history.close()
    assert sound(path)


def test_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    command = [sys.executable, "-c", WRITER, str(path), "25"]
    with contextlib.ExitStack() as stack:
        writers = []
        # From the first on, so that they also make the tables at the same time.
        for _ in range(3):
            writer = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
            stack.enter_context(writer)
            stack.callback(writer.kill)
            writers.append(writer)
        for writer in writers:
            _, said = writer.communicate(timeout=TIME_LIMIT)
            assert writer.returncode == 0, said
    history = History.open(path)
    assert history.put_aside is None
    assert len(history.summaries()) == 75
    assert len(history.summaries("answer")) == 75
    history.close()
    assert sound(path)


def test_what_a_dead_process_was_writing_is_interrupted(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    history = History.open(path)
    id = history.create().id
    _, mine = history.ask(id, None, "A")
    history.write(mine.id, "so far")
    # A second app on the same file leaves alone what the first, this process, is making.
    other = History.open(path)
    assert other.conversation(id).messages[1].status == "replying"
    other.close()
    with history._database.transaction() as connection:
        connection.execute("UPDATE messages SET holder = '999999999@1.0' WHERE id = ?", (mine.id,))
    history.close()
    again = History.open(path)
    message = again.conversation(id).messages[1]
    assert (message.status, message.content) == ("interrupted", "so far")
    again.close()


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite3"
    history = History.open(path)
    _, mine = history.ask(history.create().id, None, "A")
    for holder in (f"{os.getpid()}@1.0", "nonsense", None):
        with history._database.transaction() as connection:
            values = (holder, mine.id)
            connection.execute("UPDATE messages SET status = 'replying', holder = ? WHERE id = ?", values)
        again = History.open(path)
        assert again._database.rows("SELECT status FROM messages WHERE id = ?", (mine.id,))[0][0] == "interrupted"
        again.close()
    history.close()


def test_damage_while_open_says_what_to_do(tmp_path: Path) -> None:
    opened = database.Database.open(tmp_path / "history.sqlite3")
    error = sqlite3.DatabaseError("malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    with pytest.raises(StorageError, match="puts the damaged file aside"), opened.transaction():
        raise error
    opened.close()


def on_small_disk(folder: Path, megabytes: int, *arguments: object) -> str:
    mount = f'mount -t tmpfs -o size={megabytes}m none "$1" || exit 77; exec "$0" -c "$2" "$1" "$3"'
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1) to mount a small file system")
    line = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable, str(folder), FILL]
    done = subprocess.run(
        [*line, *map(str, arguments)], env=environment(), capture_output=True, text=True, timeout=TIME_LIMIT
    )
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small file system")
def test_conversations_are_deleted_on_a_full_disk(tmp_path: Path) -> None:
    assert "done" in on_small_disk(tmp_path, 14, 30_000)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small file system")
def test_the_longest_messages_are_deleted_on_a_full_disk(tmp_path: Path) -> None:
    assert "done" in on_small_disk(tmp_path, 60, 1_000_000)


def test_the_reserve_takes_what_a_disk_can_spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight megabytes, less where that would leave no four for the journal; never less than it has already."""
    mega, path = 1024**2, tmp_path / "history.reserve"
    cases = (
        *((0, 3 * mega, None), (0, 5 * mega - 1, None), (0, 5 * mega, 1), (0, 12 * mega - 1, 7), (0, 12 * mega, 8)),
        *((0, 100 * mega, 8), (3, 5 * mega, 4), (3, 4 * mega, 3), (3, mega, 3), (8, 0, 8)),
    )
    for had, free, kept in cases:
        path.unlink(missing_ok=True)
        if had:
            path.write_bytes(bytes(had * mega))
        monkeypatch.setattr("shutil.disk_usage", lambda _folder, free=free: SimpleNamespace(free=free))
        Reserve(path).keep()
        assert (path.stat().st_size / mega if path.exists() else None) == kept, (had, free)
    Reserve(path).release()
    Reserve(path).release()
    assert not path.exists()


# Answers questions without end, and tells of each once it is kept; answers grow, so that kills find every page state.
ENDLESS_WRITER = """
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
def test_killed_during_a_write(tmp_path: Path, after: int) -> None:
    path = tmp_path / "history.sqlite3"
    command = [sys.executable, "-c", ENDLESS_WRITER, str(path)]
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
def test_killed_during_a_reply(tmp_path: Path) -> None:
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
