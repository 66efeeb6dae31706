"""Bundles whose matrices were made GGUF's types for a text: every format that plans may choose runs on the kernel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgeinfer.bundle.opening import open_bundle
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from edgeinfer.quant.policy import QuantPlan, QuantScheme, formats_for
from edgeinfer.runtime.backends.contract import Pass
from edgeinfer.runtime.backends.onnx.paged_backend import PagedBackend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from tests.alone import Alone
from tests.factories import make_checkpoint

TOKENS = np.random.default_rng(0).integers(0, 320, 12)


@pytest.mark.slow
@pytest.mark.parametrize("width", [256, 96])
def test_what_plans_may_choose_runs(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "in", "llama-tied", hidden_size=width, intermediate_size=width * 2, num_hidden_layers=1)
    (tmp_path / "text.txt").write_text("Once upon a time there was a little dog. The dog had a red ball.\n" * 8)
    config = ExportConfig(bits=8, method="gptq", calibration=tmp_path / "text.txt", calibration_tokens=96)
    for scheme in formats_for(width):

        def forced(self: QuantPlan, name: str, scheme: QuantScheme = scheme) -> QuantScheme | None:
            return None if self.schemes.get(name) is None else scheme

        monkeypatch.setattr(QuantPlan, "scheme", forced)
        made = f"{scheme.kind or 'own'}-{scheme.bits}-{scheme.block_size}"
        bundle = open_bundle(export_checkpoint(tmp_path / "in", tmp_path / made, config))
        given = Pass(TOKENS, np.arange(len(TOKENS)), np.arange(len(TOKENS)))
        expected, found = (
            b.forward(given).logits
            for b in (Alone(ReferenceBackend(bundle, 16), 16), Alone(PagedBackend(bundle, 16), 16))
        )
        error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert np.median(error) < 0.06, (made, error)
