"""GGUF files in Ollama's and LM Studio's folders: listed and found by their names, and never changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle.layouts import NATIVE
from edgeinfer.bundle.opening import is_gguf, open_bundle
from edgeinfer.core.errors import BundleError, ModelError, UsageError
from edgeinfer.hub.placing import find_place, places
from edgeinfer.installed import list_models, remove_model
from edgeinfer.runtime.kv_cache.session_file import origin_of
from tests.gguf_builder import STRING, small_model

MODEL = "application/vnd.ollama.image.model"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose programs keep models where they usually do."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("OLLAMA_MODELS")
    return tmp_path


def ollama(models: Path, name: str, data: bytes, *others: str, digest: str | None = None) -> Path:
    """A model of Ollama's, by HOST/NAMESPACE/MODEL/TAG, with further layers of these kinds."""
    found = digest or f"sha256:{hashlib.sha256(data).hexdigest()}"
    layers: list[Any] = [{"mediaType": MODEL, "digest": found, "size": len(data)}, "odd"]
    layers += [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": "sha256:1"} for kind in others]
    manifest, blob = models / "manifests" / name, models / "blobs" / found.replace(":", "-")
    for path, contents in ((manifest, json.dumps({"layers": layers}).encode()), (blob, data)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    return blob


def model(name: str) -> bytes:
    return small_model(general__name=(STRING, name)).build()


def named(origin: str) -> dict[str, Path]:
    return {place.name: place.path for place in places() if place.origin == origin}


def test_ollamas_models_are_found_by_its_names(home: Path) -> None:
    models = home / ".ollama" / "models"
    library = "registry.ollama.ai/library"
    small = ollama(models, f"{library}/tiny/1b", model("Tiny 1B"), "template", "params")
    last = ollama(models, f"{library}/other/latest", model("Other"), "projector")
    # Another name of the same file.
    ollama(models, f"{library}/alias/latest", model("Other"))
    theirs = ollama(models, "hf.co/org/Name-GGUF/Q4_K_M", model("Name"))
    assert named("ollama") == {"tiny:1b": small, "alias": last, "Name-GGUF:Q4_K_M": theirs}
    for name, path in (("tiny:1b", small), ("other", last), ("OTHER:latest", last), ("name-gguf:q4_k_m", theirs)):
        assert find_place(name).path == path  # type: ignore[union-attr]
    assert find_place("tiny") is None
    listed = {each.name: each for each in list_models()}["tiny:1b"]
    assert (listed.format, listed.origin, listed.path, listed.title) == ("gguf", "ollama", small, "Tiny 1B")
    assert listed.bytes == small.stat().st_size


def test_what_ollama_cannot_be_read_of_is_left_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models, library = home / "elsewhere", "registry.ollama.ai/library"
    monkeypatch.setenv("OLLAMA_MODELS", str(models))
    good = ollama(models, f"{library}/good/latest", model("Good"))
    ollama(models, f"{library}/adapted/latest", model("Adapted"), "adapter")
    ollama(models, f"{library}/two/latest", model("Two"), "model")
    ollama(models, f"{library}/else/latest", b"not GGUF")
    ollama(models, f"{library}/outside/latest", model("Outside"), digest="sha256:../../outside")
    ollama(models, f"{library}/gone/latest", model("Gone")).unlink()
    for name, text in (("text", "{"), ("list", "[]"), ("number", '{"layers": 1}'), ("deep", "[" * 10**5)):
        manifest = models / "manifests" / library / name / "latest"
        manifest.parent.mkdir()
        manifest.write_text(text)
    assert named("ollama") == {"good": good}


def test_lm_studios_models_are_found_where_it_keeps_them(home: Path) -> None:
    usual = home / ".lmstudio" / "models" / "lmstudio-community" / "Tiny-GGUF"
    usual.mkdir(parents=True)
    for name in ("Tiny-Q4_K_M.gguf", "mmproj-Tiny-F16.gguf", "Big-00001-of-00002.gguf", "Big-00002-of-00002.gguf"):
        (usual / name).write_bytes(model(name))
    moved, chosen = home / "moved", home / "chosen" / "org" / "repo"
    for folder in (moved, chosen):
        folder.mkdir(parents=True)
    (home / ".lmstudio-home-pointer").write_text(f"{moved}\n")
    (moved / "settings.json").write_text(json.dumps({"downloadsFolder": str(home / "chosen")}))
    (chosen / "Chosen-Q8_0.gguf").write_bytes(model("Chosen"))
    assert named("lm-studio") == {
        "Chosen-Q8_0": chosen / "Chosen-Q8_0.gguf",
        "Big": usual / "Big-00001-of-00002.gguf",
        "Tiny-Q4_K_M": usual / "Tiny-Q4_K_M.gguf",
    }
    place = find_place("tiny-q4_k_m")
    assert place is not None and place.hub_id == "lmstudio-community/Tiny-GGUF"


def test_files_of_other_programs_are_never_removed(home: Path) -> None:
    blob = ollama(home / ".ollama" / "models", "registry.ollama.ai/library/tiny/1b", model("Tiny"))
    for name in ("tiny:1b", str(blob)):
        with pytest.raises(UsageError, match="was not put there by edgeinfer"):
            remove_model(name)
    with pytest.raises(ModelError):
        remove_model("tiny")
    assert blob.exists()


@pytest.mark.skipif(os.name == "nt" or not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_a_folder_that_may_not_be_read_hides_nothing_else(home: Path) -> None:
    (home / ".lmstudio").mkdir(mode=0)
    blob = ollama(home / ".ollama" / "models", "registry.ollama.ai/library/tiny/1b", model("Tiny"))
    assert named("ollama") == {"tiny:1b": blob}


def test_gguf_files_are_known_by_how_they_begin(tmp_path: Path) -> None:
    blob = tmp_path / f"sha256-{'0' * 64}"
    blob.write_bytes(model("Tiny Chat"))
    manifest, named = open_bundle(blob).manifest, tmp_path / "tiny.gguf"
    named.write_bytes(blob.read_bytes())
    assert is_gguf(blob) and manifest.name == "Tiny Chat"
    assert manifest.gguf_files == (blob.name,) and manifest.weight_bytes == open_bundle(named).manifest.weight_bytes > 0
    # Saved rows go with the file that made them.
    other = tmp_path / f"sha256-{'1' * 64}"
    other.write_bytes(model("Tiny Talk"))
    assert len({origin_of(open_bundle(path), NATIVE, "", exact=False).model for path in (blob, other)}) == 2
    for name, data in (("text", b"GGU"), ("empty", b"")):
        (tmp_path / name).write_bytes(data)
        assert not is_gguf(tmp_path / name)
        with pytest.raises(BundleError, match="is not a bundle"):
            open_bundle(tmp_path / name)
    # By its ending what is no GGUF file says so.
    (tmp_path / "text.gguf").write_bytes(b"text" * 20)
    with pytest.raises(BundleError, match="is not a GGUF file"):
        open_bundle(tmp_path / "text.gguf")
    assert is_gguf(tmp_path / "missing.gguf") and not is_gguf(tmp_path / "missing") and not is_gguf(tmp_path)
