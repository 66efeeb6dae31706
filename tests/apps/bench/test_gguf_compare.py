"""Benchmarks of GGUF files beside llama-cpp-python: they run, and say what was compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from edgeinfer.apps.bench import gguf_compare, gguf_identity
from tests.gguf_models import builtin_gguf
from tests.speculation import needs_builtin

pytestmark = pytest.mark.gguf


@needs_builtin
def test_all_ways_to_decode_give_the_same_text_and_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--per-category", "1", "--repeats", "1", "-n", "24", "-c", "512", "--out", str(out)]
    assert gguf_compare.main([str(builtin_gguf()), *arguments]) == 0
    figures = json.loads(out.read_text("utf-8"))
    ways = {"Llama", "Llama + prompt lookup", "edgeinfer, plain", "edgeinfer, auto"}
    assert set(figures["per_token_ms"]) == ways
    assert all(ms > 0 for of in figures["per_token_ms"].values() for ms in of)
    assert figures["agreeing"]["edgeinfer, plain"] == len(figures["categories"]) > 0
    assert figures["facts"]["edgeinfer, auto"]["planned_bytes"] > figures["peak_rss"]["edgeinfer, auto"] > 20e6
    assert "edgeinfer, auto" in capsys.readouterr().out


@needs_builtin
def test_identity_counts_replies_and_ties(capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_identity.main([str(builtin_gguf()), "--per-category", "1", "-n", "16", "--kv", "float16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("float16" in line for line in lines) == 3


def test_a_file_that_cannot_be_compared_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gguf_identity.main([str(tmp_path / "none.gguf")]) == 1
    assert "none.gguf" in capsys.readouterr().err
