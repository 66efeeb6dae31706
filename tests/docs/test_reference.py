"""Pages that are written by hand name what there is: the server's paths, the extras, the drafters and their kind."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterable

import pytest

from edgeinfer.core.errors import BudgetError, EdgeInferError, ModelError, UsageError
from edgeinfer.core.methods import product_methods
from edgeinfer.core.options.load import DEVICES, KV_TYPES, OVERFLOWS, WEIGHTS_MODES
from tests.docs.pages import DOCS, ROOT


def told(page: str) -> set[str]:
    """What a page has in the type of code, blocks of code aside."""
    return set(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text("utf-8")))


def test_pages_name_every_choice() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    table: dict[str, Iterable[str]] = {
        "guide/install.md": set(extras) - {"dev", "docs", "wheels"},
        "guide/speculation.md": {*product_methods("drafters"), *product_methods("verifiers")},
        "guide/search.md": product_methods("searches"),
        "guide/compute.md": product_methods("compute"),
        "guide/memory.md": {*WEIGHTS_MODES, *OVERFLOWS},
        "guide/devices.md": DEVICES,
        "guide/gguf.md": {kind for kind in KV_TYPES if not kind.startswith("int")},
    }
    missing = {page: sorted(set(names) - told(page)) for page, names in table.items()}
    assert {page: names for page, names in missing.items() if names} == {}


def test_exit_codes_are_those_of_errors() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\|(.*)\|$", (DOCS / "reference" / "errors.md").read_text("utf-8"), re.MULTILINE)
    named = {name: int(code) for code, names in rows for name in re.findall(r"`(\w+Error)`", names)}
    assert {UsageError, ModelError, BudgetError} <= {kind for kind in errors() if kind.__name__ in named}
    assert {name: kind.exit_code for kind in errors() if (name := kind.__name__) in named} == named


def errors(kind: type[EdgeInferError] = EdgeInferError) -> list[type[EdgeInferError]]:
    return [kind, *(below for sub in kind.__subclasses__() for below in errors(sub))]


def test_the_page_of_the_server_has_every_path() -> None:
    pytest.importorskip("starlette", reason="the server extra is not installed")
    from starlette.routing import Route

    from edgeinfer.apps.server.app import make_app
    from edgeinfer.apps.server.host import ModelHost
    from edgeinfer.apps.server.security import Security

    host = ModelHost()
    try:
        routes = [route for route in make_app(host, Security()).routes if isinstance(route, Route)]
    finally:
        asyncio.run(host.close())
    paths = {route.path.replace(":path", "") for route in routes}
    # Each with /v1 or without, whichever its clients use.
    kinds = {path.removeprefix("/v1") or path for path in paths}
    page = {text for text in told("reference/server.md") if text.startswith("/") and text != "/v1"}
    assert page <= paths and {path.removeprefix("/v1") or path for path in page} == kinds
