"""What figures depend on, as the benchmarks record it, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.apps.bench.pages.page import Facts
from edgeinfer.config import format_size

__all__ = ["commands", "common", "machine_facts", "run_facts"]


def run_facts(data: Mapping[str, Any]) -> Facts:
    """Of one run's model and settings, as `speed.describe_run` and the headers of result files say them."""
    facts = {
        "Model": data.get("model_type"),
        "Size": format_size(data["model_size"]) if "model_size" in data else None,
        "Parameters": f"{data['model_n_params'] / 1e6:.1f} M" if "model_n_params" in data else None,
        "Engine": data.get("backends"),
        "Threads": data.get("n_threads"),
        "Cache": data.get("type_k"),
        "When": data.get("test_time"),
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def machine_facts(data: Any) -> Facts:
    """Of the machine and the versions that a run was made with; what is missing is left out."""
    row = data[0] if isinstance(data, list) else data
    environment = row.get("environment") or {}
    libraries = [f"{name} {number}" for name, number in environment.get("libraries", {}).items()]
    python = environment.get("python")
    version = f"edgeinfer {row['edgeinfer']}" if "edgeinfer" in row else row.get("build_commit")
    facts = {
        "Processor": environment.get("processor", row.get("cpu_info")),
        "Cores": str(environment["cores"]) if "cores" in environment else None,
        "Memory": format_size(environment["memory_bytes"]) if "memory_bytes" in environment else None,
        "System": environment.get("system", row.get("platform")),
        "Version": version,
        "Libraries": ", ".join([f"python {python}", *libraries]) if python else None,
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def common(each: Sequence[Facts]) -> Facts:
    """Facts on which all runs agree that state them."""
    # In the order of whoever states most.
    values: dict[str, set[str]] = {}
    for name, value in (fact for facts in sorted(each, key=len, reverse=True) for fact in facts):
        values.setdefault(name, set()).add(value)
    return tuple((name, next(iter(found))) for name, found in values.items() if len(found) == 1)


def commands(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The command that gave the figures, if it was recorded."""
    return (data["command"],) if data.get("command") else ()
