"""What the benchmarks of mixtures compute from their measurements, and that they run on a small one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.apps.bench import moe_drafting
from edgeinfer.apps.bench.moe_drafting import best_speedup
from edgeinfer.apps.bench.moe_random import main as make_random
from edgeinfer.errors import UsageError
from edgeinfer.export import ExportConfig
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint


@pytest.mark.parametrize(
    ("accepted", "cost", "passes", "expected"),
    [
        (0.0, 0.1, {1: 1.0, 2: 1.1}, (0, 1.0)),
        (1.0, 0.5, {1: 2.0, 2: 2.0}, (1, 2 / 1.5)),
        (0.9, 0.2, {1: 1.0, 2: 1.0, 3: 1.0}, (2, (1 + 0.9 + 0.81) / 1.4)),
        (0.9, 1.0, {1: 1.0, 2: 1.2}, (0, 1.0)),
    ],
)
def test_best_speedup(accepted: float, cost: float, passes: dict[int, float], expected: tuple[int, float]) -> None:
    length, speedup = best_speedup(accepted, cost, passes)
    assert length == expected[0]
    assert speedup == pytest.approx(expected[1])


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    make_checkpoint(folder / "checkpoint", "qwen3-moe", max_position_embeddings=512)
    return export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=8, keep_small=False))


def test_drafting_is_measured(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("Once upon a time there was a little dog. She said: the cat is not here, is it? " * 20, "utf-8")
    options = ["--tokens", "12", "--replies", "1", "--length", "8", "--json", str(out)]
    moe_drafting.main([str(mixture), "--text", str(text), *options])
    found = json.loads(out.read_text("utf-8"))
    assert [c["count"] for c in found["counts"]] == [1, 2]
    assert all(0 <= c["same_best"] <= 1 and 0 <= c["overlap"] <= 1 and c["cost"] > 0 for c in found["counts"])
    assert all(r["same_tokens"] for r in found["replies"])
    assert "same best token" in capsys.readouterr().out


def test_dense_models_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoint", "Llama", max_position_embeddings=512)
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=8))
    (tmp_path / "text").write_text("Once upon a time there was a little dog. " * 20, "utf-8")
    with pytest.raises(UsageError, match="no experts"):
        moe_drafting.main([str(bundle), "--text", str(tmp_path / "text"), "--tokens", "20"])


def test_random_mixtures_are_made(tmp_path: Path) -> None:
    sizes = ["--hidden", "256", "--expert-size", "32", "--layers", "2", "--experts", "4", "--top-k", "2"]
    make_random([str(tmp_path / "checkpoint"), *sizes])
    bundle = export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", ExportConfig(bits=4, keep_small=False))
    assert (bundle / "edgeinfer.json").is_file()


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="multiple of 256"):
        make_random([str(tmp_path / "checkpoint"), "--hidden", "64"])
