"""Which section shows which result: by what is in it, whatever its file is called."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.pages.curve_section import curve_section
from edgeinfer.apps.bench.pages.page import Section, page_html
from edgeinfer.apps.bench.pages.spec_section import spec_section
from edgeinfer.apps.bench.pages.speed_section import speed_section
from edgeinfer.errors import UsageError

__all__ = ["read_section", "report_html"]

# Each gives a section, or None of what another benchmark wrote.
_KINDS: tuple[Callable[[Any], Section | None], ...] = (speed_section, curve_section, spec_section)
_MOST_BYTES = 256 * 1024**2


def read_section(path: Path) -> Section:
    """The section of a file that a benchmark wrote.

    Raises:
        UsageError: it cannot be read, or is no such file.
    """
    hint = "Give JSON files of edgeinfer bench speed, curve and spec."
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too large.", hint)
        data = json.loads(path.read_text(encoding="utf-8"))
        found = [section for kind in _KINDS if (section := kind(data)) is not None]
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", hint) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(f"{path} is not what a benchmark wrote ({error}).", hint) from error
    if not found:
        raise UsageError(f"{path} is not what a benchmark wrote.", hint)
    return found[0]


def report_html(paths: Sequence[Path], title: str, lead: str) -> str:
    """The page of these files, in order; errors as `read_section`."""
    return page_html(title, lead, [read_section(path) for path in paths])
