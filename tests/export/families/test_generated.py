"""Configurations of every family drawn at random, exported in float32, against transformers: a prompt, then a reply."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import StrictDataclassError
from hypothesis import HealthCheck, Phase, assume, given, settings

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import CheckpointError, UnsupportedArchitectureError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from tests.export.families.generated import configurations
from tests.export.families.table import FAMILIES, Family
from tests.export.families.test_families import backends, run
from tests.export.passes import expected_logits
from tests.factories import make_checkpoint

TOLERANCE = 1e-4
TEXT = np.random.default_rng(4).integers(0, 320, 24)
PROMPT = 17
# Families with many parts, of which the slow tier tries some too.
_SLOW = ("NemotronH", "Qwen3Next", "Dots1", "FalconH1", "Gemma3", "DeepseekV3", "Lfm3", "GptOss")


def difference(family: Family, chosen: dict[str, Any], folder: Path) -> float | None:
    """The largest of logits, which are scaled to 10 at most; None where transformers or we refuse the configuration."""
    try:
        model = make_checkpoint(folder / "checkpoint", family.name, **chosen)
        # Others leave caps of scores out.
        model.set_attn_implementation("eager")
        expected = expected_logits(model, TEXT)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, StrictDataclassError):
        return None
    try:
        bundle = open_bundle(export_checkpoint(folder / "checkpoint", folder / "bundle", ExportConfig(bits=32)))
    except (CheckpointError, UnsupportedArchitectureError) as error:
        assert error.hint
        return None
    found = 0.0
    for backend in backends(bundle, family):
        parts = [TEXT[:PROMPT], *np.split(TEXT[PROMPT:], len(TEXT) - PROMPT)]
        logits = np.concatenate([run(backend, part) for part in parts])
        found = max(found, float(np.abs(logits - expected).max() / max(1.0, np.abs(expected).max() / 10)))
    return found


def check(family: Family, count: int) -> None:
    """Tries so many configurations that neither refuses."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configurations(family))
    def tried(chosen: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            found = difference(family, chosen, Path(folder))
        assume(found is not None)
        assert found is not None and found <= TOLERANCE, json.dumps(chosen)

    tried()


@pytest.mark.slow
@pytest.mark.parametrize("name", _SLOW)
def test_some_configurations(name: str) -> None:
    check(next(family for family in FAMILIES if family.name == name), 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_thirty_configurations(family: Family) -> None:
    check(family, 30)
