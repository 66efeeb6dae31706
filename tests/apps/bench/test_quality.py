"""The quality script: which stories it reads, and that float32 is compared with itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgeinfer.apps.bench.quality import BASELINE, WIDTHS, compare_widths, main, read_stories
from edgeinfer.errors import UsageError
from tests.factories import make_checkpoint


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
    results = compare_widths(tmp_path / "model", ["Once upon a time there was a little dog.", "She said: no."])
    assert [r.width for r in results] == list(WIDTHS)
    by_width = {r.width: r for r in results}
    assert (by_width[BASELINE].change, by_width[BASELINE].agreement) == (0.0, 1.0)
    bits = [by_width[w].bits_per_weight for w in (BASELINE, "8 bits", "4 bits", "4 bits, small layers too")]
    assert bits == sorted(bits, reverse=True)
    # Rounding to eight bits changes the perplexity of any model by little, and by something.
    assert 0 < abs(by_width["8 bits"].change) < 0.05


def test_a_checkpoint_that_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("one", "utf-8")
    assert main([str(tmp_path), "--text", str(tmp_path / "text")]) == 2
    assert "config.json" in capsys.readouterr().err
