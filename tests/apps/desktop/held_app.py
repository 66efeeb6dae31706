"""The real app in a process of its own, whose replies generate as many tokens as its standard input says, to be killed.

python -m tests.apps.desktop.held_app FOLDER
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.apps.desktop import replies
from edgeinfer.apps.desktop.app import DesktopConfig, run
from tests.apps.desktop.served import Gate, gated
from tests.cli import environment
from tests.waiting import TIME_LIMIT


@dataclass
class HeldApp:
    """The process. `address` has the key that signs a window in."""

    address: str
    process: subprocess.Popen[str]

    def let(self, tokens: int) -> None:
        """Allow further tokens."""
        assert self.process.stdin is not None
        print(tokens, file=self.process.stdin, flush=True)

    def kill(self) -> None:
        """Kill the app."""
        self.process.kill()
        self.process.wait(timeout=TIME_LIMIT)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[HeldApp]:
    """Run the app with its data in a folder for the block."""
    command = [sys.executable, "-m", "tests.apps.desktop.held_app", str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment(), stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        app = HeldApp("", process)
        try:
            app.address = process.stdout.readline().strip()
            assert app.address, "the app did not begin"
            yield app
        finally:
            app.kill()


def main(folder: str) -> None:
    """Run the app; its address is the first line."""
    # What is shown is kept at once.
    replies._KEEP_S = 0.0
    with gated() as gate:
        threading.Thread(target=_follow, args=(gate,), daemon=True).start()
        run(DesktopConfig(data=Path(folder), window=False), lambda line: print(line, flush=True))


def _follow(gate: Gate) -> None:
    for line in sys.stdin:
        gate.let(int(line))


if __name__ == "__main__":
    main(sys.argv[1])
