"""Runs `edgeinfer chat` without its window in a process of its own; knows nothing of browsers."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tests.cli import command, environment
from tests.speculation import BUILTIN

__all__ = ["App", "make_models", "running"]


@dataclass
class App:
    """An app that serves its page.

    Attributes:
        address: with the key that signs a window in.
    """

    address: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]

    @property
    def port(self) -> str:
        """Of the page."""
        return self.address.split("/?")[0].rpartition(":")[2]

    def logged(self) -> str:
        """What the app has written on stderr."""
        self.log.seek(0)
        return self.log.read().decode()

    def stop(self) -> int:
        """Ends the app as Ctrl-C in its terminal does, and gives its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)

    def kill(self) -> None:
        """Ends the app without a chance to keep anything."""
        self.process.kill()
        self.process.wait(timeout=60)


@contextlib.contextmanager
def running(data: Path, *arguments: str | Path) -> Iterator[App]:
    """The app with its data in a folder, which is ended with the block unless the test has ended it."""
    words = command("chat", "--no-window", "--data", data, *arguments)
    words += [] if "--port" in words else ["--port", "0"]
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=log))
        stack.callback(process.kill)
        assert process.stdout is not None
        app = App(process.stdout.readline().decode().strip(), process, log)
        assert app.address, app.logged()
        yield app
        if process.poll() is None:
            app.stop()


def make_models(folder: Path) -> Path:
    """A folder with a copy of the built-in model, and one whose weights were cut off."""
    shutil.copytree(BUILTIN, folder / "second-tales")
    shutil.copytree(BUILTIN, folder / "broken-tales")
    weights = folder / "broken-tales" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    return folder
