"""Which version of edgeinfer this is; knows nothing else, so that asking costs nothing."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"
