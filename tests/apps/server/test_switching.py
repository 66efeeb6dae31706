"""Models that requests name: one is loaded at a time, every model has its turn, and none is downloaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("starlette", reason="the server extra is not installed")

from starlette.testclient import TestClient

from edgeinfer import hub
from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.host import HostState, ModelHost
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.switching import ModelSwitch
from edgeinfer.core.errors import BudgetError
from edgeinfer.openai.errors import RequestError
from tests.apps.server.served import chat_body, served
from tests.apps.server.test_bad_input import CHAT, error_of
from tests.factories import make_bigram_bundle
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT


class Loads:
    """Fake loading of models by name; "large" does not fit."""

    def __init__(self) -> None:
        self.names: list[str | None] = []
        self.options: list[dict[str, Any]] = []
        self.loop = asyncio.get_running_loop()
        self.unloaded: asyncio.Future[None] = self.loop.create_future()

    def __call__(self, model: str | None, options: dict[str, Any], *_: Any) -> Any:
        if model == "large":
            raise BudgetError("It does not fit.", "Give it more.")
        self.names.append(model)
        self.options.append(options)
        return SimpleNamespace(plan=SimpleNamespace(parallel=1), close=lambda: None, unload=self._unload)

    def _unload(self) -> None:
        self.loop.call_soon_threadsafe(self.unloaded.set_result, None)


def switching(work: Callable[[ModelSwitch, Loads], Awaitable[None]], queue: int = 8, **options: Any) -> None:
    async def run() -> None:
        host, loads = ModelHost(), Loads()
        switch = ModelSwitch(host, "a", options, queue=queue)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("edgeinfer.apps.server.host.load_with_room", loads)
            try:
                await work(switch, loads)
            finally:
                await switch.close()
                await host.close()

    asyncio.run(asyncio.wait_for(run(), TIME_LIMIT))


async def entering(switch: ModelSwitch, source: str) -> asyncio.Task[None]:
    """A waiting request."""
    task = asyncio.get_running_loop().create_task(switch.enter(source))
    await asyncio.sleep(0)
    return task


def test_a_model_is_changed_once_it_is_free_and_everybody_has_a_turn() -> None:
    async def work(switch: ModelSwitch, loads: Loads) -> None:
        await switch.enter("a")
        first, late, second = [await entering(switch, name) for name in ("b", "a", "b")]
        # Though "a" is loaded, "b" has waited longer.
        assert loads.names == ["a"] and not first.done() and not late.done() and switch.waiting == 3
        switch.leave()
        await asyncio.gather(first, second)
        assert loads.names == ["a", "b"] and not late.done()
        # What was said of the model that was served does not fit the other.
        assert loads.options == [{"memory": 9, "draft_model": "d"}, {"memory": 9}]
        switch.leave()
        assert not late.done()
        switch.leave()
        await late
        assert loads.names == ["a", "b", "a"] and switch.is_loaded("a") and switch.waiting == 0

    switching(work, memory=9, draft_model="d")


def test_who_gives_up_or_asks_for_too_much_keeps_nobody_from_their_turn() -> None:
    async def work(switch: ModelSwitch, loads: Loads) -> None:
        await switch.enter("a")
        gone, large, other = [await entering(switch, name) for name in ("b", "large", "a")]
        with pytest.raises(RequestError) as refused:
            await switch.enter("b")
        assert refused.value.status == 429
        gone.cancel()
        switch.leave()
        with pytest.raises(RequestError, match="could not be loaded: It does not fit") as refused:
            await large
        assert (refused.value.status, refused.value.code) == (503, "insufficient_memory")
        await other
        assert loads.names == ["a", "a"]

    switching(work, queue=3)


def test_an_idle_model_leaves_memory_when_it_was_told_to() -> None:
    async def work(switch: ModelSwitch, loads: Loads) -> None:
        await switch.enter("a")
        switch.keep(0.0)
        assert not loads.unloaded.done()
        switch.leave()
        await loads.unloaded
        # It is loaded again by its next request, and stays this time.
        await switch.enter("a")
        switch.leave()
        assert loads.names == ["a"] and switch.expires_in() is None

    switching(work)


@needs_builtin
def test_a_model_that_is_loading_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients request the list once, at their start."""
    for name in ("XDG_DATA_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    hub.models_folder().mkdir(parents=True)
    make_bigram_bundle(hub.models_folder() / "other", capacity=64)
    for switched, names in ((False, ["tales", "small"]), (True, ["tales", "small", "other"])):
        host = ModelHost()
        host.state = HostState("loading")
        switch = ModelSwitch(host, None, {}) if switched else None
        app = make_app(host, Security(), aliases=("small",), switch=switch)
        with TestClient(app, base_url="http://localhost") as client:
            listed = client.get("/v1/models").json()["data"]
            assert [(model["id"], model["status"]["value"]) for model in listed][:2] == [
                ("tales", "loading"),
                ("small", "loading"),
            ]
            assert [model["id"] for model in listed] == names
            assert len(client.get("/api/tags").json()["models"]) == len(names) - 1
            assert client.get("/v1/models/small").json()["status"] == {"value": "loading"}
            unknown = client.get("/v1/models/gpt-9")
            assert unknown.status_code == 404 and str(tmp_path) not in unknown.text
            assert client.post(CHAT, json=chat_body(model="small")).status_code == 503


@pytest.mark.slow
@needs_builtin
def test_a_model_of_this_machine_answers_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    hub.models_folder().mkdir(parents=True)
    # Its context is smaller than what is asked for.
    bundle = make_bigram_bundle(hub.models_folder() / "other", capacity=64)
    with served("small", models=True, context=128) as server:
        own, other = (model["id"] for model in server.get("/v1/models").json()["data"] if model["id"] != "small")
        assert [model["name"] for model in server.get("/api/tags").json()["models"]] == [own, other]
        answer = server.post("/completion", {"model": f"{other}:latest", "prompt": [5, 6], "n_predict": 3})
        assert answer.json()["model"] == "bigrams" and server.get("/props").json()["model_path"] == bundle.name
        told = {model["id"]: model["status"]["value"] for model in server.get("/v1/models").json()["data"]}
        assert told == {other: "loaded", own: "unloaded", "small": "unloaded"}
        # Who names none, or the one that is served by any of its names, gets that one back.
        for name in ("small", own, None):
            answer = server.post(CHAT, chat_body(model=name, max_tokens=2))
            assert answer.json()["model"] == own
        for name in (f"{other}r", "nobody/knows", str(tmp_path), "/etc/passwd", "../other"):
            answer = server.post(CHAT, chat_body(model=name))
            assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"
        assert f"Did you mean '{other}'" in server.post(CHAT, chat_body(model=f"{other}r")).text
    with served("small", context=128) as server:
        assert len(server.get("/api/tags").json()["models"]) == 1
        assert server.post(CHAT, chat_body(model=other)).status_code == 404
