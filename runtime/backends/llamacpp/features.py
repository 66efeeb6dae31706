"""What instruction sets llama.cpp was compiled for; knows no model."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["features"]


def features(lib: Any) -> tuple[str, ...]:
    """Names as llama.cpp prints them, such as "AVX512_VNNI"."""
    text = lib.llama_print_system_info().decode("ascii", "replace")
    return tuple(name for name, value in re.findall(r"(\w+) = (\d+)", text) if value != "0")
