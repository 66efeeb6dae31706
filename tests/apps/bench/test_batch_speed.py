"""The bench of replies side by side, on the built-in model: which figures it has, and that all replies are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.apps.bench.batch_speed import main
from edgeinfer.runtime.native.library import LIBRARY
from tests.speculation import needs_builtin

pytestmark = [needs_builtin, pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")]
SMALL = [
    "--clients",
    "1,2",
    "--prompt",
    "20",
    "--tokens",
    "4",
    "--document",
    "60",
    "--questions",
    "3",
    "--repeats",
    "1",
]


@pytest.mark.slow
def test_every_part_writes_its_figures(tmp_path: Path) -> None:
    figures = {}
    for part in ("pace", "document", "order", "gaps", "drafts"):
        assert main([*SMALL, "--part", part, "--vocabulary", "1000", "--out", str(tmp_path / "out.json")]) == 0
        figures[part] = json.loads((tmp_path / "out.json").read_text())
    pace = figures["pace"]
    assert {"edgeinfer 1", "edgeinfer 2"} <= pace.keys()
    assert all(pace[f"edgeinfer {n}"][kind] > 0 for n in (1, 2) for kind in ("tokens_per_s", "tokens_per_cpu_s"))
    assert figures["document"]["ratio"]["cpu"] > 0
    assert figures["order"]["grouped"]["evaluated"] > 0
    assert {"with", "without"} <= figures["gaps"].keys()
    assert figures["drafts"]["2"]["cpu"] > 0
