"""Models on this machine are removed with what is theirs alone, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer import hub
from edgeinfer.errors import ModelError, UsageError
from edgeinfer.installed import list_models, remove_model


class Machine:
    """A hub's cache and a folder of models, of which what is removed is noted."""

    BUILTIN, CachedModel = hub.BUILTIN, hub.CachedModel

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.removed: list[str] = []
        self.cached = [
            self.file("org/chat", "checkpoint", 5),
            self.file("org/other", "checkpoint", 7),
            self.file("org/files:Q4_0", "gguf", 11),
            self.file("org/files:Q8_0", "gguf", 13),
            self.file("org/bundle", "bundle", 17),
        ]
        self.converted = [self.conversion("org/chat", 4), self.conversion("org/chat", 8), self.conversion("org/one", 4)]

    def file(self, name: str, kind: Any, size: int) -> hub.CachedModel:
        path = self.folder / name.replace("/", "-")
        path.write_bytes(bytes(size))
        return hub.CachedModel(name, name.partition(":")[0], kind, path, (path,))

    def conversion(self, name: str, bits: int) -> Any:
        source = SimpleNamespace(name=name, directory=None)
        return SimpleNamespace(source=source, bits=bits, path=self.folder / f"{name.replace('/', '-')}-{bits}")

    def builtin(self) -> Path:
        return self.folder / "builtin"

    def models_folder(self) -> Path:
        return self.folder / "models"

    def cached_models(self) -> list[hub.CachedModel]:
        return self.cached

    def converted_models(self) -> list[Any]:
        return self.converted

    def is_bundle(self, path: Path) -> bool:
        return (path / "edgeinfer.json").exists()

    def last_uses(self) -> dict[str, float]:
        return {}

    def catalog_model(self, name: str) -> Any:
        return SimpleNamespace(repo="org/one") if name == "one" else None

    def remove_cached(self, model: hub.CachedModel) -> int:
        self.removed.append(model.name)
        return model.bytes

    def remove_converted(self, model: Any) -> int:
        self.removed.append(model.path.name)
        return 100


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "edgeinfer.json").touch()
    monkeypatch.setattr("edgeinfer.installed.hub", made)
    return made


def test_what_goes_is_what_is_named(machine: Machine) -> None:
    for name, freed, removed in (
        ("org/chat", 205, ["org-chat-4", "org-chat-8", "org/chat"]),
        ("org/chat:4bit", 100, ["org-chat-4"]),
        ("org/one", 100, ["org-one-4"]),
        ("one", 100, ["org-one-4"]),
        ("org/other", 7, ["org/other"]),
        ("org/files:Q8_0", 13, ["org/files:Q8_0"]),
        ("org/bundle", 17, ["org/bundle"]),
        (str(machine.folder / "org-chat-8"), 100, ["org-chat-8"]),
    ):
        machine.removed.clear()
        assert (remove_model(name), machine.removed) == (freed, removed), name
    machine.removed.clear()
    with pytest.raises(ModelError, match="no model org/none"):
        remove_model("org/none")
    for kept in (hub.BUILTIN, str(machine.folder / "models" / "mine")):
        with pytest.raises(UsageError, match=r"stays|not removed"):
            remove_model(kept)
    assert machine.removed == []


def test_each_is_listed_once_and_with_its_origin(machine: Machine) -> None:
    mine = str(machine.folder / "models" / "mine")
    found = {model.name: (model.origin, model.format, model.hub_id, model.source_bytes) for model in list_models()}
    assert found == {
        hub.BUILTIN: ("built-in", "bundle", None, 0),
        mine: ("folder", "bundle", None, 0),
        "org/bundle": ("hub", "gguf", "org/bundle", 0),
        "org/chat:4bit": ("converted", "bundle", "org/chat", 5),
        "org/chat:8bit": ("converted", "bundle", "org/chat", 5),
        "org/files:Q4_0": ("hub", "gguf", "org/files", 0),
        "org/files:Q8_0": ("hub", "gguf", "org/files", 0),
        "org/one": ("converted", "bundle", "org/one", 0),
    }
    assert next(model.name for model in list_models()) == hub.BUILTIN
    assert all(model.error for model in list_models())
