"""Every state of a served model with every request: what is answered, what waits, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgeinfer import Model
from edgeinfer.apps.server import host as hosting
from edgeinfer.apps.server.app import make_app
from edgeinfer.apps.server.host import HostState, LoadCancelledError, ModelHost, NotReadyError, load_with_room
from edgeinfer.apps.server.security import Security
from edgeinfer.apps.server.switching import ModelSwitch
from edgeinfer.core.errors import BudgetError, BundleError, ModelError
from tests.apps.server.served import MESSAGES, chat_body, held, served_process
from tests.factories import make_bigram_bundle
from tests.gguf_models import builtin_gguf
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT, wait_until

OPTIONS: dict[str, Any] = {"context": 256, "threads": 1, "speculation": "off", "remember": False}
SHORT: dict[str, Any] = {"max_tokens": 2}
# Of the model: they are refused where there is none, and wait while it is busy or comes back.
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat_body(**SHORT),
    "/chat/completions": chat_body(**SHORT, stream=True),
    "/v1/completions": {"prompt": "a", **SHORT},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": MESSAGES, **SHORT},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/verify": {"prompt": [5, 6], "draft": [7]},
    "/completion": {"prompt": "a", "n_predict": 2},
    "/tokenize": {"content": "a"},
    "/detokenize": {"tokens": [5]},
    "/apply-template": {"messages": MESSAGES},
    "/api/chat": {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 2}},
}
# Of what is known of the model: answered at once, also while it is busy, away or coming back.
KNOWN = ("/props", "/slots")
# Answered in every state.
ALWAYS = ("/v1/models", "/metrics", "/v1/contexts", "/api/tags", "/api/ps", "/api/version", "/")


def status_of(host: ModelHost) -> str:
    """Read again each time; type checkers assume that a property does not change."""
    return host.state.status


class Served:
    """A host behind its application, without a socket."""

    def __init__(self, host: ModelHost, switch: ModelSwitch | None) -> None:
        self.host, self.switch = host, switch
        transport = httpx.ASGITransport(make_app(host, Security(), switch=switch))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)

    async def get(self, path: str) -> int:
        answer = await asyncio.wait_for(self.client.get(path), TIME_LIMIT)
        assert answer.status_code != 503 or answer.headers["retry-after"]
        return answer.status_code

    async def post(self, path: str) -> int:
        answer = await self.client.post(path, json=ASKED[path])
        assert answer.status_code != 503 or answer.headers["retry-after"]
        return answer.status_code

    async def asks(self) -> dict[str, int]:
        """The statuses of all requests that need the model, made at once."""
        answers = asyncio.gather(*map(self.post, ASKED))
        return dict(zip(ASKED, await asyncio.wait_for(answers, TIME_LIMIT), strict=True))

    async def check(self, *, health: int, known: int, asked: int | None) -> None:
        """Make every request in this state; `asked` None leaves out those that need the model."""
        assert {path: await self.get(path) for path in ALWAYS} == dict.fromkeys(ALWAYS, 200)
        assert {path: await self.get(path) for path in KNOWN} == dict.fromkeys(KNOWN, known)
        assert {await self.get("/health"), await self.get("/v1/health")} == {health}
        if asked is not None:
            assert await self.asks() == dict.fromkeys(ASKED, asked)


def running(work: Callable[[Served], Any], *, switches: bool = False, loads: bool = True) -> None:
    async def run() -> None:
        host = ModelHost(queue=64)
        switch = ModelSwitch(host, None, OPTIONS) if switches else None
        served = Served(host, switch)
        try:
            if loads:
                await host.load(None, OPTIONS)
                assert await served.get("/props") == 200
            if switch is not None:
                switch.opened = True
            await work(served)
        finally:
            if switch is not None:
                await switch.close()
            await host.close()

    asyncio.run(asyncio.wait_for(run(), TIME_LIMIT))


class Gate:
    """A point where another thread waits."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def stand(self) -> None:
        self.reached.set()
        assert self.opened.wait(TIME_LIMIT)


@asynccontextmanager
async def loading_slowly(patch: pytest.MonkeyPatch) -> AsyncIterator[Gate]:
    """Loading blocks during the block."""
    gate = Gate()

    def slow(*given: Any) -> Model:
        gate.stand()
        return load_with_room(*given)

    patch.setattr(hosting, "load_with_room", slow)
    try:
        yield gate
    finally:
        gate.opened.set()
        patch.setattr(hosting, "load_with_room", load_with_room)


@contextlib.contextmanager
def coming_back(model: Model, patch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[None]:
    """During the block, an unloaded model calls `act` before it loads again."""
    make = model._lifecycle._make

    def again(*given: Any) -> Any:
        act()
        return make(*given)

    with patch.context() as patched:
        patched.setattr(model._lifecycle, "_make", again)
        yield


async def waited(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, TIME_LIMIT)


def test_without_a_model_its_requests_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(served: Served) -> None:
        host = served.host
        await served.check(health=503, known=503, asked=503)
        with pytest.raises(ModelError):
            await host.load(str(tmp_path / "none"), {})
        assert status_of(host) == "failed"
        await served.check(health=503, known=503, asked=503)
        async with loading_slowly(monkeypatch) as gate:
            loading = asyncio.create_task(host.load(str(make_bigram_bundle(tmp_path / "b")), {"threads": 1}))
            await waited(gate)
            assert status_of(host) == "loading"
            await served.check(health=503, known=503, asked=503)
        await loading
        await host.unload()
        await served.check(health=503, known=503, asked=503)
        await host.close()
        await served.check(health=503, known=503, asked=503)

    running(work, loads=False)


@needs_builtin
def test_a_model_that_is_ready_answers_whether_it_is_busy_away_or_coming_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(served: Served) -> None:
        host, model = served.host, served.host.require_model()
        await served.check(health=200, known=200, asked=200)
        # Busy.
        with held(host):
            asked = asyncio.create_task(served.asks())
            await served.check(health=200, known=200, asked=None)
        assert await asked == dict.fromkeys(ASKED, 200)
        # Away. Nothing that only looks brings it back; each request that asks does.
        for path in ASKED:
            await host.ask(lambda model: model.unload())
            await served.check(health=200, known=200, asked=None)
            assert not model.in_memory
            assert await served.post(path) == 200
        # Coming back: nothing waits for it but those who ask.
        gate = Gate()
        with coming_back(model, monkeypatch, gate.stand):
            await host.ask(lambda model: model.unload())
            asked = asyncio.create_task(served.asks())
            await waited(gate)
            await served.check(health=200, known=200, asked=None)
            assert not asked.done()
            gate.opened.set()
            assert await asked == dict.fromkeys(ASKED, 200)

        # Not coming back this time.
        for error in (BudgetError("There is no room.", "Free memory."), BundleError("It is gone.", "Fetch it.")):

            def fails(error: Exception = error) -> None:
                raise error

            await host.ask(lambda model: model.unload())
            with coming_back(model, monkeypatch, fails):
                assert await served.asks() == dict.fromkeys(ASKED, 503)
        await served.check(health=200, known=200, asked=200)

    running(work)


@needs_builtin
def test_progress_is_that_of_the_load_that_it_was_given_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """GGUF files and repacked bundles report progress again when they load again."""
    from edgeinfer import api, loading

    make, told = loading.make_parts, list[bool]()

    def reports(facts: Any, config: Any, plan: Any, progress: Any, started: float) -> Any:
        told.append(progress is not None)
        if progress is not None:
            progress("Loading", 1, 2)
        return make(facts, config, plan, progress, started)

    monkeypatch.setattr(api, "make_parts", reports)

    async def work(served: Served) -> None:
        await served.host.ask(lambda model: model.unload())
        assert await served.post("/v1/chat/completions") == 200
        assert told == [True, False] and served.host.state.status == "ready"
        assert await served.post("/v1/chat/completions") == 200

    running(work, switches=True)


@pytest.mark.slow
@needs_builtin
def test_where_models_are_switched_requests_load_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(served: Served) -> None:
        host = served.host
        await host.unload()
        await served.check(health=200, known=503, asked=200)
        with pytest.raises(ModelError):
            await host.load(str(tmp_path / "none"), {})
        await served.check(health=200, known=503, asked=200)
        await host.ask(lambda model: model.unload())
        await served.check(health=200, known=200, asked=200)
        # Another model is being loaded without a request.
        await host.load(str(make_bigram_bundle(tmp_path / "b")), {"threads": 1})
        async with loading_slowly(monkeypatch) as gate:
            asked = asyncio.create_task(served.asks())
            await waited(gate)
            await served.check(health=200, known=503, asked=None)
            assert not asked.done()
        assert await asked == dict.fromkeys(ASKED, 200)
        await host.load(str(tmp_path / "b"), {"threads": 1})
        # It stops while some wait for theirs, and refuses those who come then and later; none waits for ever.
        async with loading_slowly(monkeypatch) as gate:
            asked = asyncio.create_task(served.asks())
            await waited(gate)
            assert served.switch is not None
            closing = asyncio.create_task(served.switch.close())
            await asyncio.sleep(0)
            await served.check(health=200, known=503, asked=503)
        await closing
        assert await asked == dict.fromkeys(ASKED, 503)
        await host.close()
        await served.check(health=503, known=503, asked=503)

    running(work, switches=True)


def test_a_load_that_ends_in_any_way_leaves_no_state_of_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = str(make_bigram_bundle(tmp_path / "b"))

    async def work(served: Served) -> None:
        host = served.host

        def breaks(*_: Any) -> Model:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(hosting, "load_with_room", breaks)
        with pytest.raises(OSError, match="Input/output"):
            await host.load(bundle, {})
        assert status_of(host) == "failed" and host.state.error is not None
        async with loading_slowly(monkeypatch) as gate:
            loading = asyncio.create_task(host.load(bundle, {"threads": 1}))
            await waited(gate)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert status_of(host) == "empty"
        await host.load(bundle, {"threads": 1})
        assert status_of(host) == "ready" and await host.ask(lambda model: model.context > 0)
        async with loading_slowly(monkeypatch) as gate:
            loading = asyncio.create_task(host.load(bundle, {"threads": 1}))
            await waited(gate)
            closing = asyncio.create_task(host.close())
            await asyncio.sleep(0)
            assert status_of(host) == "closed"
        await closing
        with pytest.raises(LoadCancelledError):
            await loading
        # Nothing hangs once it is closed.
        await host.unload()
        for late in (host.load(bundle, {}), host.ask(lambda model: model.context)):
            with pytest.raises(NotReadyError, match="stopping"):
                await late
        assert host.state == HostState("closed", number=host.state.number)

    running(work, loads=False)


@pytest.mark.slow
@pytest.mark.gguf
def test_a_gguf_file_that_was_away_answers() -> None:
    """In a process of its own, as `edgeinfer serve` runs it, and with keep_alive."""
    with served_process("-m", str(builtin_gguf()), "--backend", "llamacpp", "--idle-unload", "0.5") as server:
        for _ in range(2):
            wait_until(lambda: bool(server.get("/props").json()["is_sleeping"]), "the model's leave")
            for path, body in ASKED.items():
                assert server.post(path, body).status_code == 200, path
        body = {"messages": MESSAGES, "stream": False, "keep_alive": 0}
        for _ in range(2):
            assert server.post("/api/chat", body).status_code == 200
            wait_until(lambda: bool(server.get("/props").json()["is_sleeping"]), "the model's leave")
