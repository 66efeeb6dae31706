"""The command in a real terminal: what the documentation's pictures show."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.tools.terminal_pictures import PICTURES, draw

SCRIPTS = Path(sys.executable).parent


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
@pytest.mark.skipif(not (SCRIPTS / "edgeinfer").is_file(), reason="the command is not installed beside this Python")
def test_pictures_show_what_they_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(SCRIPTS), prepend=":")
    monkeypatch.setenv("HOME", str(tmp_path))
    for picture in PICTURES:
        if picture.name in ("terminal-ask", "terminal-chat"):
            # It raises where the terminal does not show what the picture is about.
            drawn = draw(picture)
            assert drawn.startswith("<svg") and "@font-face" not in drawn
