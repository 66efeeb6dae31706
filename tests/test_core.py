"""Export, run and speculate, from a checkpoint made of random numbers; needs neither torch nor transformers.

So it runs wherever edgeinfer with its extra `export` is installed: on small devices, and in an emulated one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.core.errors import NativeUnavailableError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.profile.costs import PassCosts
from edgeinfer.runtime.speculation.costs import DeviceCosts, SessionCosts
from edgeinfer.runtime.speculation.drafters.contract import Drafter
from tests.tools.random_models import SHAPES, write_random_checkpoint

PROMPT = [3, 10, 17, 24, 31, 3, 10, 17, 24, 31, 3, 10]


def kernels() -> list[bool | None]:
    """Ways to multiply here: with the native kernel where there is one, and without."""
    try:
        native_kernel()
    except NativeUnavailableError:
        return [False]
    return [None, False]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("core") / "checkpoint"
    write_random_checkpoint(folder, SHAPES["tiny"])
    return folder


@pytest.fixture(scope="module", params=[32, 8, 4, 2])
def bundle(request: pytest.FixtureRequest, checkpoint: Path) -> Path:
    folder = checkpoint.parent / f"bits-{request.param}"
    return export_checkpoint(checkpoint, folder, ExportConfig(bits=request.param, keep_small=False, calibration="none"))


def logits(bundle: Path, **options: Any) -> np.ndarray:  # (S, V)
    with edgeinfer.load(bundle, speculation="off", context=64, **options) as model:
        return np.concatenate([rows.copy() for rows in model.logits(PROMPT)])


@pytest.mark.parametrize("native", kernels())
def test_logits_are_those_of_the_reference(bundle: Path, native: bool | None) -> None:
    wanted = logits(bundle, backend="reference")
    found = logits(bundle, native=native)
    # Both quantize the inputs of quantized layers to 8 bits; the reference does not.
    assert np.abs(found - wanted).max() <= 0.05 * np.abs(wanted).max()
    assert np.corrcoef(found.ravel(), wanted.ravel())[0, 1] > 0.995


def cheap_costs(_: DeviceCosts, drafters: Sequence[Drafter]) -> SessionCosts:
    """Costs with which whatever can be drafted is, on any device and however busy it is."""
    return SessionCosts(PassCosts(((1, 1.0), (32, 1.05))), {each.name: 1e-6 for each in drafters}, 1e-6, confirmed=64)


@pytest.mark.parametrize("native", kernels())
def test_drafted_text_is_plain_text(bundle: Path, native: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCosts, "of", cheap_costs)
    drafted = 0
    with edgeinfer.load(bundle, native=native, context=256, remember=False) as model:
        for way in ({}, {"temperature": 0.8, "seed": 3}):
            options: dict[str, Any] = {"max_tokens": 48, "ignore_eos": True} | way
            plain = model.generate(PROMPT, speculation="off", **options)
            assert plain.speculation.drafted == 0
            for drafters in ("copy,ngram,recycle", "auto"):
                result = model.generate(PROMPT, speculation=drafters, **options)
                assert result.token_ids == plain.token_ids
                drafted += result.speculation.drafted
    assert drafted > 0


def test_a_budget_is_kept(bundle: Path) -> None:
    least = edgeinfer.plan(bundle, context=64).minimum_bytes
    with edgeinfer.load(bundle, context=64, memory=least * 2) as model:
        # With what passes cost here, measured as the model was loaded.
        result = model.generate(PROMPT, max_tokens=16, ignore_eos=True, speculation="auto")
        plain = model.generate(PROMPT, max_tokens=16, ignore_eos=True, speculation="off")
    assert len(result.token_ids) == 16 and result.token_ids == plain.token_ids
    assert result.memory.planned_bytes <= least * 2
