"""Scripts of `tests/tools` on the built-in model: replies made at once, remote verification."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the tests' HTTP client is not installed")
pytest.importorskip("starlette", reason="the server extra is not installed")


from edgeinfer.runtime.native.library import LIBRARY
from tests.speculation import needs_builtin
from tests.tools import batch_speed, remote_speed


@pytest.mark.slow
@needs_builtin
@pytest.mark.skipif(not LIBRARY.is_file(), reason="the native kernel was not built")
def test_replies_made_at_once(tmp_path: Path) -> None:
    out, figures = tmp_path / "out.json", {}
    small = ["--clients", "1,2", "--prompt", "20", "--tokens", "4", "--late", "60", "--repeats", "1"]
    for part in ("pace", "gaps"):
        assert batch_speed.main([*small, "--part", part, "--vocabulary", "1000", "--out", str(out)]) == 0
        figures[part] = json.loads(out.read_text())
    assert all(figures["pace"][f"edgeinfer {n}"]["tokens_per_cpu_s"] > 0 for n in (1, 2))
    assert {"with", "without"} <= figures["gaps"].keys()


@pytest.mark.slow
@needs_builtin
def test_remote_verification(tmp_path: Path) -> None:
    out = tmp_path / "remote.json"
    few = ["--links", "1", "--repeats", "1", "--tokens", "6", "--devices", "1", "2"]
    assert remote_speed.main([*few, "--out", str(out)]) == 0
    figures = json.loads(out.read_text("utf-8"))
    (cell,) = figures["cells"]
    assert cell["tokens_per_second"].keys() == {"drafts", "streams", "local"} and cell["predicted"] > 0
    ways = [("drafts", 1), ("drafts", 2), ("streams", 1), ("streams", 2)]
    assert [(row["way"], row["devices"]) for row in figures["devices"]] == ways
