"""Draw the documentation's pictures of the command line: type commands into a real terminal and draw its screen.

`python -m tests.tools.terminal_pictures docs/screenshots` needs tmux; `edgeinfer` must be on the PATH.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.waiting import wait_until

_COLUMNS, _LINES = 88, 48
_SHELL_PROMPT, _CHAT_PROMPT = "$", ">"
# rich asks the web for a font; a picture must do without.
_WEB_FONT = re.compile(r"@font-face\s*\{.*?\}\s*", re.DOTALL)


@dataclass(frozen=True)
class Picture:
    """The lines that are typed, and the name of their picture."""

    name: str
    title: str
    typed: tuple[str, ...]
    seen: tuple[str, ...]  # texts that the terminal must show in the end


PICTURES = (
    Picture(
        "terminal-first-start", "First start", ("edgeinfer", 'edgeinfer run "Once upon a time"'), ("Lily", "tok/s")
    ),
    Picture(
        "terminal-ask",
        "Ask, pipe, choose",
        (
            'edgeinfer run "Tell me a story about a dog." -n 24',
            'echo "a cat" | edgeinfer run -p "Tell me a story about" -n 24',
            'edgeinfer run "Is the dog happy?" --choice yes --choice no',
        ),
        ("[24 tokens; -n for more]",),
    ),
    Picture(
        "terminal-budget",
        "Within a budget",
        (
            'edgeinfer run "Once upon a time" --memory 400',
            'edgeinfer run "Once upon a time" --memroy 400MB',
            "edgeinfer plan --memory 110MB",
        ),
        ("Did you mean 400MB?", "Did you mean --memory?"),
    ),
    Picture("terminal-help", "Help on one screen", ("edgeinfer run --help",), ("--help-all",)),
    Picture(
        "terminal-chat",
        "Chat in the terminal",
        (
            "edgeinfer chat --terminal --seed 3",
            "Tell me a story about a bird.",
            "/set max_tokens 20",
            "/regen",
            "/stats",
            "/bye",
        ),
        ("[20 tokens; /set max_tokens N for more]", "peak memory"),
    ),
)


class Terminal:
    """A terminal of its own, of a fixed size, with a shell in it."""

    def __init__(self) -> None:
        # A server of the same socket, which ends behind the command that ends it, would be asked for a new session.
        self._folder = tempfile.TemporaryDirectory(prefix="edgeinfer-pictures-")
        line = f"env -i HOME={os.environ['HOME']} PATH={os.environ['PATH']} TERM=xterm-256color PS1='$ ' LANG=C.UTF-8"
        size = ("-x", str(_COLUMNS), "-y", str(_LINES))
        self._tmux("new-session", "-d", "-s", "picture", *size, f"{line} bash --norc --noprofile")
        self._await()

    def type(self, line: str) -> None:
        """Type a line, and wait until the next can be typed."""
        before = self.shown()
        self._tmux("send-keys", "-t", "picture", "-l", line)
        self._tmux("send-keys", "-t", "picture", "Enter")
        self._await(before)

    def shown(self, *options: str) -> str:
        """The screen of the terminal."""
        return self._tmux("capture-pane", "-p", "-t", "picture", *options).rstrip()

    def close(self) -> None:
        """End the shell and its programs."""
        self._tmux("kill-server")
        self._folder.cleanup()

    def _await(self, before: str = "") -> None:
        def prompted() -> bool:
            shown = self.shown()
            return shown != before and shown.rpartition("\n")[2].strip() in (_SHELL_PROMPT, _CHAT_PROMPT)

        wait_until(prompted, "a prompt in the terminal")

    def _tmux(self, *arguments: str) -> str:
        line = ["tmux", "-S", f"{self._folder.name}/socket", *arguments]
        return subprocess.run(line, check=True, capture_output=True, encoding="utf-8", timeout=60).stdout


def draw(picture: Picture) -> str:
    """Type a picture's lines into a new terminal and draw its screen as SVG."""
    terminal = Terminal()
    try:
        for line in picture.typed:
            terminal.type(line)
        shown = terminal.shown("-e")
        plain = terminal.shown()
    finally:
        terminal.close()
    missing = [text for text in picture.seen if text not in plain]
    if missing:
        raise AssertionError(f"{picture.name} does not show {missing}:\n{plain}")
    # The prompt of what would be typed next is no part of the picture.
    shown = shown.rpartition("\n")[0]
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=_COLUMNS, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(Text.from_ansi(shown))
    return _WEB_FONT.sub("", console.export_svg(title=picture.title, unique_id=picture.name))


def main(arguments: Sequence[str]) -> int:
    """Writes the pictures into a folder."""
    folder = Path(arguments[0])
    for picture in PICTURES:
        path = folder / f"{picture.name}.svg"
        path.write_text(draw(picture), "utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
