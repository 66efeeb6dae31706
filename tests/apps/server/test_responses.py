"""/v1/responses with a memory: conversations that go on, replies in the background, streams after a reconnect."""

from __future__ import annotations

import json
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.apps.server.responses import ResponseStore, StoredResponse
from edgeinfer.openai.errors import RequestError
from tests.apps.server.served import Local, served
from tests.speculation import needs_builtin
from tests.waiting import wait_until

PATH = "/v1/responses"
ASKED = {"input": "My dog is called Rex.", "max_output_tokens": 12}

pytestmark = needs_builtin


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """A server that keeps responses."""
    store = ResponseStore(tmp_path_factory.mktemp("responses") / "private")
    with served(store=store, overflow="window", context=512) as running:
        yield running


def events(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]


def test_a_response_goes_on_from_another(keeping: Local) -> None:
    first = keeping.post(PATH, ASKED).json()
    assert (first["store"], first["previous_response_id"]) == (True, None)
    more = {"input": "What is it called?", "max_output_tokens": 12}
    second = keeping.post(PATH, more | {"previous_response_id": first["id"]}).json()
    said = {"role": "user", "content": ASKED["input"]}
    whole = [said, *first["output"], {"role": "user", "content": more["input"]}]
    told = keeping.post(PATH, more | {"input": whole, "store": False}).json()
    assert second["output"][0]["content"] == told["output"][0]["content"]
    assert second["usage"]["input_tokens"] == told["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]
    count = keeping.post(f"{PATH}/input_tokens", more | {"previous_response_id": first["id"]}).json()
    assert count == {"object": "response.input_tokens", "input_tokens": told["usage"]["input_tokens"]}
    assert keeping.get(f"{PATH}/{second['id']}").json() == second
    (item,) = keeping.get(f"{PATH}/{second['id']}/input_items").json()["data"]
    assert item["content"] == more["input"] and item["id"].startswith("msg_")
    assert keeping.get(f"{PATH}/{told['id']}").status_code == 404
    deleted = keeping.http.delete(f"{keeping.url}{PATH}/{first['id']}")
    assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
    for id_ in (first["id"], second["id"]):  # of the second, what it goes on from is gone
        refused = keeping.post(PATH, more | {"previous_response_id": id_})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "previous_response_not_found"
    assert keeping.get(f"{PATH}/{first['id']}").status_code == 404


def test_a_streamed_response_is_stored_before_its_last_event(keeping: Local) -> None:
    with keeping.http.stream("POST", keeping.url + PATH, json=ASKED | {"stream": True}) as answer:
        last = events(answer)[-1]
    assert last["type"] == "response.incomplete" and last["response"]["store"]
    assert keeping.get(f"{PATH}/{last['response']['id']}").json() == last["response"]


def test_a_stream_in_the_background_goes_on_after_a_reconnect(keeping: Local) -> None:
    asked = ASKED | {"background": True, "stream": True, "max_output_tokens": 60, "ignore_eos": True}
    with keeping.http.stream("POST", keeping.url + PATH, json=asked) as answer:
        first = next(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))
    at = f"{PATH}/{first['response']['id']}"
    assert first["response"]["background"] and first["response"]["status"] == "in_progress"
    with keeping.http.stream("GET", f"{keeping.url}{at}?stream=true&starting_after=0") as answer:
        rest = events(answer)
    assert [event["sequence_number"] for event in rest] == list(range(1, len(rest) + 1))
    assert rest[-1]["type"] in ("response.completed", "response.incomplete")
    text = "".join(event["delta"] for event in rest if event["type"] == "response.output_text.delta")
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert keeping.get(at).json() == rest[-1]["response"]
    with keeping.http.stream("GET", f"{keeping.url}{at}?stream=true&starting_after={len(rest) - 1}") as answer:
        assert events(answer) == rest[-1:]


def test_a_reply_in_the_background_is_asked_about_and_cancelled(keeping: Local) -> None:
    endless = ASKED | {"background": True, "max_output_tokens": None, "ignore_eos": True}
    made = keeping.post(PATH, endless).json()
    at = f"{PATH}/{made['id']}"
    assert made["status"] == "in_progress" and keeping.get(at).json()["status"] == "in_progress"
    assert keeping.post(f"{at}/cancel", {}).json()["status"] == "cancelled"
    wait_until(lambda: keeping.host.running == 0, "the reply ends")
    assert keeping.get(at).json()["status"] == "cancelled"
    assert keeping.http.delete(keeping.url + at).json()["deleted"] and keeping.get(at).status_code == 404
    refused = keeping.post(PATH, endless | {"store": False}).json()["error"]
    assert refused["param"] == "store"
    wrong = keeping.post(PATH, ASKED | {"background": True, "top_p": 5}).json()["error"]
    assert wrong["param"] == "top_p"


def kept(text: str, previous: str | None = None, owner: str = "") -> StoredResponse:
    output = [{"type": "message", "role": "assistant", "content": text}]
    return StoredResponse(owner, previous, [{"role": "user", "content": text}], {"output": output})


def test_a_store_is_private_bounded_and_forgets(tmp_path: Path) -> None:
    store, folder = ResponseStore(tmp_path / "r", 100_000), tmp_path / "r"
    file = folder / "responses.sqlite"
    store.keep("first", kept("secret of the first" * 10))
    for place in range(100):
        store.keep(f"r{place}", kept("x" * 3000, f"r{place - 1}" if place else None))
        assert store.find("first", "") is not None  # used all the time
    assert store.find("r10", "") is None and store.find("r99", "") is not None
    assert file.stat().st_size < 150_000
    with pytest.raises(RequestError, match=r"id .r[0-9]+. not found"):
        store.conversation("r99", "")
    store.keep("hers", kept("hers", owner="her"))
    assert store.find("hers", "") is None and not store.delete("hers", "") and store.find("hers", "her")
    assert store.delete("first", "") and not store.delete("first", "")
    store.keep("huge", kept("y" * 100_000))
    assert store.find("huge", "") is None
    store.close()
    assert all(b"secret of the first" not in path.read_bytes() for path in folder.iterdir())
    if sys.platform != "win32":
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())]
        assert modes[0] == 0o700 and set(modes[1:]) == {0o600}
