"""Helpers of the scripts in this folder: percentiles, and figures as a result file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.apps.bench.benchmark import result_json


def percentile(values: Sequence[float], percent: int) -> float | None:
    """The value that `percent` of them do not exceed; None of none."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else None


def script_json(name: str, data: Mapping[str, Any]) -> str:
    """Figures of the running script as a result file."""
    return result_json(name, shlex.join(["python", "-m", f"tests.tools.{name}", *sys.argv[1:]]), data)
