"""`edgeinfer embed` prints vectors, or documents in their order, as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import edgeinfer
from tests.cli import edgeinfer as run
from tests.encoders import embedder, reranker

TEXTS = ["a cat sat", "the dog ran fast", "red"]


def test_texts_and_lines_become_vectors(tmp_path: Path) -> None:
    model, file = embedder(tmp_path / "model"), tmp_path / "texts.jsonl"
    file.write_text(f'{TEXTS[0]}\n\n{json.dumps(TEXTS[1])}\n{{"text": "{TEXTS[2]}"}}\n')
    with edgeinfer.load(model) as loaded:
        expected = loaded.embed(TEXTS).vectors
    for words in (TEXTS, ["-f", str(file)]):
        lines = [json.loads(line) for line in run("embed", "-m", str(model), *words).stdout.splitlines()]
        assert [line["index"] for line in lines] == [0, 1, 2]
        np.testing.assert_allclose([line["embedding"] for line in lines], expected, atol=1e-6)
    failed = run("embed", "-m", str(model), "a " * 50)
    assert failed.returncode == 2 and b"truncate" in failed.stderr
    assert run("run", "-m", str(model), "a").returncode == 2


def test_documents_are_printed_by_their_scores(tmp_path: Path) -> None:
    model = reranker(tmp_path / "model")
    with edgeinfer.load(model) as loaded:
        expected = loaded.rerank("a cat", TEXTS, top_n=2).documents
    done = run("embed", "-m", str(model), "--query", "a cat", "--top", "2", *TEXTS)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(line["index"], line["text"]) for line in lines] == [(each.index, TEXTS[each.index]) for each in expected]
