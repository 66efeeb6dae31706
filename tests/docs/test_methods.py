"""The table of methods: a row for all that the registries know, with tests and commands that there are."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from edgeinfer.quant.methods import METHODS
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES
from tests.methods import all_methods

ROOT = Path(__file__).parents[2]
COLUMNS = ("kind", "method", "asked for by", "definition", "beside plain decoding", "verdict")
# What there is by the flag that asks for it.
REGISTRIES: dict[str, Iterable[str]] = {
    "--speculation": all_methods("drafters"),
    "--verification": all_methods("verifiers"),
    "--compute": [name for name in all_methods("compute") if name != "random"],
    "--overflow": POLICIES,
    "--method": METHODS,
    "--search": all_methods("searches"),
}


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    lines = (ROOT / "docs/METHODS.md").read_text("utf-8").splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]
    assert tuple(cells[0]) == COLUMNS
    assert all(len(row) == len(COLUMNS) and all(row) for row in cells)
    return [dict(zip(COLUMNS, row, strict=True)) for row in cells[2:]]


def test_every_method_has_a_row(rows: list[dict[str, str]]) -> None:
    asked = [row["asked for by"] for row in rows]
    for flag, names in REGISTRIES.items():
        for name in names:
            assert any(re.search(f"`{flag} {name}[` ]", text) for text in asked), f"{flag} {name}"
    found = {match for text in asked for match in re.findall(r"`(--[a-z]+) ([a-z-]+)[` ]", text)}
    unknown = [(flag, name) for flag, name in found if flag in REGISTRIES and name not in REGISTRIES[flag]]
    assert not unknown


def test_what_the_rows_name_exists(rows: list[dict[str, str]]) -> None:
    for row in rows:
        assert "tests/" in row["definition"], row["method"]
        for path in re.findall(r"tests/[a-z_/0-9]+\.py", row["definition"]):
            assert (ROOT / path).is_file(), path
        for module in re.findall(r"python -m ([a-z_.]+)", row["beside plain decoding"]):
            path = module.removeprefix("edgeinfer.").replace(".", "/") + ".py"
            assert (ROOT / path).is_file(), module
