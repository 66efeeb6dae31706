"""Scales for quantized caches by the public face and the command line: made at export, or by tuning for this user."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle import KVScales, open_bundle
from edgeinfer.bundle.kv_scales import read_kv_scales
from edgeinfer.config import KvType
from edgeinfer.errors import BundleError, UsageError
from edgeinfer.export import ExportConfig
from edgeinfer.runtime.profile.kv_scales import kept_kv_scales_file, kv_scales
from tests.cache import export_checkpoint, made
from tests.edgeinfer.conftest import made_up_stopwatch
from tests.factories import make_bigram_bundle, make_checkpoint
from tests.speculation import known_costs, load_eager


@pytest.fixture(scope="module", autouse=True)
def costs() -> Iterator[None]:
    """Nothing is timed."""
    with known_costs():
        yield


STORIES = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?"]


def make_random(folder: Path) -> None:
    make_checkpoint(folder / "checkpoint", "llama", seed=11)


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return made(make_random) / "checkpoint"


@pytest.fixture
def bundle(checkpoint: Path, tmp_path: Path) -> Path:
    """A bundle without scales, and nothing kept of it."""
    path = export_checkpoint(checkpoint, tmp_path / "bundle", ExportConfig(32))
    kept_kv_scales_file(open_bundle(path)).unlink(missing_ok=True)
    return path


def scales_in(path: Path) -> KVScales:
    scales = read_kv_scales(open_bundle(path))
    assert scales is not None
    return scales


def export(checkpoint: Path, out: Path, *options: str) -> int:
    return main(["export", str(checkpoint), str(out), "--bits", "32", *options])


def test_export_brings_scales(checkpoint: Path, tmp_path: Path) -> None:
    assert export(checkpoint, tmp_path / "one") == 0
    assert export(checkpoint, tmp_path / "two") == 0
    open_bundle(tmp_path / "one").verify()
    one, two = (scales_in(tmp_path / name) for name in ("one", "two"))
    # Four openings of edgeinfer's own, each continued to the end of the model's 128 tokens.
    assert one.tokens == 4 * 128
    assert one.digest("int4") == two.digest("int4")
    assert (tmp_path / "one" / "edgeinfer.json").read_text() == (tmp_path / "two" / "edgeinfer.json").read_text()


def test_export_without_scales(checkpoint: Path, tmp_path: Path) -> None:
    assert export(checkpoint, tmp_path / "out", "--no-kv-scales") == 0
    assert read_kv_scales(open_bundle(tmp_path / "out")) is None


def test_export_with_a_text_to_calibrate_by(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("\n\n \n".join(STORIES) + "\n")
    assert export(checkpoint, tmp_path / "out", "--kv-calibration", str(tmp_path / "text")) == 0
    with edgeinfer.load(tmp_path / "out") as model:
        assert scales_in(tmp_path / "out").tokens == sum(1 + len(model.tokenize(story)) for story in STORIES)


@pytest.mark.parametrize("content", [None, b" \n\n", b"\xff"])
def test_a_text_that_is_none_is_refused_before_anything_is_made(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert export(checkpoint, tmp_path / "out", "--kv-calibration", str(tmp_path / "text")) == 2
    assert str(tmp_path / "text") in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_model_that_cannot_run_here_is_exported_without(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise BundleError("It cannot be run.", "Try elsewhere.")

    monkeypatch.setattr("edgeinfer.tools.kv_calibration.choose_layout", fails)
    assert export(checkpoint, tmp_path / "out") == 0
    assert (
        "Skipped the calibration of int8 and int4 KV caches: It cannot be run. Try elsewhere."
        in capsys.readouterr().err
    )
    assert read_kv_scales(open_bundle(tmp_path / "out")) is None


def test_tuning_keeps_scales_for_this_user(bundle: Path) -> None:
    before = (bundle / "edgeinfer.json").read_bytes()
    assert edgeinfer.tools.tune_kv(bundle, STORIES)
    kept = kv_scales(open_bundle(bundle))
    assert kept is not None and (bundle / "edgeinfer.json").read_bytes() == before
    assert not edgeinfer.tools.tune_kv(bundle, STORIES)


def test_nothing_is_tuned_where_the_bundle_has_scales(bundle: Path) -> None:
    edgeinfer.tools.calibrate_kv(bundle, STORIES)
    assert not edgeinfer.tools.tune_kv(bundle)
    assert not kept_kv_scales_file(open_bundle(bundle)).exists()


def test_the_tune_command_finds_scales_too(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgeinfer.tools.devices.Stopwatch", made_up_stopwatch(lambda way: 1.0))
    line = ["tune", "-m", str(bundle), "--evaluations", "2", "--json"]
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out)["kv_scales"] is True
    assert main(line) == 0
    assert json.loads(capsys.readouterr().out)["kv_scales"] is False


def test_models_without_quantized_caches(tmp_path: Path) -> None:
    path = make_bigram_bundle(tmp_path / "bigrams")
    assert not edgeinfer.tools.tune_kv(path)
    with pytest.raises(UsageError, match="no graphs for quantized KV caches"):
        edgeinfer.tools.calibrate_kv(path)
    with pytest.raises(UsageError, match="no scales"):
        edgeinfer.tools.measure_kv(path, STORIES)


def test_no_text_at_all(bundle: Path) -> None:
    with pytest.raises(UsageError, match="no text"):
        edgeinfer.tools.calibrate_kv(bundle, [])
    edgeinfer.tools.calibrate_kv(bundle, STORIES)
    with pytest.raises(UsageError, match="no text"):
        edgeinfer.tools.measure_kv(bundle, [])


def test_errors_of_attention(bundle: Path) -> None:
    edgeinfer.tools.calibrate_kv(bundle, STORIES)
    errors = {error.kv: error for error in edgeinfer.tools.measure_kv(bundle, STORIES)}
    assert errors.keys() == {"int8", "int4"}
    assert 0 < errors["int8"].mean < errors["int4"].mean < 0.5


@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_drafting_does_not_change_the_text(bundle: Path, kv: KvType) -> None:
    edgeinfer.tools.calibrate_kv(bundle, STORIES)
    prompt = np.random.default_rng(0).integers(2, 320, 12).tolist() * 3
    texts = []
    ways: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 3}, {"draft_width": 3})
    # A governor that goes by the clock may find that no draft pays.
    for load, speculation in ((edgeinfer.load, "off"), (load_eager, "copy,recycle")):
        with load(bundle, kv=kv, speculation=speculation) as model:
            assert model.plan.configuration.kv == kv
            for options in ways:
                texts.append(model.generate(prompt, max_tokens=40, ignore_eos=True, **options).token_ids)
            drafted = model.generate(prompt, max_tokens=40, ignore_eos=True).speculation.drafted
            assert (drafted > 0) == (speculation != "off")
    assert texts[:3] == texts[3:]
