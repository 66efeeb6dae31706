"""Forms without a backend: what a float bundle becomes, and what it would take."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from edgeinfer.apps.bench.research.simulation import CODEBOOK_BITS, FORMS, Form, main, quantize_codebook, simulate
from edgeinfer.bundle import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.export import ExportConfig
from edgeinfer.quant import InputStatistics
from tests.cache import export_checkpoint
from tests.factories import make_checkpoint
from tests.recorded import check_recorded, sums
from tests.tables import each_row

TEXT = "Once upon a time there was a little dog. She said: the cat is not here, is it? " * 20
GATE_UP, DOWN = "layers.1.mlp.gate_up", "layers.1.mlp.down"


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 bundle of a tied model, beside its checkpoint and a text."""
    folder = tmp_path_factory.mktemp("simulation")
    make_checkpoint(folder / "checkpoint", "llama-tied", intermediate_size=128)
    (folder / "text").write_text(TEXT, "utf-8")
    return export_checkpoint(folder / "checkpoint", folder / "floats", ExportConfig(bits=32))


@each_row("bits", [4, 8])
def test_forms_that_bundles_have_become_what_bundles_hold(floats: Path, tmp_path: Path, bits: int) -> None:
    config = ExportConfig(bits=bits, group_size=32, head_bits=8, keep_small=False)
    real = open_bundle(export_checkpoint(floats.parent / "checkpoint", tmp_path / "real", config))
    size = simulate(floats, tmp_path / "out", Form("uniform", bits))
    made = open_bundle(tmp_path / "out")
    for entry in real.manifest.tensors:
        np.testing.assert_allclose(made.tensor(entry.name), real.tensor(entry.name), atol=1e-6, err_msg=entry.name)
    # Blobs of a bundle are padded to places that suit a processor.
    assert size == pytest.approx(real.manifest.weight_bytes, rel=0.01)
    assert (made.manifest.weight_bytes, made.manifest.parameters) == (
        open_bundle(floats).manifest.weight_bytes,
        real.manifest.parameters,
    )
    made.verify()


def test_three_bits_lie_between_two_and_four(floats: Path, tmp_path: Path) -> None:
    errors, sizes = [], []
    whole = open_bundle(floats).tensor(GATE_UP)
    for bits in (2, 3, 4):
        sizes.append(simulate(floats, tmp_path / "out", Form("uniform", bits)))
        errors.append(float(np.square(open_bundle(tmp_path / "out").tensor(GATE_UP) - whole).mean()))
    assert errors == sorted(errors, reverse=True) and sizes == sorted(sizes)


def test_codebooks_are_those_of_the_quantizer(floats: Path, tmp_path: Path) -> None:
    simulate(floats, tmp_path / "out", Form("codebook", 3, 16))
    source, made = open_bundle(floats), open_bundle(tmp_path / "out")
    wanted = quantize_codebook(source.tensor(DOWN), 3, 16)
    np.testing.assert_array_equal(made.tensor(DOWN), wanted.dequantize())
    np.testing.assert_array_equal(made.tensor("final_norm"), source.tensor("final_norm"))


def test_forms_take_and_lose_what_they_did(floats: Path) -> None:
    """Bytes and what is left of values, for every kind of form; rows that are all zero or end a group among them."""
    drawn = np.random.default_rng(7).standard_normal((37, 80)) * np.geomspace(1e-3, 3, 37)[:, None]
    drawn[5] = 0
    weight = drawn.astype(np.float32)
    found: dict[str, list[object]] = {}
    for kind, bits, group, symmetric in product(FORMS, (2, 3, 4), (8, 32, 48), (True, False)):
        form = Form(kind, bits, group, symmetric=symmetric, head_bits={2: 3, 3: 4, 4: 8}[bits])
        for name in ("layers.0.mlp.down", "embed"):
            values, size = form.apply(name, weight, None)
            lost = np.square(values - weight).mean(1) / (np.square(weight).mean(1) + 1e-12)
            found[f"{kind} {bits} {group} {symmetric} {name}"] = [size, lost.mean(), np.abs(values[5]).max()]
    squares = np.linspace(0.1, 3, 80, dtype=np.float32)
    seen = InputStatistics(9, squares, np.zeros(80, np.float32))
    found["seen"] = [sums(quantize_codebook(weight, bits, 16, seen).dequantize()) for bits in CODEBOOK_BITS]
    check_recorded("bench-forms", found, rel=2e-2)


def test_a_text_changes_what_is_kept(floats: Path, tmp_path: Path) -> None:
    made = []
    for text in (None, floats.parent / "text"):
        simulate(floats, tmp_path / "out", Form("uniform", 3, method="rtn" if text is None else "gptq"), text, 256)
        made.append(open_bundle(tmp_path / "out").tensor(DOWN))
    assert not np.array_equal(made[0], made[1])


def test_the_command_says_what_weights_would_take(
    floats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(floats), str(tmp_path / "out"), "--bits", "3", "--form", "codebook", "--group", "8"]
    assert main([*arguments, "--calibration", str(floats.parent / "text"), "--calibration-tokens", "128"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert 0 < said["weight_bytes"] < open_bundle(floats).manifest.weight_bytes / 3
    assert main([*arguments, "--bits", "5"]) == 2
    assert "2 to 4" in capsys.readouterr().err


def test_only_float_bundles_are_made_into_others(floats: Path, tmp_path: Path) -> None:
    small = export_checkpoint(floats.parent / "checkpoint", tmp_path / "small", ExportConfig(bits=8, keep_small=False))
    with pytest.raises(UsageError, match="--bits 32"):
        simulate(small, tmp_path / "out", Form("uniform", 3))
    assert not (tmp_path / "out").exists()
    for wrong in ({"kind": "odd"}, {"bits": 5}, {"head_bits": 6}, {"method": "magic"}, {"group": 0}, {"head_bits": 1}):
        with pytest.raises(UsageError, match="no form"):
            Form(**({"kind": "uniform", "bits": 3} | wrong))  # type: ignore[arg-type]
