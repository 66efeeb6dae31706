"""Which version of edgeinfer this is."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"
