"""`bench memory kv`: what it compares, and what it prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.bench import memory_kv
from edgeinfer.apps.bench.memory_kv import compare_caches
from edgeinfer.apps.bench.texts import BUILTIN_STORIES
from edgeinfer.apps.cli.main import main
from tests.apps.bench.here import exported
from tests.factories import make_bigram_bundle, make_checkpoint
from tests.speculation import needs_builtin
from tests.tables import each_row

STORIES = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kv-quality")
    make_checkpoint(folder / "model", "llama")
    return exported(folder / "model", folder / "bundle", "--bits", "4")


def test_caches_are_compared_with_float32(bundle: Path) -> None:
    results = compare_caches(str(bundle), STORIES)
    assert [r.kv for r in results] == ["float32", "float16", "int8", "int4"]
    plain, half, eight, four = results
    assert (plain.change, plain.agreement, plain.attention_error) == (0, 1, 0)
    with edgeinfer.load(bundle, speculation="off") as model:
        texts = [model.begin_ids + model.tokenize(story) for story in STORIES]
        scores = [model.score(ids) for ids in texts]
    assert plain.tokens == sum(len(ids) - 1 for ids in texts)
    nll = sum(np.log(s.perplexity) * (len(ids) - 1) for s, ids in zip(scores, texts, strict=True))
    assert plain.perplexity == pytest.approx(float(np.exp(nll / plain.tokens)))
    assert abs(half.change) < abs(four.change) and 0 < abs(eight.change) < abs(four.change)
    assert eight.agreement > four.agreement
    assert 0 < half.attention_error < eight.attention_error <= eight.worst_layer < four.attention_error < 0.1
    assert {r.copied_tokens for r in results} == {sum(len(ids) - 1 - 8 for ids in texts)}


def test_the_table_and_the_json(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read once, for both.
    results = compare_caches(str(bundle), STORIES[-1:])

    def known(model: str, stories: Sequence[str]) -> Sequence[memory_kv.KVQuality]:
        assert (model, list(stories)) == (str(bundle), STORIES[-1:])
        return results

    monkeypatch.setattr(memory_kv, "compare_caches", known)
    text = tmp_path / "text"
    text.write_text("<|endoftext|>".join(STORIES))
    out = tmp_path / "kv.json"
    line = ["bench", "memory", "kv", "-m", str(bundle), "--text", str(text), "--stories", "1"]
    assert main([*line, "--json", str(out)]) == 0
    data = json.loads(out.read_text())["caches"]
    assert [entry["kv"] for entry in data] == ["float32", "float16", "int8", "int4"] and data[0]["model"] == "bundle"
    shown = capsys.readouterr().out
    assert "int8" in shown and f"{data[2]['perplexity']:.4f}" in shown and f"{data[2]['change']:+.3%}" in shown
    assert str(data[0]["tokens"]) in shown


@each_row(
    ("options", "message"),
    [(["--stories", "0"], "at least one story"), (["--stories", "-1"], "at least one story")],
)
def test_bad_arguments(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    (tmp_path / "text").write_text(STORIES[0])
    assert main(["bench", "memory", "kv", "-m", str(bundle), "--text", str(tmp_path / "text"), *options]) == 2
    assert message in capsys.readouterr().err


@needs_builtin
@pytest.mark.slow
def test_a_needle_is_told_again_from_any_cache() -> None:
    """The built-in model goes on with a story that it read before, whatever the cache; behind few others better."""
    stories = [story.text for story in BUILTIN_STORIES]
    found = {each.kv: each for each in compare_caches(None, stories)}
    assert found["float32"].needle_context > 0 and found["float32"].needle > 0.25
    assert found["int8"].needle == pytest.approx(found["float32"].needle, abs=0.05)
    assert found["int4"].needle > found["float32"].needle - 0.15


def test_a_model_with_float32_caches_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_bigram_bundle(tmp_path / "bigrams")
    (tmp_path / "text").write_text(STORIES[0])
    assert main(["bench", "memory", "kv", "-m", str(path), "--text", str(tmp_path / "text")]) == 2
    assert "has no smaller KV cache than float32." in capsys.readouterr().err
