"""Every command and every block of Python in README and docs is run, page by page, from top to bottom."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.commands import HAS, INSTEAD, NOT_RUN, PULLED
from tests.docs.pages import ROOT, Page, pages
from tests.docs.reader import Reader
from tests.gguf_models import builtin_checkpoint, builtin_gguf
from tests.hub_server import Hub, serving
from tests.speculation import BUILTIN, needs_builtin

STORIES = [
    "Once upon a time there was a little dog. The little dog had a red ball. One day the ball was gone.",
    "Tom and Mia went to the park. They saw a big tree. Tom wanted to climb the tree, but Mia was afraid.",
]
# Pages that are about working on edgeinfer, or tell what was done once.
OTHERS = ("docs/log", "docs/MEASUREMENTS.md", "docs/results", "docs/screenshots", "docs/contributing.md")


def name_of(page: Page) -> str:
    return page.path.relative_to(ROOT).as_posix()


PAGES = [page for page in pages() if not name_of(page).startswith(OTHERS) and list(page.blocks)]


def copied(source: Callable[[], Path]) -> Callable[[Path], None]:
    def lay(path: Path) -> None:
        (shutil.copytree if source().is_dir() else shutil.copy)(source(), path)

    return lay


def written(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, "utf-8")


# Stand-ins, by the names that pages give what readers have.
STAND_INS: dict[str, Callable[[Path], object]] = {
    "my-model": copied(lambda: BUILTIN),
    "my-model-with-drafter": copied(lambda: BUILTIN),
    "my-drafter": copied(lambda: BUILTIN / "drafter"),
    "CHECKPOINT": copied(builtin_checkpoint),
    "PATH": lambda path: shutil.copytree(builtin_checkpoint(), path / "TO" / "tales"),
    "model.gguf": copied(lambda: builtin_gguf("Q8_0")),
    "texts.txt": written("\n\n".join(STORIES * 20)),
    "others.txt": written("\n\n".join(STORIES)),
    "texts.jsonl": written("".join(json.dumps({"text": story}) + "\n" for story in STORIES * 80)),
    "key.txt": written("secret-secret-secret\n"),
}


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub with the models that pages name, each the built-in one."""
    checkpoint = {path.name: path.read_bytes() for path in builtin_checkpoint().iterdir()}
    repos = dict.fromkeys(("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct"), checkpoint)
    file = builtin_gguf("Q8_0").read_bytes()
    with serving({**repos, "Qwen/Qwen3-0.6B-GGUF": {"Qwen3-0.6B-Q8_0.gguf": file}}) as started:
        yield started


@needs_builtin
@pytest.mark.slow
@pytest.mark.gguf
@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_can_be_followed(page: Page, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "reader"
    folder.mkdir()
    for name in HAS.get(name_of(page), ()):
        STAND_INS[name](folder / name)
    with Reader(folder, monkeypatch, hub.url) as reader:
        if name_of(page) in PULLED:
            reader.command(f"edgeinfer pull {PULLED[name_of(page)]} --no-calibration", name_of(page))
        for block in page.blocks:
            reader.follow(block)


def test_exceptions_are_of_commands_that_are_there() -> None:
    text = "\n".join(block.text for page in PAGES for block in page.blocks)
    unused = [rule.pattern for rule in (*INSTEAD, *NOT_RUN) if rule.pattern not in text]
    assert unused == [] and all(rule.reason for rule in (*INSTEAD, *NOT_RUN))
    assert {*HAS, *PULLED} <= {name_of(page) for page in PAGES} and set().union(*HAS.values()) == set(STAND_INS)
