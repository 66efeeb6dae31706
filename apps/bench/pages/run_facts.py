"""What figures depend on, as the benchmarks record it, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.config import format_size

__all__ = ["commands", "run_facts"]


def run_facts(data: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Of `speed.describe_run`; what is missing is left out."""
    facts = {
        "Model": data.get("model_type"),
        "Size": format_size(data["model_size"]) if "model_size" in data else None,
        "Parameters": f"{data['model_n_params'] / 1e6:.1f} M" if "model_n_params" in data else None,
        "Engine": f"{data.get('build_commit')}, {data.get('backends')}" if "backends" in data else None,
        "Processor": data.get("cpu_info"),
        "System": data.get("platform"),
        "Threads": data.get("n_threads"),
        "Cache": data.get("type_k"),
        "When": data.get("test_time"),
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def commands(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The command that gave the figures, if it was recorded."""
    return (data["command"],) if data.get("command") else ()
