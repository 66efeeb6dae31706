"""A disk that is full, for real: conversations can be deleted, the others are whole, and writing goes on afterwards."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeinfer.apps.desktop.checks import DiskFullError
from edgeinfer.apps.desktop.database import Reserve
from edgeinfer.apps.desktop.history import History
from tests.cli import TIME_LIMIT, environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts a small file system")

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


def test_conversations_are_deleted_on_a_full_disk(tmp_path: Path) -> None:
    assert "done" in on_small_disk(tmp_path, 14, 30_000)


@pytest.mark.slow
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


def test_other_writes_are_refused_as_what_they_are(tmp_path: Path) -> None:
    history = History.open(tmp_path / "history.sqlite3")
    id = history.create().id
    history._database.rows(f"PRAGMA max_page_count = {history._database.rows('PRAGMA page_count')[0][0]}")
    with pytest.raises(DiskFullError, match="disk is full") as caught:
        history.ask(id, None, "x" * 1_000_000)
    assert "delete" in caught.value.hint
    assert (DiskFullError.status, DiskFullError.code) == (507, "storage")
    history.close()
