"""The quality script: which stories it reads, how variants of a checkpoint are compared, what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

import edgeinfer
from edgeinfer.apps.bench.quality import (
    Quality,
    Variant,
    compare_variants,
    layout_differences,
    main,
    read_stories,
)
from edgeinfer.cli.main import main as export
from edgeinfer.errors import NativeUnavailableError, UsageError
from tests.factories import make_checkpoint

STORIES = ["Once upon a time there was a little dog.", "She said: no."]


def test_the_last_stories_are_read(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one<|endoftext|>two <|endoftext|>\n three<|endoftext|>\n", "utf-8")
    assert read_stories(path, 2) == ["two", "three"]
    assert read_stories(path, 2, skip=1) == ["one", "two"]
    assert read_stories(path, 9) == ["one", "two", "three"]
    path.write_text(" ", "utf-8")
    with pytest.raises(UsageError, match="no stories"):
        read_stories(path, 2)


def test_widths_are_compared_with_float32(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    variants = [Variant(width, layout="portable") for width in ("8", "4", "4small")]
    results = compare_variants(tmp_path / "model", STORIES, variants)
    assert [r.variant.scheme for r in results] == ["32 bits", "8 bits", "4 bits", "4 bits, small layers too"]
    baseline, eight, _, small = results
    assert (baseline.change, baseline.agreement, baseline.divergence) == (0.0, 1.0, (0.0, 0.0))
    bits = [r.bits_per_weight for r in results]
    assert bits == sorted(bits, reverse=True)
    # Rounding to eight bits changes the perplexity of any model by little, and by something.
    assert 0 < abs(eight.change) < 0.05
    assert 0 < eight.divergence[0] < small.divergence[0]
    assert (small.divergences > 0).all()


def test_divergence_is_that_of_the_distributions(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    variant = Variant("4small", group_size=32, layout="portable")
    result = compare_variants(tmp_path / "model", STORIES[:1], [variant])[1]
    logits = []
    for number, options in enumerate((["--bits", "32"], variant.options)):
        bundle = tmp_path / str(number)
        assert export(["export", str(tmp_path / "model"), str(bundle), *options]) == 0
        with edgeinfer.load(bundle, native=False) as model:
            ids = model.tokenize(STORIES[0])
            ids = ids if ids[:1] == model.begin_ids else model.begin_ids + ids
            logits.append(np.concatenate([rows.astype(np.float64) for rows in model.logits(ids)]))
            perplexity = model.score(ids).perplexity
    reference, candidate = (log_softmax(each, axis=1) for each in logits)
    wanted = (np.exp(reference) * (reference - candidate)).sum(axis=1)
    np.testing.assert_allclose(result.divergences, wanted, atol=1e-12)
    assert result.divergence[0] == pytest.approx(wanted.mean())
    assert result.perplexity == pytest.approx(perplexity)


@pytest.mark.parametrize("tokens", [2, 16, 17, 18])
def test_stories_of_any_length_are_read(tmp_path: Path, tokens: int) -> None:
    """Logits come in arrays of 16 rows; the last token of a story, which has no target, may be alone in one."""
    make_checkpoint(tmp_path / "model", "llama")
    # Each letter is a token of the byte-level vocabulary, after the begin token.
    story = ("xyz" * 6)[: tokens - 1]
    (result,) = compare_variants(tmp_path / "model", [story], [])
    assert len(result.divergences) == tokens


def test_layouts_of_the_same_weights_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        edgeinfer.measure_device()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "text").write_text("<|endoftext|>".join(STORIES))
    arguments = [str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--widths", "4small"]
    arguments += ["--group-sizes", "32,64", "--layouts", "native,portable"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    schemes = [(r["scheme"], r["layout"]) for r in data["results"]]
    small = "4 bits, small layers too, groups of {}"
    both = [(small.format(group), layout) for group in (32, 64) for layout in ("native", "portable")]
    assert schemes == [("32 bits", None), *both]
    assert [d["scheme"] for d in data["layouts"]] == [small.format(32), small.format(64)]
    for number, difference in enumerate(data["layouts"]):
        native, portable = data["results"][1 + 2 * number : 3 + 2 * number]
        assert difference["mean"] == pytest.approx(native["divergence"] - portable["divergence"])
        # The same weights and the same class of arithmetic.
        assert abs(difference["mean"]) < 0.1 * portable["divergence"]


def test_results_of_different_weights_are_no_pair() -> None:
    def quality(width: str, layout: str) -> Quality:
        return Quality("m", Variant(width, 32, layout), 4.0, np.array([0.1, 0.3]), 2.0, 0.0, 1.0)

    results = [quality("4", "native"), quality("8", "portable"), quality("4", "portable")]
    (pair,) = layout_differences(results)
    assert (pair.scheme, pair.layouts, pair.mean, pair.error) == (
        "4 bits, groups of 32", ("native", "portable"), 0.0, 0.0,
    )  # fmt: skip


def test_the_table_has_a_row_for_each_variant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "text").write_text(STORIES[0])
    arguments = [str(tmp_path / "model"), "--text", str(tmp_path / "text")]
    assert main([*arguments, "--widths", "8", "--layouts", "portable"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| model | 32 bits |") and lines[3].startswith("| model | 8 bits | portable |")
    assert "tokens" in lines[-1]


@pytest.mark.parametrize("wrong", [["--widths", "5"], ["--layouts", "tiled"]])
def test_unknown_variants_are_refused(tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("one")
    assert main([str(tmp_path), "--text", str(tmp_path / "text"), *wrong]) == 2
    assert wrong[1] in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("one", "utf-8")
    assert main([str(tmp_path), "--text", str(tmp_path / "text")]) == 2
    assert "config.json" in capsys.readouterr().err
