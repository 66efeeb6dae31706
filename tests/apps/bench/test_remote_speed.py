"""The measurements of a model elsewhere run, and what they tell is what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgeinfer.apps.bench.remote_speed import main
from tests.speculation import needs_builtin

pytestmark = [pytest.mark.slow, needs_builtin]


@pytest.mark.parametrize("part", ["speed", "devices"])
def test_each_part_is_measured(part: str, tmp_path: Path) -> None:
    out = tmp_path / "remote.json"
    few = ["--links", "1", "--repeats", "1", "--tokens", "6", "--devices", "1", "2"]
    assert main(["--part", part, *few, "--out", str(out)]) == 0
    figures = json.loads(out.read_text("utf-8"))
    if part == "speed":
        (cell,) = figures["cells"]
        assert cell["tokens_per_second"].keys() == {"drafts", "streams", "local"} and cell["predicted"] > 0
    else:
        assert [(row["way"], row["devices"]) for row in figures["devices"]] == [
            ("drafts", 1),
            ("drafts", 2),
            ("streams", 1),
            ("streams", 2),
        ]
