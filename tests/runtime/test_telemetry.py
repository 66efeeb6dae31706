"""Nothing is reported to anybody: onnxruntime would, from its import on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import TIME_LIMIT


@pytest.mark.skipif(sys.platform != "linux", reason="looks where onnxruntime keeps its identifier on Linux")
def test_onnxruntime_leaves_no_identifier_of_the_device(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    code = "import edgeinfer; edgeinfer.load(context=64, native=None).generate('Once', max_tokens=2)"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=TIME_LIMIT)
    kept = [path.relative_to(tmp_path) for path in tmp_path.rglob("*")]
    assert [path for path in kept if "onnxruntime" in str(path).lower() or path.name == "deviceid"] == []
