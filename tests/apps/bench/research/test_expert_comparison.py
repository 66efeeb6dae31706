"""Ways to quantize experts, measured side by side on a small random mixture."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgeinfer.errors import BudgetError, UsageError
from edgeinfer.quant.blocks import Grid
from tests.factories import make_checkpoint
from tests.tools.research import expert_forms
from tests.tools.research.expert_comparison import (
    ComparisonRow,
    ComparisonSettings,
    ExpertComparison,
    compare,
    main,
)
from tests.tools.research.expert_forms import ExpertModel, grid_bytes

TEXT = "Once upon a time there was a little dog. She said: the cat is not here, is it? " * 60
SETTINGS = ComparisonSettings((3.0, 4.0), 192)


@pytest.fixture(scope="module", autouse=True)
def a_second_each_time() -> Iterator[None]:
    """Whenever a processor's seconds are asked for, one more has passed."""
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_forms, "time", SimpleNamespace(process_time=lambda: float(next(ticks))))
        yield


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint beside a text."""
    folder = tmp_path_factory.mktemp("experts")
    make_checkpoint(folder / "checkpoint", "qwen3-moe", num_hidden_layers=2)
    (folder / "text").write_text(TEXT, "utf-8")
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def comparison(mixture: Path) -> ExpertComparison:
    return compare(mixture, mixture.parent / "text", SETTINGS)


def outcome(comparison: ExpertComparison, bits: float, form: str, method: str | None = None) -> ComparisonRow:
    (found,) = [o for o in comparison.outcomes if (o.allowed_bits, o.form, o.method) == (bits, form, method)]
    return found


@pytest.mark.slow
def test_every_form_is_measured_within_its_bytes(comparison: ExpertComparison) -> None:
    made = {(o.allowed_bits, o.form, o.method) for o in comparison.outcomes}
    plain = {(b, form, m) for b in SETTINGS.bits for form in ("uniform", "per expert") for m in SETTINGS.methods}
    assert made == plain | {(b, form, None) for b in SETTINGS.bits for form in ("spectral", "spectral weighted")}
    assert len(comparison.outcomes) == len(made)
    for found in comparison.outcomes:
        assert 2 < found.stored_bits <= found.allowed_bits, found
        assert found.kl >= 0 and found.kl_error > 0 and 0 <= found.same_next <= 100
        assert found.rounding_seconds >= 1
    assert comparison.tokens == (192, 192)
    # 2 layers of 6 experts, each with gate and up of 32 by 64 and a down of 64 by 32.
    assert comparison.expert_weights == 2 * 6 * 3 * 32 * 64
    assert len(comparison.groups) == 4 and all(group.differs.usage > 0 for group in comparison.groups)


@pytest.mark.slow
def test_the_programme_uses_bytes_that_uniform_bits_leave(comparison: ExpertComparison) -> None:
    for method in SETTINGS.methods:
        uniform, own = (outcome(comparison, 3.0, form, method) for form in ("uniform", "per expert"))
        assert own.stored_bits > uniform.stored_bits
        assert own.kl < uniform.kl + 2 * (own.kl_error + uniform.kl_error)
        # Two bits for all, where the programme gives three to some.
        assert uniform.scheme is not None and uniform.scheme.bits == 2
        uniform, own = (outcome(comparison, 4.0, form, method) for form in ("uniform", "per expert"))
        assert own.kl < uniform.kl
        assert (comparison.probing_seconds, own.allocation_seconds) == (1, 2)
        assert uniform.allocation_seconds == 0 and uniform.scheme is not None and uniform.scheme.bits == 3


@pytest.mark.slow
def test_bytes_enough_lose_next_to_nothing(mixture: Path, comparison: ExpertComparison) -> None:
    ample = compare(mixture, mixture.parent / "text", ComparisonSettings((9.0,), 96, ("rtn",)))
    for found in ample.outcomes:
        assert found.kl < 0.5 * outcome(comparison, 4.0, found.form, found.method).kl
    assert outcome(ample, 9.0, "uniform", "rtn").same_next > 95


def test_the_best_of_what_fits_stands_for_uniform_bits(mixture: Path) -> None:
    model = ExpertModel.read(mixture)
    fitting = model.fitting(model.budget(2.6))
    assert fitting and all(scheme.bits == 2 for scheme in fitting)
    for scheme in fitting:
        schemes = model.uniform(scheme)
        assert set(schemes) == set(model.schemes)
        nbytes = sum(grid_bytes(model.tensor(name).shape, Grid.of(s)) for name, s in schemes.items())
        assert nbytes == model.nbytes(schemes) <= model.budget(2.6)
    assert {scheme.bits for scheme in model.fitting(model.budget(5))} == {4}
    assert model.fitting(model.budget(1)) == []
    # Rows of 64 and 32 values have no blocks of 128.
    assert len(model.fitting(model.budget(9))) == 4


def test_the_command_prints_a_table_and_writes_its_figures(
    mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(mixture), "--text", str(mixture.parent / "text"), "--bits", "3", "--tokens", "96"]
    assert main([*arguments, "--methods", "rtn", "--json", str(tmp_path / "out.json")]) == 0
    said, written = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert set(written) == set(ExpertComparison.__dataclass_fields__)
    assert [o["form"] for o in written["outcomes"]] == ["uniform", "per expert", "spectral", "spectral weighted"]
    assert all(set(o) == set(ComparisonRow.__dataclass_fields__) for o in written["outcomes"])
    assert written["outcomes"][0]["scheme"]["bits"] == 2
    for found in written["outcomes"]:
        assert f"| 3 | {found['form']} |" in said and f"| {found['kl']:.5f} ± " in said
    assert written["groups"][0]["name"] in said
    assert written["probing_seconds"] == 1 and "1.0 s of every allocation are probing" in said
    lines = [line for line in said.splitlines() if line.startswith("|")]
    assert len(lines) == 4 + len(written["groups"]) + len(written["outcomes"])
    assert len({line.count("|") for line in lines}) == 2
    assert all(2 < found["stored_bits"] <= 3 for found in written["outcomes"])


def test_what_does_not_fit_is_refused(mixture: Path) -> None:
    text = mixture.parent / "text"
    with pytest.raises(BudgetError, match=r"do not fit 2 bits") as refused:
        compare(mixture, text, ComparisonSettings((3.0, 2.0), 96))
    # Two bits and a scale of two bytes: in blocks of 64 where rows are long enough.
    assert refused.value.hint == "Ask for at least 2.334."


def test_unsuitable_input_is_refused(mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = mixture.parent / "text"
    make_checkpoint(tmp_path / "dense", "llama-tied")
    with pytest.raises(UsageError, match="has no experts"):
        compare(tmp_path / "dense", text)
    with pytest.raises(UsageError, match="needed for calibration"):
        compare(mixture, text, ComparisonSettings((3.0,), 100_000))
    make_checkpoint(tmp_path / "odd", "qwen3-moe-tied-odd")
    with pytest.raises(UsageError, match="can be quantized"):
        compare(tmp_path / "odd", text)
    for wrong in ({"methods": ("magic",)}, {"methods": ("awq",)}, {"bits": (0.0,)}, {"bits": ()}, {"tokens": 1}):
        with pytest.raises(UsageError):
            ComparisonSettings(**wrong)
    assert main([str(tmp_path / "dense"), "--text", str(text)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "no experts" in said.err
    assert main([str(mixture), "--text", str(text), "--json", str(tmp_path / "missing" / "out.json")]) == 5
    assert "Cannot write" in capsys.readouterr().err
