"""The real app in a process of its own, with replies slow enough to be killed in the middle.

python -m tests.apps.desktop.slow_app FOLDER
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from edgeinfer.apps.desktop.window import DesktopConfig, run
from edgeinfer.generation import TokenStream
from edgeinfer.results import Chunk

_TOKEN_S = 0.05


def main(folder: str) -> None:
    """Runs the app; its address is the first line."""
    step = TokenStream.__next__

    def slow_step(stream: TokenStream) -> Chunk:
        time.sleep(_TOKEN_S)
        return step(stream)

    TokenStream.__next__ = slow_step  # type: ignore[method-assign, assignment]
    run(DesktopConfig(data=Path(folder), window=False), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main(sys.argv[1])
