"""Fetching models: requests, refusals and messages, from a fake and from a server of our own on this machine."""

from __future__ import annotations

import errno
import fnmatch
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from edgeinfer import hub
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.manifest import Capabilities, FileEntry, Manifest
from edgeinfer.core.errors import BundleError, EdgeInferError, HubError, InternalError, ModelError, StorageError
from edgeinfer.hub.conversion import FetchJob, fetch
from tests.cli import python
from tests.hub_server import COMMIT, bundle_files, hub_environment, serving

DIGEST = "0" * 64


def manifest(*names: str) -> str:
    files = {name: FileEntry(4, DIGEST) for name in names}
    geometry = Geometry(8, 8, 1, 1, 8, 16)
    able = Capabilities(layer_skip=True, hidden=True, tree=True)
    return Manifest("toy", "llama", "onnx", geometry, parameters=64, capabilities=able, files=files).to_json()


BUNDLE = {
    "edgeinfer.json": manifest("model.onnx", "weights.bin", "tokenizer.json", "odd[1].json"),
    "model.onnx": "onnx",
    "weights.bin": "data",
    "tokenizer.json": "json",
    "odd[1].json": "json",
    "extra.json": "not listed",
    "modeling_toy.py": "raise SystemExit",
    "pytorch_model.bin": "pickle",
}
CHECKPOINT = {
    "config.json": "{}",
    "model-00001-of-00001.safetensors": "",
    "tokenizer.json": "",
    "consolidated.safetensors": "",
    "onnx/model.onnx": "",
    "pytorch_model.bin": "",
    "modeling_toy.py": "",
}


class FakeHub:
    """Stands for the library and a server with one repository per name."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.repos: dict[str, dict[str, str]] = {"org/bundle": BUNDLE, "org/checkpoint": CHECKPOINT}
        self.fails: Exception | None = None
        self.calls: list[dict[str, Any]] = []

    def model_info(self, repo_id: str, *, revision: str | None = None, files_metadata: bool = False) -> Any:
        if self.fails is not None:
            raise self.fails
        self.calls.append({"info": repo_id, "revision": revision})
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in self.repos[repo_id]])

    def snapshot_download(
        self, repo_id: str, *, allow_patterns: list[str], local_files_only: bool = False, **options: Any
    ) -> str:
        target = self.cache / repo_id.replace("/", "--") / "commit"
        if local_files_only:
            if not target.is_dir():
                raise errors.LocalEntryNotFoundError("not cached")
            return str(target)
        if self.fails is not None:
            raise self.fails
        self.calls.append({"repo": repo_id, "patterns": allow_patterns, **options})
        target.mkdir(parents=True, exist_ok=True)
        for name, text in self.repos[repo_id].items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                (target / name).write_text(text)
        return str(target)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    # Not in a process of its own, which would not know of the fake.
    monkeypatch.setattr("edgeinfer.hub.resolving.fetch", lambda job, *_: hub.pull(job.name, progress=False))
    return fake


def fetched(path: Path) -> set[str]:
    return {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()}


def test_pull_of_a_checkpoint_fetches_safetensors_and_configuration_only(fake: FakeHub) -> None:
    path = hub.pull("org/checkpoint")
    assert fetched(path) == {"config.json", "model-00001-of-00001.safetensors", "tokenizer.json"}
    assert not hub.is_bundle(path)


def test_pull_reads_the_revision_once_and_then_its_commit(fake: FakeHub) -> None:
    hub.pull("org/bundle", revision="v1")
    assert [call["revision"] for call in fake.calls] == ["v1", "v1", "commit"]


@pytest.mark.parametrize("name", ["run.py", "weights.pkl", "ops.so", "pytorch_model.bin", "model.pt", "noext"])
def test_a_manifest_cannot_ask_for_code(fake: FakeHub, name: str) -> None:
    fake.repos["org/evil"] = {"edgeinfer.json": manifest(name), name: "boo"}
    with pytest.raises(BundleError, match="not a kind of data"):
        hub.pull("org/evil")
    assert not list(fake.cache.rglob(name))


def test_a_repository_without_a_model_is_refused_before_anything_is_fetched(fake: FakeHub) -> None:
    fake.repos["org/pickled"] = {"config.json": "{}", "pytorch_model.bin": ""}
    with pytest.raises(HubError, match="neither a bundle nor a checkpoint"):
        hub.pull("org/pickled")
    assert not fake.cache.exists()


def test_telemetry_is_off(fake: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    hub.pull("org/bundle")
    assert constants.HF_HUB_DISABLE_TELEMETRY is True


def test_progress_is_silent_or_passed_on(fake: FakeHub, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    hub.pull("org/bundle", progress=lambda *step: seen.append(step))
    bar = fake.calls[-1]["tqdm_class"]
    with bar(desc="Downloading", total=0, unit="B", unit_scale=True, name="huggingface_hub.snapshot") as bytes_bar:
        bytes_bar.total = 10
        bytes_bar.refresh()
        bytes_bar.update(4)
        bytes_bar.update(6)
    with bar(range(3), desc="files") as files_bar:
        assert list(files_bar) == [0, 1, 2]
    assert seen == [("Downloading", 4, 10), ("Downloading", 10, 10)]
    hub.pull("org/bundle", progress=False)
    fake.calls[-1]["tqdm_class"](desc="Downloading", total=1, unit="B").update(1)
    assert capfd.readouterr().err == ""


def test_resolve_without_a_model_is_the_builtin_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.hub.cache.__file__", str(tmp_path / "hub" / "cache.py"))
    with pytest.raises(BundleError, match="without its built-in model"):
        hub.resolve(None)
    (tmp_path / "builtin" / "tales").mkdir(parents=True)
    (tmp_path / "builtin" / "tales" / "edgeinfer.json").write_text(manifest())
    assert hub.resolve(None) == tmp_path / "builtin" / "tales"


def test_find_checkpoint(fake: FakeHub, tmp_path: Path) -> None:
    path = hub.find_checkpoint("org/checkpoint")
    assert (path / "config.json").is_file()
    fake.fails = errors.OfflineModeIsEnabled("offline")
    assert hub.find_checkpoint("org/checkpoint") == path
    assert hub.find_checkpoint(tmp_path) == tmp_path


@pytest.mark.parametrize("model", ["nope", "./org/name", "a/b/c", "../x", "org/", "/org", "", "org/na me", "-x/y"])
def test_what_is_no_path_and_no_hub_id_is_said_so(
    fake: FakeHub, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "":
        model = str(tmp_path / "absent")
    with pytest.raises(ModelError, match="No model at"):
        hub.resolve(model)
    assert fake.calls == []


def http_error(kind: Callable[..., Exception], status: int) -> Exception:
    response = SimpleNamespace(status_code=status, headers={}, request=None)
    return kind("refused", response=response)


FAILURES = [
    (errors.OfflineModeIsEnabled("off"), HubError, "Unset it"),
    (errors.LocalEntryNotFoundError("no"), HubError, "Check the connection"),
    (errors.HTTPError("connection refused"), HubError, "Check the connection"),  # type: ignore[attr-defined]
    (ConnectionResetError("reset"), HubError, "Check the connection"),
    (TimeoutError("slow"), HubError, "Check the connection"),
    (http_error(errors.GatedRepoError, 403), HubError, "https://huggingface.co/org/bundle"),
    (http_error(errors.RepositoryNotFoundError, 401), HubError, "spelling"),
    (http_error(errors.RepositoryNotFoundError, 404), HubError, "spelling"),
    (http_error(errors.RevisionNotFoundError, 404), HubError, "branch, tag or commit"),
    (http_error(errors.HfHubHTTPError, 401), HubError, "hf auth login"),
    (http_error(errors.HfHubHTTPError, 503), HubError, "later"),
    (errors.HFValidationError("bad"), HubError, "OWNER/NAME"),
    (OSError(errno.ENOSPC, "No space left on device"), StorageError, "downloads resume"),
    (PermissionError(errno.EACCES, "Permission denied"), StorageError, "HF_HOME"),
]


@pytest.mark.parametrize(("failure", "kind", "hint"), FAILURES, ids=[type(f).__name__ for f, _, _ in FAILURES])
def test_failures_say_what_to_do(fake: FakeHub, failure: Exception, kind: type[EdgeInferError], hint: str) -> None:
    fake.fails = failure
    with pytest.raises(kind) as caught:
        hub.pull("org/bundle")
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


GGUFS = {
    "toy-Q4_K_M.gguf": "4",
    "toy-Q4_0.gguf": "0",
    "toy-IQ4_0.gguf": "i",
    "big-q8_0-00001-of-00002.gguf": "8a",
    "big-q8_0-00002-of-00002.gguf": "8b",
    "mmproj-toy-Q8_0.gguf": "eyes",
    "README.md": "",
}


@pytest.mark.parametrize(
    ("tag", "first", "count"), [("Q4_K_M", "toy-Q4_K_M.gguf", 1), ("q8_0", "big-q8_0-00001-of-00002.gguf", 2)]
)
def test_one_gguf_file_of_a_repository_is_fetched_by_its_type(fake: FakeHub, tag: str, first: str, count: int) -> None:
    fake.repos["org/gguf"] = GGUFS
    path = hub.resolve(f"org/gguf:{tag}", llamacpp=True)
    assert path.name == first
    assert len(fetched(path.parent)) == count
    calls = len(fake.calls)
    assert hub.resolve(f"org/gguf:{tag}", llamacpp=True) == path
    assert len(fake.calls) == calls, "what is cached is not fetched again"


@pytest.mark.parametrize(("tag", "what"), [("toy", "Several"), ("Q5_K_M", "no GGUF file"), ("4_0", "no GGUF file")])
def test_a_type_that_means_no_file_or_several_is_refused_with_the_names(fake: FakeHub, tag: str, what: str) -> None:
    fake.repos["org/gguf"] = GGUFS
    with pytest.raises(HubError, match=what) as raised:
        hub.pull(f"org/gguf:{tag}")
    assert raised.value.hint is not None and "toy-Q4_0.gguf" in raised.value.hint and "mmproj" not in raised.value.hint


def test_a_repository_of_gguf_files_says_how_to_name_one(fake: FakeHub) -> None:
    fake.repos["org/gguf"] = GGUFS
    with pytest.raises(HubError) as raised:
        hub.pull("org/gguf")
    assert raised.value.hint is not None and "org/gguf:Q4_K_M" in raised.value.hint


def test_what_a_process_leaves_behind_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As one does that still writes a file while it removes its folder."""
    work = tmp_path / "edgeinfer" / "models" / "org--model" / ".work-x"
    leave = f"import pathlib; pathlib.Path({str(work)!r}, 'bundle').mkdir(parents=True)"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("edgeinfer.hub.conversion._PROGRAM", (sys.executable, "-c", leave))
    with pytest.raises(InternalError, match="ended unexpectedly"):
        fetch(FetchJob("org/model"))
    assert not work.exists()


# With the hub's own library.

LISTINGS = """
import json
from pathlib import Path
from edgeinfer import hub

def listed():
    cached = [str(each.path) if each.kind == "gguf" else each.name for each in hub.cached_models()
              if each.kind != "checkpoint"]
    return [sorted(cached), [None if path is None else str(path) for path in (hub.find_model(n).here for n in names)]]

names = ["org/bundle", "org/absent", "org/gguf:Q8_0", "org/gguf:Q2_K"]
empty = listed()
for repo in ("org/bundle", "org/checkpoint", "org/gguf:Q4_0", "org/gguf:Q8_0"):
    hub.pull(repo, progress=False)
filled = listed()
# A bundle that is not whole is completed.
weights = Path(filled[1][0], "weights.bin")
weights.resolve().unlink()
weights.unlink(missing_ok=True)
damaged = listed()
hub.pull("org/bundle", progress=False)
print(json.dumps([empty, filled, damaged, weights.is_file()]))
"""


def test_what_is_cached_is_listed_and_holds_no_code(tmp_path: Path) -> None:
    code = {"modeling.py": b"raise SystemExit", "pytorch_model.bin": b"pickle"}
    checkpoint = {"config.json": b"{}", "model.safetensors": b"tensors", "onnx/model.onnx": b"graph"}
    names = ("toy-Q4_0", "toy-Q8_0-00001-of-00002", "toy-Q8_0-00002-of-00002")
    files = {f"{name}.gguf": b"GGUF" + name.encode() for name in names}
    bundle = bundle_files(tmp_path / "source")
    with serving({"org/bundle": bundle | code, "org/checkpoint": checkpoint | code, "org/gguf": files}) as server:
        said = python(LISTINGS, **hub_environment(server.url, tmp_path))
    empty, (found, local), damaged, is_whole = json.loads(said)
    assert empty == [[], [None] * 4]
    assert [Path(name).name for name in found] == ["toy-Q4_0.gguf", "toy-Q8_0-00001-of-00002.gguf", "bundle"]
    assert found[2] == "org/bundle"
    assert [path and Path(path).name for path in local] == [COMMIT, None, "toy-Q8_0-00001-of-00002.gguf", None]
    assert damaged[0] == found[:2] and is_whole
    assert sorted(server.served) == sorted([*bundle, "weights.bin", "config.json", "model.safetensors", *files])
