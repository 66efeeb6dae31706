"""The table of sizes and divergences: its front, its rows, and how a checkpoint gets there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgeinfer
from edgeinfer.apps.bench import quant_table
from edgeinfer.apps.bench.quant_report import Failure, Figure, best_within, markdown, pareto_front, to_dict
from edgeinfer.apps.bench.quant_subjects import (
    BundleSubject,
    GgufSubject,
    SimulatedSubject,
    Subject,
    budgeted,
    gguf_subjects,
    uniform,
)
from edgeinfer.apps.bench.quant_table import Texts, main, measure
from edgeinfer.errors import UsageError
from edgeinfer.export import ExportConfig
from tests.apps.bench.here import exports_here
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint

STORIES = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?", "The dog is here."]


def figure(size: int, divergence: float, subject: Subject | None = None) -> Figure:
    subject = subject or BundleSubject("rtn", 4)
    return Figure("m", subject, size, 8 * size / 1000, divergence, 0.001, 0.2, 0.9, 5.0, 1.0)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are from the cache."""
    exports_here(monkeypatch, "quant_table")


sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12)


@given(sizes)
def test_nothing_beats_the_front_in_both(pairs: list[tuple[int, int]]) -> None:
    figures = [figure(size, float(divergence)) for size, divergence in pairs]
    front = pareto_front(figures)
    found = {(f.weight_bytes, f.divergence) for f in front}
    assert len(found) == len(front)
    for f in figures:
        better = [
            g
            for g in figures
            if g.weight_bytes <= f.weight_bytes
            and g.divergence <= f.divergence
            and (g.weight_bytes, g.divergence) != (f.weight_bytes, f.divergence)
        ]
        assert ((f.weight_bytes, f.divergence) in found) == (not better)


def test_the_best_of_no_more_bytes() -> None:
    figures = [figure(10, 3.0), figure(20, 2.0), figure(30, 2.5)]
    assert best_within(figures, 9) is None
    assert best_within(figures, 20) is figures[1] and best_within(figures, 99) is figures[1]


def test_tables_set_ours_beside_llama_cpp() -> None:
    theirs = [figure(2000, 0.4, GgufSubject("Q4_0", False)), figure(90, 0.9, GgufSubject("Q2_K", True))]
    ours = [figure(1900, 0.1), figure(1000, 0.3)]
    text = markdown("m", [*theirs, *ours], [Failure("m", GgufSubject("IQ1_S", True), "too odd")], 77)
    assert "| Q4_0 | 2.0 | 0.400000 | rtn 4 bits | 1.9 | 0.100000 | 0.25 |" in text
    assert "| Q2_K, imatrix | 0.1 | 0.900000 |  |  |  |  |" in text
    marked = [line for line in text.splitlines() if line.endswith("| ● |")]
    assert len(marked) == 3 and not any("Q4_0" in line for line in marked)
    assert "IQ1_S, imatrix: too odd" in text and "77 tokens" in text
    data = json.loads(json.dumps(to_dict([*theirs, *ours], [])))
    assert [f["front"] for f in data["figures"]] == [False, True, True, True]
    assert data["figures"][0]["label"] == "Q4_0" and data["figures"][2]["subject"]["method"] == "rtn"


def test_subjects_say_what_the_export_is_to_do() -> None:
    subjects = list(uniform(["rtn", "gptq"], [2, 4], [32], [False, True], [None]))
    assert len(subjects) == 8 and len({s.label for s in subjects}) == 8
    text = ["--calibration", "file"]
    first = subjects[0].options(text)
    assert first[: first.index("--bits")][-1] == "--asymmetric" and "--no-keep-small" in first and text[0] not in first
    assert subjects[-1].options(text)[-2:] == text and "--symmetric" in subjects[-1].options(text)
    (budget,) = budgeted(["rtn"], [3.5])
    options = budget.options(text)
    assert options[-2:] == text and options[options.index("--budget-bits") + 1] == "3.5" and "--bits" not in options
    kinds = list(gguf_subjects(["Q4_0", "IQ2_XS"]))
    assert [s.label for s in kinds] == ["Q4_0", "Q4_0, imatrix", "IQ2_XS, imatrix"]


def test_forms_are_written_in_short() -> None:
    book, grid = map(SimulatedSubject.parse, ("codebook:3:16", "uniform:3:32:rtn"))
    assert (book.label, grid.label) == ("codebook 3 bits, rows 16", "rtn 3 bits, block 32")
    text = ["--calibration", "file"]
    assert book.options(text) == ["--form", "codebook", "--bits", "3", "--group", "16", *text]
    assert grid.options(text)[-2:] == ["--method", "rtn"]
    for wrong in ("codebook", "codebook:3:16:rtn", "uniform:3:32", "odd:3:32", "uniform:x:32:rtn"):
        with pytest.raises(UsageError, match="is no form"):
            SimulatedSubject.parse(wrong)


def test_calibration_and_reading_are_disjoint(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("<|endoftext|>".join(STORIES), "utf-8")
    texts = Texts.of(tmp_path / "text", 1, 2, 100)
    assert (texts.read, texts.calibration) == ((STORIES[2],), (STORIES[0], STORIES[1]))
    with pytest.raises(UsageError, match="3 stories, not 2 to read and 2"):
        Texts.of(tmp_path / "text", 2, 2, 100)


def test_a_bundle_is_measured_beside_float32(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    texts = Texts((STORIES[0], STORIES[1]), (STORIES[2],), 100)
    subjects = [BundleSubject("rtn", 8, group_size=32), BundleSubject("rtn", 4, group_size=32), BundleSubject("no", 4)]
    told: list[Figure | Failure] = []
    figures, failures, tokens = measure(tmp_path / "model", texts, subjects, told.append)
    assert told == [*figures, *failures]
    eight, four = figures
    assert eight.weight_bytes > four.weight_bytes and 0 < eight.divergence < four.divergence
    assert [f.subject for f in failures] == subjects[2:] and "no" in failures[0].reason
    config = ExportConfig(bits=4, group_size=32, keep_small=False)
    export_checkpoint(tmp_path / "model", tmp_path / "four", config)
    export_checkpoint(tmp_path / "model", tmp_path / "float", ExportConfig(bits=32))
    wanted = edgeinfer.evaluate(tmp_path / "four", texts.read, reference=tmp_path / "float")
    assert wanted.divergence is not None
    assert four.divergence == pytest.approx(wanted.divergence.mean, rel=1e-3)
    assert four.weight_bytes == wanted.weight_bytes and tokens == len(wanted.divergence.values)


def test_forms_without_a_backend_are_measured(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    texts = Texts((STORIES[0],), (STORIES[1],), 100)
    subjects = [SimulatedSubject("uniform", bits, 32, "rtn") for bits in (3, 8)] + [SimulatedSubject("odd", 3, 16)]
    (three, eight), failures, _ = measure(tmp_path / "model", texts, subjects, lambda found: None)
    assert three.weight_bytes < eight.weight_bytes and three.divergence > eight.divergence
    assert [f.subject for f in failures] == subjects[2:]


@pytest.mark.gguf
def test_llama_cpp_is_measured_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    make_checkpoint(tmp_path / "model", "llama", intermediate_size=128)
    texts = Texts((STORIES[0],), (STORIES[1], STORIES[2]), 12)
    subjects = list(gguf_subjects(["Q8_0", "Q4_0"]))
    figures, failures, _ = measure(tmp_path / "model", texts, subjects, lambda found: None)
    assert failures == [] and [f.subject for f in figures] == subjects
    eight, _, four, weighed = figures
    assert 0 < eight.divergence < four.divergence and four.divergence != weighed.divergence
    assert four.weight_bytes == weighed.weight_bytes < eight.weight_bytes
    assert np.isclose(eight.bits_per_weight, 8.5, atol=1.0)


def test_the_script_prints_a_table_for_each_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("<|endoftext|>".join(STORIES), "utf-8")
    found = figure(100, 0.5)

    def measured(
        checkpoint: Path, texts: Texts, subjects: list[Subject], told: Callable[[Figure | Failure], None]
    ) -> tuple[list[Figure], list[Failure], int]:
        told(found)
        # What was measured is kept, whatever happens to the next.
        assert json.loads((tmp_path / "out.json").read_text())["figures"][-1]["divergence"] == 0.5
        return [found], [], 9

    monkeypatch.setattr(quant_table, "measure", measured)
    arguments = [str(tmp_path / "a"), str(tmp_path / "b"), "--text", str(tmp_path / "text"), "--stories", "1"]
    assert main([*arguments, "--calibration", "1", "--json", str(tmp_path / "out.json")]) == 0
    out = capsys.readouterr().out
    assert "## a" in out and "## b" in out and "rtn 4 bits" in out
    assert len(json.loads((tmp_path / "out.json").read_text())["figures"]) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--types", "Q9"], "Q4_K_M"),
        (["--signs", "odd"], "symmetric"),
        (["--bits", "four"], "numbers"),
        (["--simulate", "x"], "form"),
    ],
)
def test_wrong_lists_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str], said: str
) -> None:
    assert main([str(tmp_path), "--text", str(tmp_path / "text"), *wrong]) == 2
    assert said in capsys.readouterr().err
