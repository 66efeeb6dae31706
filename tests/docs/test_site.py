"""The documentation site: it builds without a warning, needs no network, and its reference leaves nothing out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.apps.cli.main import COMMANDS
from edgeinfer.core.options import options_of
from edgeinfer.core.options.load import LoadOptions
from edgeinfer.core.options.reply import ReplyOptions
from tests.cli import TIME_LIMIT
from tests.docs.pages import DOCS, ROOT, pages

pytestmark = pytest.mark.slow
# Elements with what a browser fetches by itself.
FETCHED = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    folder = tmp_path_factory.mktemp("docs")
    # The build writes pages into the same folder. `contributing` includes a file from above the folder.
    shutil.copytree(DOCS, folder / "docs")
    shutil.copy(ROOT / "CONTRIBUTING.md", folder)
    out = folder / "site"
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(folder / "docs"), str(out)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIME_LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return out


class Fetches(HTMLParser):
    """Gathers what a page makes a browser fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if value and FETCHED.get(tag) == name]


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    found = 0
    for page in site.rglob("*.html"):
        for address in Fetches(page.read_text("utf-8")).found:
            assert "//" not in address, f"{page.name} loads {address}"
            found += 1
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", sheet.read_text("utf-8")), sheet
    assert found > 100


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in pages():
        if page.path.is_relative_to(DOCS):
            assert (site / page.path.relative_to(DOCS)).with_suffix(".html").is_file()


def test_the_reference_has_every_name_option_and_command(site: Path) -> None:
    python = (site / "reference" / "python.html").read_text("utf-8")
    tools = {f"tools.{name}" for name in edgeinfer.tools.__all__}
    assert len(tools) > 10
    for name in {*edgeinfer.__all__, *tools} - {"tools"}:
        assert f'id="edgeinfer.{name}"' in python, name
    options = (site / "reference" / "options.html").read_text("utf-8")
    for configuration in (LoadOptions, ReplyOptions):
        for name, declared in options_of(configuration).items():
            assert f">{name}<" in options, name
            assert all(f">{flag}<" in options for flag in declared.flags), name
    for command in COMMANDS:
        text = (site / "reference" / "commands" / f"{command}.html").read_text("utf-8")
        assert f"usage: edgeinfer {command}" in text
