"""The pages of methods: a paragraph for all that options can name, with tests and commands that exist."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from edgeinfer.core.methods import product_methods
from edgeinfer.quant.methods import METHODS
from edgeinfer.runtime.kv_cache.context_shift.registry import POLICIES
from edgeinfer.runtime.speculation import drafters
from tests.methods import all_methods

ROOT = Path(__file__).parents[2]
PAGES = ("METHODS.md", "METHODS-tried.md")
# Methods by the flag that chooses one.
REGISTRIES: dict[str, Iterable[str]] = {
    "--speculation": all_methods("drafters"),
    "--verification": all_methods("verifiers"),
    "--compute": all_methods("compute"),
    "--overflow": POLICIES,
    "--method": METHODS,
    "--search": all_methods("searches"),
}
KINDS = {"--speculation": "drafters", "--verification": "verifiers", "--compute": "compute", "--search": "searches"}


class Paragraph(NamedTuple):
    page: str
    name: str
    options: str
    text: str


@pytest.fixture(scope="module")
def paragraphs() -> list[Paragraph]:
    found = []
    for page in PAGES:
        for line in (ROOT / "docs" / page).read_text("utf-8").splitlines():
            if match := re.match(r"\*\*(.+?)\*\* \((.+?)\)\. (.+)", line):
                found.append(Paragraph(page, *match.groups()))
    assert len(found) > 60
    return found


def test_every_method_has_a_paragraph_on_its_page(paragraphs: list[Paragraph]) -> None:
    for flag, names in REGISTRIES.items():
        for name in names:
            pages = {each.page for each in paragraphs if re.search(f"`{flag} {name}[` ]", each.options)}
            assert pages, f"{flag} {name}"
            if flag in KINDS:
                assert pages == {PAGES[name not in product_methods(KINDS[flag])]}, f"{flag} {name}"
    there = [each.options for each in paragraphs if not each.options.endswith("gone")]
    found = {match for text in there for match in re.findall(r"`(--[a-z]+) ([a-z-]+)[` ]", text)}
    assert not [(flag, name) for flag, name in found if flag in REGISTRIES and name not in REGISTRIES[flag]]


def test_what_paragraphs_name_exists(paragraphs: list[Paragraph]) -> None:
    for each in paragraphs:
        assert re.search("easured|no figure|No model|Passes as", each.text), each.name
        assert "tests/" in each.text or each.options.endswith("gone"), each.name
        for path in re.findall(r"tests/[a-z_/0-9]+\.py", each.text):
            assert (ROOT / path).is_file(), path
        for module in re.findall(r"python -m ([a-z_.]+)", each.text):
            path = module.removeprefix("edgeinfer.").replace(".", "/") + ".py"
            assert (ROOT / path).is_file(), module


def test_the_drafter_of_contributing_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text("utf-8").split("## Add a drafter")[1].split("\n## ")[0]
    drafter, test = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "period.py").write_text(drafter, "utf-8")
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    product_methods.cache_clear()
    try:
        names: dict[str, Any] = {}
        exec(compile(test, "CONTRIBUTING.md", "exec"), names)
        names["test_the_period_is_drafted_and_the_text_is_plain"]()
    finally:
        product_methods.cache_clear()
        sys.modules.pop(f"{drafters.__name__}.period", None)


# Names of methods that are other things' names as well: fields of JSON and plans, options, and places of weights.
GENERIC = {
    "bits",
    "copy",
    "entropy",
    "exit",
    "experts",
    "model",
    "resident",
    "routers",
    "samples",
    "sorted",
}
# Files that name what a method is made of or measured with.
NAMING = {
    "apps/cli/distill.py": "kinds of heads that are trained",
    "edgeinfer/bundle/additions.py": "files of heads in a bundle",
    "edgeinfer/core/options/decoding.py": "the option that only this search has",
}


def test_methods_are_named_in_their_own_files_alone() -> None:
    """Comparisons, tables and lists of other files hold no method's name."""
    names = {name for kind in KINDS.values() for name in all_methods(kind)} - GENERIC
    found = set()
    for folder in ("edgeinfer", "runtime", "apps", "quant"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text("utf-8")
            declares = re.search(r"^(METHODS?|UNIFIED)\b.* = ", text, re.MULTILINE)
            nodes = () if declares else ast.walk(ast.parse(text))
            items: list[ast.expr | None] = []
            for node in nodes:
                if isinstance(node, ast.Compare):
                    items += [node.left, *node.comparators]
                elif isinstance(node, ast.Tuple | ast.List | ast.Set):
                    items += node.elts
                elif isinstance(node, ast.Dict):
                    items += node.keys
            values = {item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)}
            if values & names:
                found.add(str(path.relative_to(ROOT)))
    assert found == set(NAMING)
