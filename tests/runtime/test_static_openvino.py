"""Static bundles on OpenVINO's CPU device, against onnxruntime's own provider."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest

from edgeinfer.export.options import ExportConfig, StaticOptions
from tests.cli import TIME_LIMIT
from tests.runtime.models import bundle_of
from tests.tables import each_row

pytestmark = pytest.mark.openvino

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = "EDGEINFER_TEST_OPENVINO_PYTHON"
# Options of the export, and by how much logits may differ: at 32 bits only sums are ordered otherwise, below OpenVINO
# multiplies floats where onnxruntime's own operators round activations to int8.
CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "llama, 32 bits": ("llama", {"bits": 32}, 1e-4),
    "llama, 8 bits": ("llama", {"bits": 8}, 0.2),
    "llama, 4 bits": ("llama", {"bits": 4}, 0.2),
    "llama, 4 bits, symmetric": ("llama", {"bits": 4, "head_bits": 4, "symmetric": True}, 0.2),
    "mistral, 4 bits": ("mistral", {"bits": 4}, 0.2),
    "qwen2-tied, 8 bits": ("qwen2-tied", {"bits": 8}, 0.2),
    "qwen3, 4 bits": ("qwen3", {"bits": 4}, 0.2),
    "phi3-partial-rotary, 8 bits": ("phi3-partial-rotary", {"bits": 8}, 0.2),
}


def interpreter() -> str:
    """The interpreter that has the provider."""
    given = os.environ.get(_VARIABLE, "")
    if given:
        return given
    if "OpenVINOExecutionProvider" in ort.get_available_providers():
        return sys.executable
    pytest.skip(f"onnxruntime-openvino is not installed here, and {_VARIABLE} names no Python that has it")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Results of the other interpreter, by case."""
    python, shapes = interpreter(), StaticOptions(context=64, chunk=16)
    configs = [ExportConfig(keep_small=False, static=shapes, **options) for _, options, _ in CASES.values()]
    variants = [variant for variant, _, _ in CASES.values()]
    folders = [bundle_of(variant, config).path for variant, config in zip(variants, configs, strict=True)]
    # Logging of the provider's own goes to stderr, and warnings of other versions are theirs.
    done = subprocess.run(
        [python, str(ROOT / "tests" / "openvino_static.py"), *map(str, folders)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@each_row("case", CASES)
def test_openvino_gives_what_the_cpu_provider_gives(results: dict[str, dict[str, Any]], case: str) -> None:
    """Whole graphs run there, logits and tokens are the same up to ties, rows however a text is cut."""
    found, tolerance = results[case], CASES[case][2]
    assert found["graphs"] == ["model.rows-8.onnx", "model.prompt-16.onnx"] and all(found["whole"])
    assert found["finite"] and found["difference"] < tolerance
    assert found["parted"] is None or found["gap"] < 2 * found["difference"] + 1e-4
    assert found["exact"]
