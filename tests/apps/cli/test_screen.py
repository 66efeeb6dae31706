"""What a terminal gets and gives: pasted lines, and lines broken between words."""

from __future__ import annotations

import io
import os
import select
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from edgeinfer.apps.terminal.app import WrappedText

_READER = """
from edgeinfer.apps.terminal.app import keyboard
read = keyboard()
for _ in range(2):
    print("got", ascii(read("> ")), flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
@pytest.mark.parametrize("library", ["readline", "none"])
def test_a_paste_is_one_message(library: str) -> None:
    import pty

    ours, theirs = pty.openpty()
    code = _READER if library == "readline" else f"import sys; sys.modules['readline'] = None\n{_READER}"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    paste = "def f(x):\n  return x\nWhy?"
    _until(ours, "> ")
    os.write(ours, (f"\x1b[200~{paste}\x1b[201~\r" if library == "readline" else f"{paste}\n").encode())
    _until(ours, f"got {paste!a}")
    os.write(ours, b"next\r")
    _until(ours, "got 'next'")
    process.wait(30)
    os.close(ours)


def _until(terminal: int, text: str) -> None:
    """Reads what the terminal shows until this is there."""
    said = ""
    while text not in said:
        assert select.select([terminal], [], [], 30)[0], said
        said += os.read(terminal, 4096).decode()


@given(st.text("ab Ä漢\n", max_size=60), st.integers(4, 20), st.integers(1, 7))
def test_lines_break_between_words(text: str, width: int, size: int) -> None:
    out = io.StringIO()
    shown = WrappedText(out, width)
    for start in range(0, len(text), size):
        shown.write(text[start : start + size])
    shown.finish()
    assert out.getvalue().split() == text.split()
    if all(cell_len(word) <= width for word in text.split()):
        lines = [line for line in out.getvalue().split("\n") if len(line.split()) > 1]
        assert all(cell_len(line.strip()) <= width for line in lines)
    for line in text.split("\n"):  # what fits is left as it is
        if line.strip() and cell_len(line) <= width:
            assert line.rstrip() in out.getvalue()
