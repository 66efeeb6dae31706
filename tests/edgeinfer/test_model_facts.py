"""What a model says of itself before it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.bundle.writing import seal
from edgeinfer.errors import HubError, ModelError
from edgeinfer.openai import make_completion
from tests.gguf_builder import FLOAT32, INT32, small_model
from tests.speculation import BUILTIN, needs_builtin
from tests.tables import each_row

pytestmark = needs_builtin


def with_generation_config(folder: Path, config: Any) -> Path:
    """The built-in model with another generation_config.json."""
    bundle = folder / "bundle"
    shutil.copytree(BUILTIN, bundle)
    (bundle / "generation_config.json").write_text(json.dumps(config))
    manifest = Manifest.from_json((bundle / "edgeinfer.json").read_text("utf-8"))
    (bundle / "edgeinfer.json").unlink()
    seal(bundle, manifest)
    return bundle


def test_the_built_in_model() -> None:
    facts = edgeinfer.describe()
    with edgeinfer.load() as model:
        for name in ("name", "architecture", "parameters", "bits_per_weight", "backend"):
            assert getattr(facts, name) == getattr(model.info, name)
        assert facts.context == model.context
    files = [path for path in BUILTIN.rglob("*") if path.is_file() and path != BUILTIN / "edgeinfer.json"]
    assert facts.bytes == sum(path.stat().st_size for path in files)
    assert facts.sampling == {}


@each_row(
    ("config", "sampling"),
    [
        ({"temperature": 0.6, "top_k": 20, "num_beams": 4}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"temperature": 0.6, "do_sample": True, "top_p": None}, {"temperature": 0.6}),
        ({"temperature": "hot"}, {}),
        ({"top_p": 7}, {}),
        ({}, {}),
    ],
)
def test_what_its_makers_recommend(tmp_path: Path, config: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert edgeinfer.describe(with_generation_config(tmp_path, config)).sampling == sampling


def test_a_gguf_file_says_it_in_its_metadata(tmp_path: Path) -> None:
    told = {"temp": (FLOAT32, 0.7), "top_k": (INT32, 20), "top_p": (FLOAT32, 0.8), "penalty_last_n": (INT32, 64)}
    model = small_model(**{f"general__sampling__{name}": each for name, each in told.items()})
    path = model.write(tmp_path / "tiny.gguf")
    assert edgeinfer.describe(path).sampling == {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


def test_chats_sample_as_its_makers_recommend(tmp_path: Path) -> None:
    message = {"role": "user", "content": "Tell me a story about Tom."}
    plain: dict[str, Any] = {"max_tokens": 12, "seed": 3}
    recommended: dict[str, Any] = {"temperature": 1.3, "top_k": 40}
    with edgeinfer.load(with_generation_config(tmp_path, recommended), speculation="off", remember=False) as model:
        assert model.sampling == recommended

        def reply(**options: Any) -> str:
            return model.chat().send(message["content"], **plain, **options).text

        ids = model.tokenize_chat([message])
        greedy, drawn = (model.generate(ids, **plain, **each).text for each in (dict[str, Any](), recommended))
        assert greedy != drawn
        assert reply() == drawn and reply(temperature=0) == reply(top_k=1) == greedy
        choice = model.create_chat_completion([message], max_tokens=12, seed=3)["choices"][0]
        assert choice["message"]["content"] == drawn
        # A search has its own way to choose tokens.
        assert reply(search="beam", beams=2) == model.generate(ids, **plain, search="beam", beams=2).text
        assert make_completion("response", {"input": "Hello"}, model).opening()[0]["response"]["temperature"] == 1.3


def test_what_cannot_be_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeinfer.hub.resolving.cached_snapshot", lambda repo_id: None)
    with pytest.raises(HubError, match="not on this machine"):
        edgeinfer.describe("org/name")
    for wrong in (tmp_path, "no model", tmp_path / "missing"):
        with pytest.raises(ModelError):
            edgeinfer.describe(wrong)
