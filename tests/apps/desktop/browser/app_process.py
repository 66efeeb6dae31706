"""Runs `edgeinfer chat` without its window in a process of its own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cli import Logged, command, environment
from tests.speculation import BUILTIN


@dataclass
class App(Logged):
    """A running app. `address` has the key that signs a window in."""

    address: str


@contextlib.contextmanager
def running(data: Path, *arguments: str | Path, variables: Mapping[str, str] | None = None) -> Iterator[App]:
    """Run the app with its data in a folder for the block; `variables` are added to its environment."""
    words = command("chat", "--no-window", "--port", "0", "--data", data, *arguments)
    env = environment() | dict(variables or {})
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=log))
        stack.callback(process.kill)
        assert process.stdout is not None
        app = App(process, log, process.stdout.readline().decode().strip())
        assert app.address, app.logged()
        yield app
        app.stop()


def make_models(folder: Path) -> Path:
    """A folder with a copy of the built-in model, and one with truncated weights."""
    shutil.copytree(BUILTIN, folder / "second-tales")
    manifest = folder / "second-tales" / "edgeinfer.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text("utf-8")) | {"name": "second-tales"}), "utf-8")
    shutil.copytree(BUILTIN, folder / "broken-tales")
    weights = folder / "broken-tales" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder
