"""Downloads: followed, failed, cancelled; by commands that stand for the hub, and by the real one offline."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.apps.desktop import downloads
from edgeinfer.apps.desktop.checks import ConflictError, NotFoundError
from edgeinfer.apps.desktop.downloads import Download, Downloads
from edgeinfer.errors import HubError, InternalError
from tests.cli import TIME_LIMIT, environment
from tests.hub_server import Hub, bundle_files

SAYS = "import sys, json\nfor line in {lines}: print(json.dumps(line), flush=True)\n"
WAITS = 'print(\'{"done": 1, "total": 9}\', flush=True)\nimport sys\nsys.stdin.read()\n'


class Watched:
    """Downloads by a program, with every state they had."""

    def __init__(self, program: str) -> None:
        self.states: list[Download] = []
        self._told: asyncio.Queue[Download] = asyncio.Queue()
        self.downloads = Downloads(self._note, (sys.executable, "-c", program))

    def _note(self, state: Download) -> None:
        self.states.append(state)
        self._told.put_nowait(state)

    async def until(self, status: str, done: int = 0) -> Download:
        """The next state of a kind."""
        async with asyncio.timeout(TIME_LIMIT):
            while True:
                state = await self._told.get()
                if state.status == status and state.done >= done:
                    return state


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


@contextlib.contextmanager
def fetching(*words: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process with its standard input open, as the app holds it, which has ended when the block has."""
    pipe, command = subprocess.PIPE, [sys.executable, *words]
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_fetching_process_offline() -> None:
    with fetching("-m", "edgeinfer.apps.desktop.downloads", "org/name", env=environment()) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        assert process.wait(TIME_LIMIT) == HubError.exit_code
    assert "offline" in said["error"]["message"]
    assert "when online" in said["error"]["hint"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A server that has a bundle."""
    server = Hub({"org/bundle": bundle_files(tmp_path / "source")})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(TIME_LIMIT)


def test_the_fetching_process_with_the_hubs_own_library(hub: Hub, tmp_path: Path) -> None:
    address = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    env = environment() | address | {"HF_HOME": str(tmp_path), "PYTHONWARNINGS": "default"}
    with fetching("-m", "edgeinfer.apps.desktop.downloads", "org/bundle", env=env) as process:
        assert process.stdout is not None
        said = [json.loads(line) for line in process.stdout]
        assert process.wait(TIME_LIMIT) == 0
    assert (Path(said[-1]["path"]) / "weights.bin").is_file()
    for each in said[:-1]:
        assert 0 <= each["done"] <= each["total"] or each["total"] == 0


def test_the_fetching_process_ends_with_its_app() -> None:
    program = (
        "import sys, time\nfrom edgeinfer import hub\nfrom edgeinfer.apps.desktop import downloads\n"
        "hub.pull = lambda *a, **k: (print('begun', flush=True), time.sleep(600))\ndownloads.main('org/name')\n"
    )
    with fetching("-c", program, env=environment()) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "begun\n"
        process.stdin.close()
        assert process.wait(TIME_LIMIT) == 1


@pytest.mark.parametrize("told", [False, True])
def test_it_ends_with_its_input_unless_the_outcome_was_told(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    read, write = os.pipe()
    os.close(write)
    finished = threading.Event()
    if told:
        finished.set()
    with os.fdopen(read) as stdin, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", stdin)
        downloads._end_with_input(finished)
    assert codes == ([] if told else [1])


def test_a_fault_of_ours_is_told_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def pull(*_: object, **__: object) -> None:
        raise RuntimeError("Boom")

    monkeypatch.setattr("edgeinfer.hub.pull", pull)
    monkeypatch.setattr(downloads, "_end_with_input", lambda finished: None)
    assert downloads.main("org/name") == InternalError.exit_code
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "Unexpected RuntimeError: Boom."


def test_progress_is_of_the_whole(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_PROGRESS_S", 0.0)
    progress = downloads._Progress()
    progress("transfer", 50, 100)
    progress("in place", 20, 100)
    progress("in place", 100, 100)
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert said == [{"done": 50, "total": 100}, {"done": 50, "total": 100}, {"done": 100, "total": 100}]
