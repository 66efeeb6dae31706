"""Methods by kind, with those of research as pyproject.toml declares them, and their own options."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from edgeinfer.core.methods import find_method, product_methods

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


@cache
def declared_entries(kind: str) -> Mapping[str, EntryPoint]:
    """Entry points of this checkout; what is installed may be of another."""
    group = f"edgeinfer.{kind}"
    found: dict[str, str] = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["entry-points"][group]
    return {name: EntryPoint(name, value, group) for name, value in found.items()}


def all_methods(kind: str) -> tuple[str, ...]:
    """Names of a kind: the product's, then those of research."""
    return (*product_methods(kind), *declared_entries(kind))


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a reply with those of its search or compute among `method_options`."""
    chosen = [("searches", options.get("search", "off")), ("compute", options.get("compute", "full"))]
    methods = [find_method(kind, name) for kind, name in chosen if name not in ("off", "full")]
    own = {each.name for method in methods for each in method.options} & options.keys()
    if not own:
        return dict(options)
    return {k: v for k, v in options.items() if k not in own} | {"method_options": {k: options[k] for k in own}}
