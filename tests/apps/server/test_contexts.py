"""Contexts: requests name them, they are read once, and no name becomes a path; and adapters named as models."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.core.errors import PromptError, UsageError
from edgeinfer.model_thread import Job, ModelThread, ReplyEnd
from edgeinfer.openai import make_completion
from edgeinfer.openai.errors import RequestError
from tests.apps.server.served import MESSAGES, Local, chat_body, measured_turns, served
from tests.edgeinfer.test_adapters import PROMPT, write_adapter
from tests.kernel import require_kernel
from tests.speculation import needs_builtin
from tests.waiting import TIME_LIMIT

pytestmark = needs_builtin


CHAT = "/v1/chat/completions"
TOM, ANNA = "Tom had a red ball. He took it to the park every day.", "Anna had a blue boat. It could not swim."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("contexts")
    for name, text in (("tom.txt", TOM), ("anna.txt", ANNA), ("gone.txt", TOM)):
        (folder / name).write_text(text)
    return [folder / "tom.txt", folder / "anna.txt", folder / "gone.txt"]


@pytest.fixture(scope="module")
def server(files: list[Path]) -> Iterator[Local]:
    with served(contexts=files) as running:
        yield running


def answered(server: Local, **fields: Any) -> dict[str, Any]:
    answer = server.post(CHAT, chat_body(max_tokens=8, **fields))
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_text_is_read_once_and_replied_to(server: Local, files: list[Path]) -> None:
    assert [each["id"] for each in server.get("/v1/contexts").json()["data"]] == ["tom.txt", "anna.txt", "gone.txt"]
    first, second = (answered(server, contexts=["tom.txt"]) for _ in range(2))
    assert first["contexts"]["evaluated"] > 0
    with edgeinfer.load() as model:
        expected = model.with_contexts(files[:1]).chat().send(MESSAGES[0]["content"], max_tokens=8)
    for told in (first, second):
        assert told["choices"][0]["message"]["content"] == expected.text
        assert told["contexts"]["lossless"] and told["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert second["contexts"]["evaluated"] == 0
    both = answered(server, contexts=["anna.txt", "tom.txt"], n=2)
    assert both["contexts"]["contexts"] == 2 and not both["contexts"]["lossless"]
    plain = answered(server)
    assert "contexts" not in plain and plain == answered(server, contexts=[]) | {
        name: plain[name] for name in ("id", "created", "timings", "usage")
    }


def test_streams_tell_of_them_at_the_end(server: Local) -> None:
    answer = server.post(CHAT, chat_body(max_tokens=4, stream=True, contexts=["tom.txt"]))
    assert '"contexts":{' in answer.text.replace(" ", "").splitlines()[-4]


def test_what_is_not_named_is_not_read(server: Local, files: list[Path]) -> None:
    for name in (str(files[0]), "../tom.txt", "/etc/passwd", "no.txt", 5, None):
        refused = server.post(CHAT, chat_body(contexts=[name]))
        assert refused.status_code == 404 and "There is no context" in refused.text
    for fields in ({"contexts": "tom.txt"}, {"contexts": ["tom.txt"], "reasoning_effort": "low"}):
        assert server.post(CHAT, chat_body(**fields)).status_code == 400
    assert server.post("/v1/completions", {"prompt": "a", "contexts": ["tom.txt"]}).status_code == 400
    with edgeinfer.load() as model, pytest.raises(UsageError, match="names of texts"):
        make_completion("chat.completion", chat_body(contexts=[str(files[0])]), model)


def test_where_a_text_lies_is_not_told(server: Local, files: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    file = files[2]
    for spoil in (file.unlink, lambda: file.write_bytes(b"\xff no text"), lambda: file.write_text(" ")):
        spoil()
        for stream in (False, True):
            refused = server.post(CHAT, chat_body(contexts=["gone.txt"], stream=stream))
            assert "The context gone.txt cannot be read now" in refused.text
            assert str(file.parent) not in refused.text and "iconv" not in refused.text
            assert '"param":"contexts"' in refused.text.replace(" ", "")
            assert stream or refused.status_code == 503
    assert caplog.text.count(str(file)) == 6


def test_a_context_is_read_no_further_than_it_is_wanted(tmp_path: Path) -> None:
    file = tmp_path / "tom.txt"
    file.write_text(TOM * 30)
    with edgeinfer.load(context=1024, threads=1) as model:
        completion = make_completion("chat.completion", chat_body(contexts=[edgeinfer.Context(file)]), model)
        asked = itertools.count()
        with pytest.raises(RequestError, match="cut short") as ended:
            completion.start(model, 0, ended=lambda: next(asked) == 1)
        assert (ended.value.status, next(asked)) == (503, 2)
        large = edgeinfer.Context("large", content=TOM * 2000)
        completion = make_completion("chat.completion", chat_body(contexts=[large]), model)
        with pytest.raises(RequestError, match=r"The context has \d+ characters, far more"):
            completion.start(model, 0)


def test_tokens_of_files_are_kept_until_they_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tom.txt"
    read: list[str] = []
    with edgeinfer.load(context=256, threads=1) as model:
        texts = model._texts
        tokenize = texts.data

        def noted(text: str, fitting: str) -> list[int]:
            read.append(text)
            return tokenize(text, fitting)

        monkeypatch.setattr(texts, "data", noted)
        # What may have been written a moment ago may be written again without another time.
        for text, modified, count in ((TOM, 1e9, 1), (ANNA, 1e9, 2), (ANNA, 1e10, 4)):
            file.write_text(text)
            os.utime(file, (modified, modified))
            for _ in range(2):
                model.with_contexts([file]).chat().send("Who?", max_tokens=1)
            assert len(read) == count and read[-1].startswith(text)


def test_files_are_looked_at_before_anything_is_served(files: list[Path], tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="not a file"), served(contexts=[tmp_path / "no.txt"]):
        pass
    with pytest.raises(UsageError, match=r"Two contexts are named tom\.txt"), served(contexts=[files[0], files[0]]):
        pass


def test_adapters_are_listed_and_chosen_by_model(tmp_path: Path) -> None:
    require_kernel()
    adapters = {"wild": write_adapter(tmp_path / "wild", 1, 16), "odd": write_adapter(tmp_path / "odd", 2, 5)}
    with edgeinfer.load(adapters=adapters, context=256) as model:
        expected = {n: model.generate(PROMPT, max_tokens=16, adapter=n).text for n in ("wild", "odd", None)}
    for models in (False, True):
        with served(adapters=adapters, context=256, models=models) as server:
            listed = [each["id"] for each in server.http.get(f"{server.url}/v1/models").json()["data"]]
            assert {"tales", "wild", "odd"} <= set(listed)
            asked = [({"model": "wild"}, "wild"), ({"model": "odd"}, "odd"), ({"model": "tales"}, None), ({}, None)]
            asked += [({"model": "tales", "adapter": "odd"}, "odd")]
            for fields, name in asked:
                body = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, **fields}
                answer = server.http.post(f"{server.url}/v1/completions", json=body).json()
                assert answer["choices"][0]["text"] == expected[name], fields
            said = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            assert server.http.post(f"{server.url}/v1/chat/completions", json=said | {"model": "odd"}).is_success
            wrong = server.http.post(f"{server.url}/v1/chat/completions", json=said | {"adapter": "mild"})
            assert wrong.status_code == 400 and "mild" in wrong.text


TEXT = "{} had a red ball. He took it to the park every day."
OPTIONS: dict[str, Any] = {"ignore_eos": True}


class Worker:
    """A thread with a model; `ended` gets the names of replies in the order in which they end."""

    def __init__(self, model: edgeinfer.Model) -> None:
        self.thread = ModelThread(parallel=8)
        self.ended = queue.Queue[str]()
        self.reading: Callable[[int], None] | None = None  # called after each pass that evaluates a context
        self._then: dict[tuple[str, str], tuple[tuple[str, bool, int], ...]] = {}
        self.thread.do(lambda: self.thread.take(model))

    def when(self, name: str, event: str, *replies: tuple[str, bool, int]) -> None:
        """Add replies, as `add` takes them, when another has its first chunk or has ended, on the model's thread."""
        self._then[name, event] = replies

    def add(self, name: str, behind: bool, tokens: int) -> None:
        """Add a reply of so many tokens, behind a context or not."""

        def start(model: edgeinfer.Model) -> edgeinfer.TokenStream:
            if not behind:
                return model.stream(f"One day, {name}", max_tokens=tokens, **OPTIONS)
            messages = [{"role": "user", "content": f"One day, {name}"}]
            source = model.with_contexts([edgeinfer.Context(name, content=TEXT.format(name))])
            stream: edgeinfer.TokenStream = source.stream_chat(
                messages, progress=self.reading, max_tokens=tokens, **OPTIONS
            )
            return stream

        def tell(told: object) -> None:
            event = "first" if isinstance(told, edgeinfer.Chunk) else "end"
            for reply in self._then.pop((name, event), ()):
                self.add(*reply)
            if event == "end":
                self.ended.put(name if isinstance(told, ReplyEnd) else f"{name}: {told}")

        self.thread.add(Job(start, tell), name)

    def order(self, count: int) -> list[str]:
        """Wait until so many replies are over."""
        return [self.ended.get(timeout=TIME_LIMIT) for _ in range(count)]


@pytest.fixture
def worker() -> Iterator[Worker]:
    with closing(edgeinfer.load(context=256, threads=1, parallel=8, speculation="off")) as model:
        made = Worker(model)
        with measured_turns():
            yield made
        made.thread.do(made.thread.drop_replies)
        assert made.thread.join(timeout=TIME_LIMIT)


def test_a_reply_that_began_alone_and_those_that_come_later_all_end(worker: Worker) -> None:
    worker.when("Tom", "first", ("Anna", False, 6), ("Ben", True, 6))
    worker.add("Tom", True, 60)
    assert sorted(worker.order(3)) == ["Anna", "Ben", "Tom"]


def test_replies_join_the_passes_of_one_behind_a_context(worker: Worker) -> None:
    worker.when("first", "first", ("long", True, 90), ("short", False, 4))
    worker.when("short", "end", ("late", False, 4))
    worker.add("first", False, 40)
    assert worker.order(4) == ["short", "late", "first", "long"]


def test_one_that_is_dropped_while_it_reads_a_context_has_not_failed(worker: Worker) -> None:
    reading = threading.Event()

    def read(tokens: int) -> None:
        if not reading.is_set():
            reading.set()
            worker.thread.do(worker.thread.drop_replies)

    worker.reading = read
    worker.when("first", "first", ("dropped", True, 4))
    worker.add("first", False, 200)
    assert sorted(worker.order(2)) == ["dropped", "first"]
    assert reading.is_set()
