"""What a plan takes drafting to gain: of the drafters that the loaded model really asks, and of no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.bundle.opening import nest_drafter
from edgeinfer.export.options import ExportConfig
from edgeinfer.loading import Bundles
from edgeinfer.options.load import LoadConfig
from edgeinfer.runtime.profile.drafting import TunedDrafting
from edgeinfer.runtime.speculation.drafters.method import priors_of
from tests.heads import with_heads
from tests.runtime.models import bundle_of
from tests.speculation import known_costs, load_eager, random_bundle


@pytest.fixture(autouse=True)
def costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is timed, and what is kept is this test's alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with known_costs(kept=True):
        yield


@pytest.mark.slow
def test_plans_reckon_with_the_drafters_that_are_asked(tmp_path: Path) -> None:
    plain, drafter = random_bundle(tmp_path / "plain"), random_bundle(tmp_path / "small", num_hidden_layers=1)
    headed = with_heads(plain, tmp_path / "headed", "routers")
    bundles = {
        plain: {"copy", "ngram", "recycle"},
        nest_drafter(headed, drafter, tmp_path / "rich").path: {"copy", "ngram", "recycle", "model"},
        bundle_of("llama-tied", ExportConfig(bits=8, keep_small=False)).path: {"copy", "ngram", "recycle", "bits"},
        bundle_of("qwen3-moe", ExportConfig(bits=4, keep_small=False)).path: {"copy", "ngram", "recycle", "experts"},
    }
    for path, expected in bundles.items():
        config = LoadConfig()
        subject = Bundles.open(path, config).subject(config)
        priors = priors_of(subject, TunedDrafting())
        with load_eager(path) as model, model._idle() as parts:
            asked = set(parts.speculator.auto) - {"forced"}
        assert set(priors) == asked >= expected, path
        assert all(0 < prior.accepted < 1 and (prior.tables or prior.share > 0) for prior in priors.values())
        assert set(priors_of(subject, TunedDrafting(drafters=("copy",)))) == {"copy"}
        only, plain_plan = (edgeinfer.plan(path, speculation=how).speed for how in (",".join(expected), "off"))
        # The cost of asking in vain is reported, and does not count where ways to run are compared.
        assert only.turn_ms <= plain_plan.turn_ms and only.tokens_per_second > 0.8 * plain_plan.tokens_per_second
