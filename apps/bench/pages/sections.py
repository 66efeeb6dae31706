"""Which section shows which result: by what is in it, whatever its file is called."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.pages.tune_section import tune_section
from edgeinfer.apps.bench.peers_figures import peers_section
from edgeinfer.apps.bench.registry import BENCHMARKS
from edgeinfer.apps.bench.render import Facts, Section, common, machine_facts, page_html
from edgeinfer.errors import UsageError

__all__ = ["read_section", "report_html"]

# By the name of the benchmark that a file says it is of. Lists are of speed, whose form is llama-bench's.
_KINDS: dict[str, Callable[[Any], Section]] = {
    **{each.key: each.section for each in BENCHMARKS},
    "peers": peers_section,
    "tune": tune_section,
}
_MOST_BYTES = 256 * 1024**2


def read_section(path: Path) -> tuple[Section, Facts]:
    """The section of a file that a benchmark wrote, and the facts of its machine.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    hint = "Give JSON files that edgeinfer bench and edgeinfer tune wrote."
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too large.", hint)
        data = json.loads(path.read_text(encoding="utf-8"))
        kind = _kind(data)
        if kind not in _KINDS:
            raise UsageError(f"{path} is not what a benchmark wrote.", hint)
        return _KINDS[kind](data), machine_facts(data)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", hint) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
        raise UsageError(f"{path} is not what a benchmark wrote ({error}).", hint) from error


def _kind(data: Any) -> str:
    if isinstance(data, list):
        return "speed"
    if "benchmark" not in data and "device" in data and "kept" in data:
        return "tune"  # the command's own output, which has no header
    return str(data.get("benchmark"))


def report_html(paths: Sequence[Path], title: str, lead: str) -> str:
    """The page of these files, in order; errors as `read_section`."""
    found = [read_section(path) for path in paths]
    shared = common([facts for _, facts in found])
    # What is the same everywhere stands once; what is not stands where it belongs.
    sections = [
        replace(section, facts=(*section.facts, *(fact for fact in facts if fact not in shared)))
        for section, facts in found
    ]
    return page_html(title, lead, sections, shared)
