"""The app's API except replies: conversations, settings, models, plans, loading; and what it refuses."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.desktop.library import Library, kind_of
from edgeinfer.apps.server import host
from tests.apps.desktop.served import Window, served
from tests.speculation import BUILTIN, needs_builtin
from tests.waiting import TIME_LIMIT

pytestmark = needs_builtin

SETTINGS = {"options": {"temperature": 0.0, "max_tokens": 8}}


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    """An app with a model loaded, which finds one usable model and two broken ones."""
    folder = tmp_path_factory.mktemp("data")
    models = folder / "models"
    shutil.copytree(BUILTIN, models / "mine")
    (models / "broken").mkdir()
    (models / "broken" / "edgeinfer.json").write_text("{}")
    (models / "odd.gguf").write_bytes(b"GGUF")
    (models / "notes.txt").write_text("x")
    with served(folder, settings=SETTINGS) as opened:
        opened.wait("model", status="ready")
        yield opened


def test_first_start(tmp_path: Path) -> None:
    with served(tmp_path / "new" / "data") as window:
        window.wait("model", status="ready")
        state = window.call("GET", "/state")
        assert (state["version"], state["notices"]) == (edgeinfer.__version__, [])
        assert state["settings"] == {
            "theme": None,
            "memory": None,
            "context": None,
            "model": "built-in",
            "model_name": "tales",
            "system": "",
            "options": {},
        }
        assert state["defaults"] == {"options": {"temperature": 0.7, "top_p": 0.9}}
        assert 0 < state["machine"]["available_bytes"] <= state["machine"]["total_bytes"]
        model = state["model"]
        assert (model["status"], model["id"], model["name"]) == ("ready", "built-in", "tales")
        assert model["context"] == 1024
        assert model["planned_bytes"] > 0 < model["process_bytes"]
        assert window.call("GET", "/conversations") == {"conversations": []}


def test_conversations(window: Window) -> None:
    made = window.call("POST", "/conversations", {"title": "Mine", "system": "S"}, status=201)
    id = made["id"]
    assert (made["title"], made["system"], made["messages"], made["leaf"]) == ("Mine", "S", [], None)
    changed = window.call("PATCH", f"/conversations/{id}", {"title": "Yours", "options": {"seed": 4, "top_k": None}})
    assert (changed["title"], changed["options"], changed["system"]) == ("Yours", {"seed": 4}, "S")
    # Another window may have changed the other options meanwhile.
    for options, together in [({"top_k": 5}, {"seed": 4, "top_k": 5}), ({"seed": None}, {"top_k": 5})]:
        assert window.call("PATCH", f"/conversations/{id}", {"options": options})["options"] == together
    window.ask(id, "a needle in the hay")
    (found,) = window.call("GET", "/conversations?search=needle")["conversations"]
    assert (found["id"], "needle" in found["snippet"]) == (id, True)
    assert window.call("GET", "/conversations?search=nothing")["conversations"] == []
    assert id in ids(window)
    assert window.call("DELETE", f"/conversations/{id}", status=204) is None
    assert id not in ids(window)
    plain = window.call("POST", "/conversations", status=201)
    assert (plain["title"], plain["options"]) == ("New chat", {})


def ids(window: Window) -> list[str]:
    """The ids of the listed conversations."""
    return [conversation["id"] for conversation in window.call("GET", "/conversations")["conversations"]]


def test_export_and_import(window: Window) -> None:
    id = window.new()
    done = window.ask(id, "Größe? /..\\ 日本")
    file = window.http.get(f"/app/api/conversations/{id}/export?format=json")
    assert file.headers["content-disposition"] == (
        "attachment; filename*=UTF-8''Gr%C3%B6%C3%9Fe%20%E6%97%A5%E6%9C%AC.json"
    )
    copy = window.http.post("/app/api/import", content=file.content)
    assert copy.status_code == 201
    assert copy.json()["id"] != id
    assert copy.json()["messages"][1]["content"] == done["content"]
    text = window.http.get(f"/app/api/conversations/{id}/export?format=markdown")
    assert text.headers["content-type"] == "text/markdown; charset=utf-8"
    assert done["content"] in text.text
    window.refused("GET", f"/conversations/{id}/export?format=pdf", status=400, code="invalid")
    assert window.http.post("/app/api/import", content=b"{}").json()["error"]["code"] == "invalid"
    listed = ids(window)
    assert (listed.count(id), listed.count(copy.json()["id"])) == (1, 1)


def test_settings(window: Window) -> None:
    """What is refused of them, tests/apps/desktop/test_settings.py and test_hostile_requests.py have."""
    changed = window.call("PATCH", "/settings", {"theme": "dark", "system": "Be kind.", "options": {"top_k": 4}})
    assert (changed["theme"], changed["options"]["top_k"]) == ("dark", 4)
    assert window.call("POST", "/conversations", {}, status=201)["system"] == "Be kind."
    window.refused("PATCH", "/settings", {"recent": []}, status=400, code="invalid")
    assert window.call("PATCH", "/settings", {"system": ""}) == changed | {"system": ""}


@pytest.mark.slow
def test_what_is_found_after_a_restart(tmp_path: Path) -> None:
    mine = str(shutil.copytree(BUILTIN, tmp_path / "models" / "mine"))
    with served(tmp_path) as window:
        window.call("PATCH", "/settings", {"theme": "light", "options": {"max_tokens": 3}})
        window.call("POST", "/model/load", {"model": mine, "memory": None, "context": 256}, status=202)
        assert window.wait("model", status="ready", id=mine)["context"] == 256
        assert window.call("GET", "/state")["settings"]["model"] == mine
        id = window.new()
        done = window.ask(id, "Hi")
    with served(tmp_path) as window:
        assert window.call("GET", "/state")["settings"]["theme"] == "light"
        assert window.call("GET", f"/conversations/{id}")["messages"][1] == done
        # What was used last is loaded again.
        ready = window.wait("model", status="ready")
        assert (ready["id"], ready["context"]) == (mine, 256)


def test_damaged_files_are_told_of(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite3").write_bytes(b"not a database" * 1000)
    (tmp_path / "settings.json").write_text("{")
    with served(tmp_path) as window:
        notices = window.call("GET", "/state")["notices"]
    assert ["conversations" in notices[0], "settings" in notices[1]] == [True, True]
    for notice in notices:
        assert "put aside as" in notice


def test_bad_requests_are_refused(window: Window) -> None:
    refused: list[tuple[str, object]] = [
        ("/conversations", {"title": 3}),
        ("/conversations", {"name": "x"}),
        ("/conversations", {"title": "x" * 201}),
        ("/conversations", ["x"]),
        ("/plan", {"model": "built-in", "memory": "many"}),
        ("/plan", {"model": "built-in", "memory": True}),
        ("/plan", {"model": "built-in", "memory": 0}),
        ("/plan", {"model": "built-in", "kv": "int3"}),
        ("/plan", {"model": "built-in", "context": 99999999}),
        ("/model/load", {"model": 5}),
        ("/downloads", {"id": ""}),
        ("/downloads", {"id": "--help"}),
    ]
    for path, body in refused:
        answer = window.http.post(f"/app/api{path}", json=body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert answer.json()["error"]["message"]


def test_what_is_not_there(window: Window) -> None:
    for method, path in (("GET", "/conversations/x"), ("DELETE", "/conversations/x"), ("DELETE", "/downloads/x")):
        window.refused(method, path, status=404, code="not_found")
    for path in ("/conversations/x/stop", "/conversations/x/messages/y/regenerate"):
        window.refused("POST", path, status=404, code="not_found")
    assert "not on this machine" in window.refused("POST", "/plan", {"model": "org/x"}, status=409, code="hub")
    window.refused("POST", "/model/load", {"model": "/no/such"}, status=409, code="model")
    assert window.http.get("/app/api/nothing").status_code == 404
    assert window.http.put("/app/api/state").status_code == 405


def test_models_and_what_they_need(window: Window) -> None:
    found = {Path(model["id"]).name: model for model in window.call("GET", "/models")["models"]}
    assert set(found) == {"built-in", "mine", "broken", "odd.gguf"}
    mine = found["mine"]
    # Another has its name, so it says where it is.
    assert mine["place"].endswith("mine") and found["broken"]["place"] == found["built-in"]["place"] == ""
    assert (mine["source"], mine["name"], mine["context"], mine["error"]) == ("bundle", "tales", 1024, None)
    assert 0 < mine["minimum_bytes"] <= mine["planned_bytes"] + 4_000_000
    assert mine["bytes"] == found["built-in"]["bytes"] > 0
    assert found["broken"]["error"]
    assert (found["odd.gguf"]["source"], bool(found["odd.gguf"]["error"])) == ("gguf", True)


def test_the_plan_of_a_model_does_not_count_the_one_that_is_loaded(window: Window) -> None:
    loaded = window.call("GET", "/state")["model"]
    window.ask(window.new(), "Tell me a story.")
    plan = window.call("POST", "/plan", {"model": "built-in", "context": loaded["context"]})
    # What a model leaves in the heap counts, and a process takes some more or less from one moment to the next.
    assert plan["planned_bytes"] < loaded["planned_bytes"] + 12e6
    assert plan["fits"]


@pytest.mark.slow
def test_loading_under_a_budget_and_unloading(tmp_path: Path) -> None:
    with served(tmp_path, settings=SETTINGS | {"memory": 10_000_000}) as window:
        failed = window.wait("model", status="failed")
        assert failed["error"]["minimum_bytes"] > 10_000_000
        assert failed["budget_bytes"] == 10_000_000
        reply = window.ask(window.new(), "Hi")
        assert (reply["error"]["code"], reply["error"]["minimum_bytes"] > 0) == ("memory_short", True)
        body = {"model": "built-in", "memory": failed["error"]["minimum_bytes"] + 60_000_000, "context": None}
        assert window.call("POST", "/model/load", body, status=202)["status"] == "loading"
        assert window.wait("model", status="ready")["budget_bytes"] == body["memory"]
        window.call("POST", "/model/unload", status=202)
        empty = window.wait("model", status="empty")
        assert (empty["id"], empty["planned_bytes"]) == (None, None)


@pytest.mark.slow
def test_cancelling_before_and_while_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(TIME_LIMIT)

    def facts(*_: object) -> None:
        hold()

    def load(model: str | None, options: object, parallel: int, progress: Callable[[str, int, int], None]) -> None:
        progress("weights", 2, 2)
        hold()
        progress("graph", 1, 2)
        raise AssertionError("loading went on")

    def cancelled(window: Window) -> str:
        """Cancel a held load and return the state."""
        assert begun.wait(TIME_LIMIT)
        window.call("POST", "/model/cancel", status=202)
        go_on.set()
        status: str = window.wait("model", progress=None)["status"]
        begun.clear()
        go_on.clear()
        return status

    with served(tmp_path) as window:
        window.wait("model", status="ready")
        with monkeypatch.context() as patch:
            patch.setattr(Library, "facts", facts)
            window.call("POST", "/model/load", {"model": None}, status=202)
            # It has not started, so the present model stays.
            assert cancelled(window) == "ready"
        monkeypatch.setattr(host, "load_with_room", load)
        window.call("POST", "/model/load", {"model": None}, status=202)
        assert window.wait("model", progress={"stage": "weights", "done": 2, "total": 2})["status"] == "loading"
        assert cancelled(window) == "empty"


@pytest.mark.slow
def test_a_conversation_keeps_its_own_model(tmp_path: Path) -> None:
    mine = str(shutil.copytree(BUILTIN, tmp_path / "models" / "mine"))
    with served(tmp_path, settings=SETTINGS) as window:
        window.wait("model", status="ready", id="built-in")
        first, second = window.new(), window.new()
        assert window.call("GET", f"/conversations/{first}")["choice"] is None
        window.ask(first, "Hi")
        usual = {"model": "built-in", "name": "tales", "file": "", "memory": None, "context": None}
        assert window.call("GET", f"/conversations/{first}")["choice"] == usual
        body = {"model": mine, "memory": None, "context": 256, "conversation": second, "default": False}
        loading = window.call("POST", "/model/load", body, status=202)
        own = {"model": mine, "name": "tales", "file": "mine", "memory": None, "context": 256}
        assert (loading["choice"], loading["name"]) == (own, "tales")
        assert window.wait("model", status="ready", id=mine)["most_context"] == 1024
        window.ask(second, "Hi")
        # Neither new conversations nor the other one are any different for it.
        settings = window.call("GET", "/state")["settings"]
        assert (settings["model"], settings["context"]) == ("built-in", None)
        assert window.call("GET", f"/conversations/{first}")["choice"] == usual
        window.call("POST", "/model/load", body | {"conversation": "x"}, status=404)
        window.refused("PATCH", f"/conversations/{first}", {"choice": {"model": 3}}, status=400, code="invalid")
        chosen = {"model": mine, "memory": 10**9, "context": 512}
        assert window.call("PATCH", f"/conversations/{first}", {"choice": chosen})["choice"] == {
            **chosen,
            "name": "tales",
            "file": "mine",
        }
    with served(tmp_path, settings=SETTINGS) as window:
        assert window.wait("model", status="ready")["id"] == "built-in"
        assert window.call("GET", f"/conversations/{second}")["choice"] == own
        window.ask(second, "Hi", window.call("GET", f"/conversations/{second}")["leaf"])
        # What it is sent to is what a conversation uses.
        assert window.call("GET", f"/conversations/{second}")["choice"] == usual


def test_models_that_can_be_had(window: Window, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    catalog = window.call("GET", "/catalog")
    models = {model["name"]: model for model in catalog["models"]}
    entry = models["qwen3-0.6b"]
    assert (entry["repo"], entry["licence"], entry["path"]) == ("Qwen/Qwen3-0.6B", "Apache-2.0", None)
    assert (
        entry["fit"] in ("yes", "tight", "no") and entry["memory"] < entry["download"] < catalog["room"]["disk_bytes"]
    )
    picked = [models[name] for name in catalog["recommended"]]
    assert len(picked) <= 3 and all(model["fit"] == "yes" for model in picked)
    # Errors of the hub are worded for the window.
    for path in ("/hub?search=qwen", "/offers?name=org/name"):
        says = window.refused("GET", path, status=409, code="hub")
        assert "edgeinfer models" not in says and "on this computer" in says
    window.refused("GET", "/hub?search=", status=400, code="invalid")
    for path, says in (
        ("models/mine", "is not a whole path"),
        (str(tmp_path / "none"), "There is no file or folder"),
        (str(tmp_path), "contains no model that can be imported"),
        (__file__, "is not a GGUF file"),
    ):
        assert says in window.refused("POST", "/models/import", {"path": path}, status=409, code="model")
    mine = str(shutil.copytree(BUILTIN, tmp_path / "elsewhere"))
    assert window.call("POST", "/models/import", {"path": f'"{mine}"'}) == {"id": mine}
    assert mine in window.services.settings.now.recent
    window.refused("POST", "/models/remove", {"id": mine}, status=409, code="model")
    assert Path(mine).is_dir()


def test_events_begin_with_the_present_state(window: Window) -> None:
    seen = []
    for kind, _ in window.events("/events"):
        seen.append(kind)
        if {"model", "conversations"} <= set(seen):
            break
    before = window.events("/events")
    assert next(before)
    window.call("POST", "/conversations", {}, status=201)
    assert any(kind == "conversations" for kind, _ in before)


def test_a_large_file_is_refused(window: Window) -> None:
    assert window.http.post("/app/api/import", content=b" " * 17_000_000).status_code == 413


def test_a_model_is_suggested_what_it_is_for(tmp_path: Path) -> None:
    def facts(name: str, chats: bool) -> Any:
        return SimpleNamespace(name=name, chats=chats)

    for name, chats, kind in (
        ("tales", True, "stories"),
        ("stories260K", False, "stories"),
        ("qwen2.5-coder-0.5b-instruct-q4_k_m", True, "code"),
        ("granite-3b-code-instruct", True, "code"),
        ("CodeLlama-7b", False, "base"),
        ("gemma3-270m-q4_k_m", False, "base"),
        ("smollm2-135m-instruct-q4_1", True, "chat"),
        ("Qwen3-0.6B", True, "chat"),
    ):
        assert kind_of(facts(name, chats)) == kind, name


def test_folders_are_listed_to_choose_a_model_in(window: Window, tmp_path: Path) -> None:
    (tmp_path / "inner" / ".hidden").mkdir(parents=True)
    for name in ("Model.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf", "mmproj-x.gguf", "notes.txt"):
        (tmp_path / "inner" / name).write_bytes(b"xy")
    (tmp_path / "inner" / "checkpoint").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "inner" / "checkpoint" / name).touch()
    shown = window.call("GET", f"/folders?path={tmp_path}")
    assert (shown["path"], shown["parent"]) == (str(tmp_path.resolve()), str(tmp_path.resolve().parent))
    assert [(entry["name"], entry["kind"]) for entry in shown["entries"]] == [("inner", "folder")]
    inner = window.call("GET", f"/folders?path={shown['entries'][0]['path']}")
    assert [(entry["name"], entry["kind"], entry["bytes"]) for entry in inner["entries"]] == [
        ("big-00001-of-00002.gguf", "model", 2),
        ("checkpoint", "model", None),
        ("Model.gguf", "model", 2),
    ]
    assert window.call("GET", "/folders")["path"] == str(Path.home().resolve())
    for wrong in (tmp_path / "none", tmp_path / "inner" / "notes.txt"):
        assert "cannot be opened" in window.refused("GET", f"/folders?path={wrong}", status=409, code="model")
