"""GGUF files on the native kernel: prepared once, again when they change, removed, or left to llama.cpp."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.main import main
from edgeinfer.apps.desktop.library import Library, Planner
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.writing import digest_of
from edgeinfer.core.errors import HubError, StorageError, UnsupportedArchitectureError, UsageError
from edgeinfer.hub.catalog_models import Package, catalog_model
from edgeinfer.hub.conversion import FetchJob
from edgeinfer.tools import conversion
from tests.edgeinfer.test_other_programs import ollama
from tests.gguf_builder import STRING, UINT32, small_model
from tests.gguf_models import random_gguf
from tests.kernel import require_kernel

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file of a user who has no models."""
    require_kernel()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return random_gguf(tmp_path / "files", kind="Q8_0", hidden_size=64).rename(tmp_path / "files" / "toy-1m-Q8_0.gguf")


def work(**job: Any) -> Path:
    """Does a job in this process."""
    return conversion._work(conversion._Run(FetchJob(**job), lambda *_: None, conversion._Scratch(), SimpleQueue()))


def written() -> set[str]:
    """What is in the user's folder of models."""
    folder = hub.models_folder()
    names = {str(path.relative_to(folder)) for path in folder.glob("*/*")}
    return {name for name in names if not name.startswith(".locks")}


def never(*_: Any) -> Path:
    raise AssertionError("it was prepared already")


def test_a_file_is_prepared_once_listed_and_removed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with edgeinfer.load(path, context=64) as model:
        text = model.generate([1, 5, 9, 12], max_tokens=8, temperature=0, ignore_eos=True).text
    monkeypatch.setattr("edgeinfer.hub.resolving.fetch", never)
    with edgeinfer.load("toy-1m-q8_0", context=64, speculation="off") as model:
        assert model.generate([1, 5, 9, 12], max_tokens=8, temperature=0, ignore_eos=True).text == text
    (listed,) = (model for model in edgeinfer.list_models() if model.origin == "converted")
    assert (listed.name, listed.error) == ("toy-1m-Q8_0", None)
    manifest = open_bundle(listed.path).manifest
    kinds = {part.kind for entry in manifest.tensors for part in entry.segments}
    assert manifest.backend == "onnx" and kinds == {"Q8_0"}
    assert edgeinfer.remove_model("toy-1m-Q8_0") > 0 and not written() and path.exists()


def test_a_changed_file_is_prepared_again(path: Path) -> None:
    first = hub.resolve(path)
    os.utime(path, (1, 1))
    second = hub.resolve(path)
    assert first != second and not first.exists() and hub.resolve(path) == second


def test_ollamas_models_are_prepared_by_their_own_names(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    blob = ollama(tmp_path / "ollama", "registry.ollama.ai/library/toy/1m", path.read_bytes())
    before = blob.stat()
    with caplog.at_level("INFO"), edgeinfer.load("toy:1m", context=64) as model:
        assert len(model.generate([1, 5, 9], max_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3
    assert "Preparing" in caplog.text and "Preparing sha256" not in caplog.text
    # Of the file only what was prepared of it goes.
    assert edgeinfer.remove_model("toy:1m") > 0 and not written()
    assert (blob.stat().st_mtime_ns, blob.stat().st_size) == (before.st_mtime_ns, before.st_size)


def test_options_of_llama_cpp_leave_the_file_as_it_is(path: Path) -> None:
    assert hub.resolve(path, llamacpp=True) == path and not written()
    assert hub.find_model(path).here == path


def test_what_is_not_read_is_left_to_llama_cpp(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = small_model(llama__odd=(UINT32, 1)).write(path.with_name("other.gguf"))
    with monkeypatch.context() as patch:
        patch.setattr("edgeinfer.hub.resolving.find_spec", lambda _: object())
        assert hub.resolve(other) == other
        patch.setattr("edgeinfer.hub.resolving.fetch", never)
        assert hub.resolve(other) == other
    monkeypatch.setattr("edgeinfer.hub.resolving.find_spec", lambda _: None)
    with pytest.raises(UnsupportedArchitectureError, match=r"other\.gguf needs llama\.cpp: llama\.odd") as caught:
        hub.resolve(other)
    assert "edgeinfer[gguf]" in str(caught.value.hint) and "checkpoint" in str(caught.value.hint)


def test_looking_at_a_file_prepares_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.models_folder().mkdir(parents=True)
    other = small_model(general__architecture=(STRING, "grok"), grok__block_count=(UINT32, 1)).write(
        hub.models_folder() / "other.gguf"
    )
    own = Path(shutil.copy(path, hub.models_folder()))
    assert main(["inspect", str(own)]) == 0
    assert "native kernel, with the file's types" in capsys.readouterr().out
    assert hub.refusal(other) == "its architecture is grok"
    listed = {model.name: model for model in edgeinfer.list_models()}
    assert (listed["toy-1m-Q8_0"].memory or 0) > own.stat().st_size and listed["toy-1m-Q8_0"].error is None
    (shown,) = (model for model in Library([], Planner()).models() if model.id == str(own))
    assert shown.planned_bytes == listed["toy-1m-Q8_0"].memory and shown.error is None
    assert {model.path.name for model in hub.places()} == {"tales", "other.gguf", own.name} and not written()
    prepared = hub.resolve(own)
    assert [model.id for model in Library([], Planner()).models() if "toy" in model.id] == [str(prepared)]
    assert edgeinfer.remove_model(str(prepared)) > 0 and not written() and own.exists()


def test_a_plan_prepares_nothing_and_is_the_same_afterwards(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"context": 128, "threads": 1, "speculation": "off"}
    before = edgeinfer.plan(path, **options)
    assert main(["plan", "-m", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gguf"]["engine"] == "native" and not hub.models_folder().exists()
    with pytest.raises(UsageError, match="have their bits"):
        edgeinfer.plan(path, bits=4)
    hub.resolve(path)
    after = edgeinfer.plan(path, **options)
    terms = (plan.terms | {"interpreter": 0, "libraries": 0, "loading": 0} for plan in (before, after))
    assert next(terms) == next(terms) and before.configuration == after.configuration


def test_a_prepared_file_is_planned_and_verified_with_its_bundle(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = hub.resolve(path)
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs_on"] == {
        "engine": "native", "reason": None, "prepared": str(prepared)
    }  # fmt: skip
    names = open_bundle(prepared).manifest.files
    assert edgeinfer.verify(path) == {path.name: "first"} | dict.fromkeys(names, "now")
    assert main(["plan", "-m", str(path)]) == 0
    assert "Runs on: native kernel" in capsys.readouterr().out


def test_a_full_disk_leaves_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
    with pytest.raises(StorageError, match=r"toy-1m-Q8_0\.gguf needs .* of disk space"):
        work(path=str(path))
    assert not written()


def packed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the file that of the catalog's smallest model, in a wheel of an index that is a folder."""
    index, entry = path.with_name("index"), catalog_model("smollm2-135m")
    assert entry is not None
    index.mkdir()
    with zipfile.ZipFile(index / "toy_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(path, "toy_model/toy.gguf")
        wheel.writestr("toy_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        wheel.writestr("toy_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    package = Package("toy-model==1.0", "toy_model/toy.gguf", digest_of(path), path.stat().st_size)
    for module in ("tools.conversion", "hub.resolving"):
        monkeypatch.setattr(f"edgeinfer.{module}.catalog_model", lambda name: replace(entry, package=package))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))


def test_a_model_of_the_catalog_comes_from_its_package(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(path, monkeypatch)
    made = work(package="smollm2-135m")
    assert made.parent.name == "smollm2-135m" and written() == {"smollm2-135m/source.json", f"smollm2-135m/{made.name}"}
    monkeypatch.setattr("edgeinfer.hub.resolving.fetch", never)
    assert hub.resolve("smollm2-135m") == made == hub.find_model("smollm2-135m").here
    assert [model.name for model in edgeinfer.list_models() if model.origin == "converted"] == ["smollm2-135m"]


def test_without_its_package_it_comes_from_the_hub(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(path, monkeypatch)
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent / "none"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match="HuggingFaceTB/SmolLM2-135M-Instruct"):
        work(package="smollm2-135m")
    assert not written()
