"""How unsure a model is before it is wrong: learnt from a text, taken by searches, and forgotten."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve
from edgeinfer.runtime.profile.uncertainty import KEPT_UNCERTAINTY, MeasuredUncertainty
from edgeinfer.tools import tune_uncertainty, uncertainty
from tests.speculation import needs_builtin

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache"), needs_builtin]

STORY = "Tom had a red ball. He went to the park with Ann, and they saw a small brown dog there. "
STRANGE = "Entropy of quarks bewilders zealous auditors, whose ledgers Jupiter ignores. "


def test_the_threshold_is_where_an_error_is_as_likely_as_none() -> None:
    chance = np.random.default_rng(3)
    entropies = chance.exponential(1.2, 40_000)
    # Errors by a known law: of balanced kinds it is even where the odds are those of all errors.
    wrong = chance.random(40_000) < 1 / (1 + np.exp(-(2.0 * entropies - 3.0)))
    odds = wrong.mean() / (1 - wrong.mean())
    found = uncertainty._even_chance(entropies, wrong)
    # On both sides of the threshold, errors are rarer and commoner than on the whole.
    near = abs(entropies - found) < 0.05
    assert wrong[near].mean() / (1 - wrong[near].mean()) == pytest.approx(odds, rel=0.25)
    for kinds in (np.zeros(5, np.bool_), np.ones(5, np.bool_), np.array([True, True, False, False, False])):
        with pytest.raises(UsageError, match=r"never wrong|always wrong|does not tell"):
            uncertainty._even_chance(np.arange(5.0), kinds)


def test_searches_take_what_was_learnt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bundle = open_bundle(resolve(None))
    told: list[tuple[int, int]] = []
    found = tune_uncertainty(None, (STORY + STRANGE) * 4, progress=lambda *each: told.append(each))
    assert 0 < found.wrong < 1 and 0 < found.above < 1 and found.threshold > 0 and told[0][0] == 0
    assert KEPT_UNCERTAINTY.read(bundle) == found

    def looked(above: float | None = None) -> int:
        with edgeinfer.load(context=128, remember=False) as model:
            reply = model.generate("Once upon a time", max_tokens=24, search="lookahead", uncertainty=above)
        assert reply.search is not None
        return reply.search.trials

    assert looked() == looked(found.threshold)
    KEPT_UNCERTAINTY.keep(bundle, MeasuredUncertainty(0.0, 10, 0.5, 1.0))
    assert looked() == looked(0.0) > looked(1.5)
    assert main(["tune", "--forget"]) == 0
    assert looked() == looked(1.5)

    text = tmp_path / "text.txt"
    text.write_text((STORY + STRANGE) * 4)
    capsys.readouterr()
    assert main(["tune", "--uncertainty", "--text", str(text), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["threshold"] == pytest.approx(found.threshold)
    assert main(["tune", "--uncertainty"]) == 2
    assert "--text" in capsys.readouterr().err
    text.write_text("Too short.")
    assert main(["tune", "--uncertainty", "--text", str(text)]) == 2
