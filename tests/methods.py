"""Methods by kind, with those of research as pyproject.toml declares them."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

from edgeinfer.core.methods import product_methods

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache
def declared_entries(kind: str) -> Mapping[str, EntryPoint]:
    """Entry points of this checkout; what is installed may be of another."""
    group = f"edgeinfer.{kind}"
    found: dict[str, str] = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["entry-points"].get(group, {})
    return {name: EntryPoint(name, value, group) for name, value in found.items()}


def all_methods(kind: str) -> tuple[str, ...]:
    """Names of a kind: the product's, then those of research."""
    return (*product_methods(kind), *declared_entries(kind))
