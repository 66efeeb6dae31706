"""Bundles that are compared with the float model after converting, and converted again where they are too far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.manifest import Capabilities, Manifest, QualityRecord
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.results import Progress
from edgeinfer.export.exporter import Check, export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.export.source.calibration_text import read_builtin_text
from edgeinfer.export.weights.float_model import FloatModel
from edgeinfer.tools.checking import described, measure_quality
from edgeinfer.tools.evaluation import evaluate
from tests.factories import make_checkpoint
from tests.tables import each_row

FAR, NEAR = QualityRecord(100, 0.5, 0.6), QualityRecord(100, 0.02, 0.97)
FEW: dict[str, Any] = {"calibration_tokens": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_checkpoint(folder, "llama")
    return folder


class Checked:
    """A check that finds given qualities, one after the other, and hears notes."""

    def __init__(self, *found: QualityRecord) -> None:
        self._found: Iterator[QualityRecord] = iter(found)
        self.sizes: list[int] = []
        self.notes: list[str] = []
        self.check = Check(self.measure, self.notes.append)

    def measure(self, path: Path, model: FloatModel, progress: Progress | None) -> QualityRecord:
        self.sizes.append(open_bundle(path).manifest.weight_bytes)
        return next(self._found)


@pytest.mark.parametrize("bits", [4, 8])
def test_what_is_measured_is_the_divergence_from_the_float_model(checkpoint: Path, tmp_path: Path, bits: int) -> None:
    seen: list[tuple[str, int, int]] = []
    config = ExportConfig(bits=bits, keep_small=False, calibration="none")
    check = Check(measure_quality, print)
    path = export_checkpoint(checkpoint, tmp_path / "small", config, lambda *step: seen.append(step), check)
    floats = export_checkpoint(checkpoint, tmp_path / "floats", ExportConfig(bits=32), check=check)
    quality = open_bundle(path).manifest.quality
    assert quality is not None and open_bundle(floats).manifest.quality is None
    tokenizer = (path / "tokenizer.json").read_bytes()
    texts = [ids.tolist() for ids in read_builtin_text("held_out", tokenizer, quality.tokens, 128).texts]
    found = evaluate(path, texts, reference=floats, kv="float32").divergence
    assert found is not None and quality.tokens == 1024
    assert quality.divergence == pytest.approx(found.mean, rel=0.02)
    assert quality.top1 == pytest.approx(found.agreement, abs=0.01)
    added = {cache.kv_type: cache.divergence for cache in quality.caches}
    assert 0 <= added["int8"] < added["int4"]
    assert [stage for stage, *_ in seen if stage == "checking"] and seen[-1][1:] == (10_000, 10_000)
    (size, distance) = described(open_bundle(path).manifest)
    assert f"{quality.divergence:.2g} nats" in distance and "bits a weight" in size


def test_a_model_that_is_too_far_gets_more_bits_once(checkpoint: Path, tmp_path: Path) -> None:
    for last in (NEAR, FAR):
        checked = Checked(FAR, last)
        config = ExportConfig(**FEW, max_divergence=0.05, force=True)
        path = export_checkpoint(checkpoint, tmp_path / "bundle", config, check=checked.check)
        assert checked.sizes[0] < checked.sizes[1] == open_bundle(path).manifest.weight_bytes
        (note,) = checked.notes
        assert "0.5 nats a token, more than the 0.05 that are allowed: converting it again with more bits" in note
        assert open_bundle(path).manifest.quality == last
    assert [each.name for each in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    "options", [{"bits": 3}, {"bits": 4, "calibration": "none"}, {"target_size": 300_000}, {"calibration": "none"}]
)
def test_bits_that_somebody_asked_for_stay_and_8_are_the_most(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    checked = Checked(FAR)
    config = ExportConfig(**FEW | options)
    path = export_checkpoint(checkpoint, tmp_path / "bundle", config, check=checked.check)
    assert checked.notes == [] and open_bundle(path).manifest.quality == FAR


def test_fewer_bits_than_any_format_has_are_the_fewest(checkpoint: Path, tmp_path: Path) -> None:
    two, three = (
        open_bundle(export_checkpoint(checkpoint, tmp_path / str(bits), ExportConfig(**FEW, bits=bits))).manifest
        for bits in (2, 3)
    )
    assert 2 < two.bits_per_weight < three.bits_per_weight <= 3


@each_row(
    ("divergence", "repeating", "says"),
    [
        (0.05, 1 / 3, None),
        (0.05, 2 / 3, "2 of 3 greedy replies of 80 tokens repeat themselves."),
        (0.2, None, "wrong answers now and then"),
        (0.6, 0.0, "repeat themselves. 5 bits a weight would take 625.0 KB"),
    ],
)
def test_a_model_that_is_far_from_itself_is_warned_of(
    divergence: float, repeating: float | None, says: str | None
) -> None:
    size = Geometry(vocab_size=512, hidden_size=8, num_layers=2, num_kv_heads=1, head_dim=8, max_positions=256)
    quality = QualityRecord(100, divergence, 0.6, repeating=repeating)
    capabilities = Capabilities(layer_skip=True, hidden=True, tree=False)
    lines = described(Manifest("toy", "Toy", "onnx", size, 1_000_000, capabilities, quality=quality))
    assert len(lines) == (2 if says is None else 3) and (says or "") in lines[-1]


def test_a_model_that_is_near_enough_is_converted_once(checkpoint: Path, tmp_path: Path) -> None:
    checked = Checked(NEAR)
    path = export_checkpoint(checkpoint, tmp_path / "bundle", ExportConfig(**FEW), check=checked.check)
    assert open_bundle(path).manifest.quality == NEAR and len(checked.sizes) == 1
