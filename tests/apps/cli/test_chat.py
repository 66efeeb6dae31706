"""The terminal chat: commands, pasted and piped input, Ctrl-C, wrapped lines, and mistakes."""

from __future__ import annotations

import io
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.apps.terminal.app import SwitchedModel, TerminalChat, WrappedText
from edgeinfer.core.errors import BackendError, ContextLengthError, ModelError, UserError
from edgeinfer.core.options.reply import ReplyOptions
from tests.cli import handling
from tests.fakes import FakeStream
from tests.tables import each_row
from tests.tools.terminal_pictures import PICTURES, draw


class FakeModel:
    """A fake model with one conversation: it repeats messages and fails on "fail" and "break"."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    info = SimpleNamespace(name="Toy", parameters=1e6, bits_per_weight=8)
    sampling: Mapping[str, Any] = {}

    @property
    def model(self) -> Self:
        return self

    def switch(self, name: str) -> None:
        self.log.append(("switch", name))
        if name == "missing":
            raise ModelError("There is no such model.", "Name another.")

    def load(self, model: Any = None, **options: Any) -> Self:
        self.log.append(("load", model, options))
        return self

    def chat(self, system: str | None = None, history: Sequence[dict[str, str]] = ()) -> Self:
        self.log.append(("chat", system, list(history)) if history else ("chat", system))
        return self

    def check(self, **options: Any) -> None:
        ReplyOptions(**options)

    def stream(self, text: str, **options: Any) -> FakeStream:
        if text == "fail":
            raise ContextLengthError("The conversation is full.", "Use /reset.")
        if text == "break":
            raise BackendError("The engine failed.")
        self.log.append(("stream", text, options))
        words = [f"{word} " for word in f"You said {text}".split()]
        return FakeStream(words, interrupt_after=1 if text == "interrupt" else None, cached=3)

    def reset(self) -> None:
        self.log.append("reset")

    def save(self, path: str) -> None:
        self.log.append(("save", path))

    def load_chat(self, path: str) -> Self:
        self.log.append(("load_chat", path))
        return self

    @property
    def messages(self) -> list[dict[str, str]]:
        talk = (("system", "Be brief."), ("user", "one"), ("assistant", "two"))
        return [{"role": role, "content": text} for role, text in talk]

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModel]:
    model = FakeModel()
    monkeypatch.setattr(edgeinfer, "load", model.load, raising=False)
    monkeypatch.setattr("edgeinfer.hub.resolve", lambda model, **_: Path(model))
    with handling(signal.SIGINT):
        yield model


def typing(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """The input of a person who ends with Ctrl-D."""
    waiting = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(waiting)
        if isinstance(line, str):
            return line
        raise line

    return read


def talk(model: FakeModel, *lines: str | type[BaseException], interactive: bool = True) -> str:
    out = io.StringIO()
    chat = TerminalChat(
        cast(SwitchedModel, model), options={"seed": 1}, read=typing(*lines), out=out, interactive=interactive
    )
    chat.run()
    return out.getvalue()


def test_a_message_is_answered(model: FakeModel) -> None:
    said = talk(model, "hello", "", "  ")
    assert "You said hello \n" in said
    assert model.log == [("chat", None), ("stream", "hello", {"seed": 1})]


def test_commands(model: FakeModel) -> None:
    said = talk(
        model,
        *("/help", "/stats", "hi", "/stats", "/reset", "/system Be brief.", "/system", "/save a b", "/load c d"),
        "/quit",
    )
    assert "/reset, /clear      forget" in said
    assert "[context full; /reset starts over; -c for more]" in said
    assert "There is no reply yet." in said
    assert "prompt 5 tokens (3 cached), reply 3 tokens" in said
    assert "250.0 tokens per second" in said
    assert "Saved to a b." in said
    assert "Loaded c d; 3 messages so far." in said
    assert model.log[2:] == ["reset", ("chat", "Be brief."), ("chat", None), ("save", "a b"), ("load_chat", "c d")]


def test_another_model_takes_over_the_conversation(model: FakeModel) -> None:
    said = talk(model, "/model other", "hi", "/model missing", "ho")
    assert said.startswith("Talking to Toy. ") and "error: There is no such model." in said
    again = ("chat", None, model.messages)
    assert model.log[1:4] == [("switch", "other"), again, ("stream", "hi", {"seed": 1})]
    assert model.log[4:] == [("switch", "missing"), again, ("stream", "ho", {"seed": 1})]


def test_pasted_lines_are_one_message(model: FakeModel) -> None:
    talk(model, "/show\n  of two lines")
    assert model.log[1:] == [("stream", "/show\n  of two lines", {"seed": 1})]


@each_row("line", ["/nope", "/save", "/load", "fail"])
def test_a_mistake_ends_the_chat_of_a_script_and_not_of_a_person(model: FakeModel, line: str) -> None:
    assert "error: " in (said := talk(model, line, "hello"))
    assert "You said hello" in said
    with pytest.raises(UserError):
        talk(model, line, "hello", interactive=False)


def test_a_fault_of_the_engine_ends_the_chat(model: FakeModel) -> None:
    with pytest.raises(BackendError):
        talk(model, "break", "hello")


def test_ctrl_c_stops_the_reply_and_the_chat_goes_on(model: FakeModel) -> None:
    said = talk(model, "interrupt", KeyboardInterrupt, "hello")
    assert "You \n[stopped]\n" in said
    assert "You said interrupt" not in said
    assert "Ctrl-D or /bye leaves." in said
    assert "You said hello" in said


def test_options_of_replies_are_set_while_talking(model: FakeModel) -> None:
    said = talk(
        model,
        *(
            "/set",
            "/set temperature 0.3",
            "/set top-p 0.5",
            '/set stop ["a", "b"]',
            "hi",
            "/set temperature",
            "/set seed",
        ),
        *("/set tempreture 1", "/set temperature hot", "/set system Be kind.", "/regn", "ho", "/bye", "never"),
    )
    assert "Set: seed 1." in said and "Set: seed 1, temperature 0.3, top_p 0.5, stop ['a', 'b']." in said
    assert "Replies have no option tempreture. Did you mean temperature?" in said
    assert "temperature='hot' is out of range." in said
    assert "There is no command /regn. Did you mean /regen?" in said
    options = {"seed": 1, "temperature": 0.3, "top_p": 0.5, "stop": ["a", "b"]}
    assert model.log[1:] == [
        ("stream", "hi", options),
        ("chat", "Be kind."),
        ("stream", "ho", {"top_p": 0.5, "stop": ["a", "b"]}),
    ]


def test_messages_of_several_lines_and_other_replies(model: FakeModel) -> None:
    talk(model, '"""/reset', "  is", 'no command"""', "/regen", '"""open')
    assert model.log[1:] == [
        ("stream", "/reset\n  is\nno command", {"seed": 1}),
        ("chat", None, [{"role": "system", "content": "Be brief."}]),
        ("stream", "one", {"seed": 1}),
        ("stream", "open", {"seed": 1}),
    ]


def test_ctrl_c_ends_the_chat_of_a_script(model: FakeModel) -> None:
    with pytest.raises(KeyboardInterrupt):
        talk(model, "interrupt", "hello", interactive=False)
    with pytest.raises(KeyboardInterrupt):
        talk(model, KeyboardInterrupt, interactive=False)


def test_piped_lines(model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nyou\n"))
    line = "chat -m toy --system Hi --memory 1GB --temperature 0.5 --terminal"
    assert main(line.split()) == 0
    assert capsys.readouterr().out == "You said hello \nYou said you \n"
    assert model.log == [
        ("load", "toy", {"memory": 1_000_000_000}),
        ("chat", "Hi"),
        ("stream", "hello", {"temperature": 0.5, "top_p": 0.9}),
        ("stream", "you", {"temperature": 0.5, "top_p": 0.9}),
        "close",
    ]


def test_piped_bytes_that_are_not_utf8(
    model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for encoding, errors in (("utf-8", "strict"), ("utf-8", "surrogateescape"), ("ascii", "surrogateescape")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding, errors=errors))
        assert main(["chat", "--terminal"]) == 2
        assert capsys.readouterr().err.startswith("error: The input is not UTF-8 text (byte 3).")
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat", "--terminal"]) == 2
    assert capsys.readouterr().err.startswith("error: stdin is closed.")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_piped_lines_are_text_whatever_the_locale(
    encoding: str, model: FakeModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    piped = io.BytesIO("café\r\n5 € 日本\n".encode(encoding))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, "ascii", errors="surrogateescape"))
    assert main(["chat", "--terminal"]) == 0
    assert capsys.readouterr().out == "You said café \nYou said 5 € 日本 \n"


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
    """Read the terminal until a text appears."""
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
