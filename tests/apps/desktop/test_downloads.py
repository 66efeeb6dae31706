"""Downloads: followed, failed, cancelled; by commands that stand for the hub, and by the real one offline."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from edgeinfer.apps.desktop import fetch
from edgeinfer.apps.desktop.downloads import Download, Downloads
from edgeinfer.apps.desktop.errors import ConflictError, NotFoundError
from edgeinfer.errors import HubError
from tests.apps.desktop.test_history_files import ENVIRONMENT
from tests.edgeinfer.test_hub_server import Hub, environment, server

__all__ = ["server"]

SAYS = "import sys, json\nfor line in {lines}: print(json.dumps(line), flush=True)\n"
WAITS = 'print(\'{"done": 1, "total": 9}\', flush=True)\nimport sys\nsys.stdin.read()\n'


class Watched:
    """Downloads by a program, with every state they had."""

    def __init__(self, program: str) -> None:
        self.states: list[Download] = []
        self._changed = asyncio.Event()
        self.downloads = Downloads(self._note, (sys.executable, "-c", program))

    def _note(self, state: Download) -> None:
        self.states.append(state)
        self._changed.set()

    async def until(self, status: str, done: int = 0) -> Download:
        """The first state of a kind."""
        while not (found := [s for s in self.states if s.status == status and s.done >= done]):
            self._changed.clear()
            await self._changed.wait()
        return found[0]


def test_progress_to_the_end() -> None:
    async def work() -> None:
        lines = [{"done": 0, "total": 0}, {"done": 5, "total": 10}, {"path": "/x"}]
        watched = Watched(SAYS.format(lines=lines))
        begun = watched.downloads.begin("org/name")
        assert (begun.id, begun.status) == ("org/name", "running")
        await watched.until("done")
        assert [(s.done, s.total, s.status) for s in watched.states[2:]] == [(5, 10, "running"), (10, 10, "done")]
        await watched.downloads.close()

    asyncio.run(work())


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (SAYS.format(lines=[{"error": {"message": "You are offline.", "hint": "Go online."}}]), "You are offline."),
        ("", "ended before"),
        ("print('nonsense')", "failed"),
        ("raise SystemExit(3)", "ended before"),
    ],
)
def test_failures(program: str, says: str) -> None:
    async def work() -> None:
        watched = Watched(program)
        watched.downloads.begin("org/name")
        failed = await watched.until("failed")
        assert failed.error is not None
        assert says in failed.error["message"]
        assert failed.error["hint"]

    asyncio.run(work())


def test_a_program_that_cannot_be_started() -> None:
    async def work() -> None:
        watched = Watched("")
        watched.downloads._command = ("/no/such/program",)
        watched.downloads.begin("org/name")
        await watched.until("failed")

    asyncio.run(work())


def test_cancel() -> None:
    async def work() -> None:
        watched = Watched(WAITS)
        key = watched.downloads.begin("org/name").key
        with pytest.raises(ConflictError):
            watched.downloads.begin("org/name")
        await watched.until("running", done=1)
        assert (await watched.downloads.cancel(key)).status == "cancelled"
        assert (await watched.downloads.cancel(key)).status == "cancelled"
        with pytest.raises(NotFoundError):
            await watched.downloads.cancel("x")
        again = watched.downloads.begin("org/name")
        await watched.downloads.close()
        assert watched.downloads.state(again.key).status == "cancelled"

    asyncio.run(work())


def test_the_fetching_process_offline() -> None:
    command = [sys.executable, "-m", "edgeinfer.apps.desktop.fetch", "org/name"]
    environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
    assert process.returncode == HubError.exit_code
    assert "offline" in said["error"]["message"]
    assert "when online" in said["error"]["hint"]


def test_the_fetching_process_with_the_hubs_own_library(server: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edgeinfer.apps.desktop.fetch", "org/bundle"]
    with subprocess.Popen(
        command,
        env=environment(server, tmp_path) | {"PYTHONWARNINGS": "default"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = [json.loads(line) for line in process.stdout]
    assert process.returncode == 0
    assert (Path(said[-1]["path"]) / "weights.bin").is_file()
    for each in said[:-1]:
        assert 0 <= each["done"] <= each["total"] or each["total"] == 0


def test_the_fetching_process_ends_with_its_app(tmp_path: Path) -> None:
    program = (
        "import sys, time\nfrom edgeinfer import hub\nfrom edgeinfer.apps.desktop import fetch\n"
        "hub.pull = lambda *a, **k: (print('begun', flush=True), time.sleep(600))\nfetch.main('org/name')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "begun\n"
        process.stdin.close()
        assert process.wait(60) == 1


def test_progress_is_of_the_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_EVERY_S", 0.0)
    progress = fetch._Progress()
    progress("transfer", 50, 100)
    progress("in place", 20, 100)
    progress("in place", 100, 100)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said == [{"done": 50, "total": 100}, {"done": 50, "total": 100}, {"done": 100, "total": 100}]
