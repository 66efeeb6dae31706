"""Downloads: followed, failed, cancelled, resumed; by stand-ins for what fetches, whose own tests are elsewhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.apps.desktop import downloads
from edgeinfer.apps.desktop.checks import ConflictError, DiskFullError, NotFoundError, hint_of
from edgeinfer.apps.desktop.downloads import Download, Downloads
from edgeinfer.apps.desktop.settings import SettingsFile
from edgeinfer.core.errors import HubError
from tests.tables import each_row
from tests.waiting import TIME_LIMIT

MADE = edgeinfer.LocalModel("org/name", "Name", Path("/models/name"), 9, None, "bundle", "converted")


class Fetcher:
    """Stands for `edgeinfer.pull`: tells of some progress, then waits to be let go on or cancelled."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.go_on = threading.Event()
        self.asked: list[str] = []

    def __call__(
        self, name: str, *, progress: Callable[[str, int, int], None], cancelled: Callable[[], bool]
    ) -> edgeinfer.LocalModel:
        self.asked.append(name)
        progress("Downloading org/name", 5, 10)
        progress("Downloading org/name", 10, 10)
        if self.error is not None:
            raise self.error
        while not self.go_on.wait(0.01):
            if cancelled():
                raise HubError("It was cancelled.", "Ask again.")
        return MADE


class Watched:
    """Downloads with every state they had, and the ids that were unfinished each time."""

    def __init__(self, fetch: Callable[..., edgeinfer.LocalModel], unfinished: tuple[str, ...] = ()) -> None:
        self.states: list[Download] = []
        self.unfinished: list[tuple[str, ...]] = []
        self._told: asyncio.Queue[Download] = asyncio.Queue()
        self.downloads = Downloads(self._note, fetch, unfinished, self.unfinished.append)

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


def test_progress_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "_PROGRESS_S", 0.0)

    async def work() -> None:
        fetcher = Fetcher()
        watched = Watched(fetcher)
        started = watched.downloads.begin("org/name")
        assert (started.id, started.status) == ("org/name", "running")
        await watched.until("running", done=10)
        fetcher.go_on.set()
        assert (await watched.until("done")).model == str(MADE.path)
        assert [(s.stage, s.done, s.total) for s in watched.states[1:3]] == [
            ("Downloading org/name", 5, 10),
            ("Downloading org/name", 10, 10),
        ]
        assert (watched.unfinished[0], watched.unfinished[-1]) == (("org/name",), ())
        await watched.downloads.close()

    asyncio.run(work())


@each_row(
    ("error", "says"),
    [
        (
            HubError("You are offline.", "Run `edgeinfer pull x` when online."),
            ["You are offline.", "Download it first."],
        ),
        (RuntimeError("Boom"), ["The download failed: unexpected RuntimeError.", "Try again."]),
    ],
)
def test_failures_are_told_in_the_words_of_the_window(error: Exception, says: list[str]) -> None:
    async def work() -> None:
        watched = Watched(Fetcher(error))
        watched.downloads.begin("org/name")
        failed = await watched.until("failed")
        assert failed.error == dict(zip(("message", "hint"), says, strict=True))
        assert watched.unfinished[-1] == ("org/name",)

    asyncio.run(work())


def test_what_was_cancelled_is_resumed_or_dismissed() -> None:
    async def work() -> None:
        fetcher = Fetcher()
        watched = Watched(fetcher, ("org/before",))
        watched.downloads.publish()
        before = watched.states[0]
        assert (before.id, before.status) == ("org/before", "cancelled")
        key = watched.downloads.begin("org/name").key
        with pytest.raises(ConflictError):
            watched.downloads.begin("org/name")
        await watched.until("running", done=5)
        assert (await watched.downloads.cancel(key)).status == "cancelled"
        assert set(watched.unfinished[-1]) == {"org/before", "org/name"}
        with pytest.raises(NotFoundError):
            await watched.downloads.cancel("x")
        again = watched.downloads.begin("org/name")
        assert watched.downloads.state(key).status == "dismissed"
        assert (await watched.downloads.cancel(before.key)).status == "dismissed"
        await watched.downloads.close()
        assert watched.downloads.state(again.key).status == "cancelled"
        # What the next run offers to go on with.
        assert watched.unfinished[-1] == ("org/name",)
        assert fetcher.asked == ["org/name", "org/name"]

    asyncio.run(work())


def test_unfinished_downloads_are_kept_and_a_full_disk_stops_none(tmp_path: Path) -> None:
    file = SettingsFile(tmp_path / "settings.json")
    file.keep(unfinished=("org/name",))
    again = SettingsFile(tmp_path / "settings.json")
    assert again.now.unfinished == ("org/name",)
    assert again.change({"theme": "dark"}) == replace(again.now, theme="dark")

    def full(_: tuple[str, ...]) -> None:
        raise DiskFullError("The disk is full.", "Free some space.")

    async def work() -> None:
        fetcher = Fetcher()
        fetcher.go_on.set()
        states = asyncio.Queue[Download]()
        started = Downloads(states.put_nowait, fetcher, remember=full)
        started.begin("org/name")
        async with asyncio.timeout(TIME_LIMIT):
            while (await states.get()).status != "done":
                pass
        await started.close()

    asyncio.run(work())


def test_hints_name_no_commands() -> None:
    for hint, said in {
        "Check the connection; downloads resume. Or run a model that is on this machine: edgeinfer models": (
            "Check the connection; downloads resume. Or use a model that is on this computer."
        ),
        "Accept its terms at https://huggingface.co/o/n, then log in with: hf auth login": (
            "Accept its terms at https://huggingface.co/o/n and sign in to Hugging Face here."
        ),
        "Check the spelling; if it is private, log in with: hf auth login": (
            "If it is private, sign in to Hugging Face on this computer first."
        ),
        "Install it: pip install 'edgeinfer[gguf]'": (
            "This installation does not include llama.cpp, which is a separate add-on."
        ),
        "Raise --memory to 95.6 MB, or give a smaller --context.": "Choose a larger memory budget under Models.",
        "Use Qwen3-0.6B-GGUF:Q4_K_M. Try `edgeinfer devices` for a list.": "Use Qwen3-0.6B-GGUF:Q4_K_M.",
        "Free some space and try again; downloads resume.": "Free some space and try again; downloads resume.",
    }.items():
        assert hint_of(hint) == said
