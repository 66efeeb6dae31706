"""The terminal chat: reads lines, streams replies, obeys /commands; Ctrl-C cancels the reply that is running."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from edgeinfer.config import format_size
from edgeinfer.errors import PromptError, UsageError, UserError

if TYPE_CHECKING:
    from edgeinfer import Chat, Model, Result

__all__ = ["Cancellable", "Interrupt", "TerminalChat", "cancel_on_interrupt"]


class Cancellable(Protocol):
    """Something that can be asked to stop."""

    def cancel(self) -> None:
        """Asks for the stop and returns at once."""


class Interrupt:
    """Whether Ctrl-C was pressed."""

    pressed = False


@contextlib.contextmanager
def cancel_on_interrupt(stream: Cancellable) -> Iterator[Interrupt]:
    """While open, the first Ctrl-C cancels `stream`, which then ends in good order; the second raises as usual.

    Only the main thread receives signals; in any other this does nothing.
    """
    state = Interrupt()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if state.pressed:
            raise KeyboardInterrupt
        state.pressed = True
        stream.cancel()

    if threading.current_thread() is not threading.main_thread():
        yield state
        return
    previous = signal.signal(signal.SIGINT, on_signal)
    try:
        yield state
    finally:
        signal.signal(signal.SIGINT, previous)


_HELP = """\
/help           this list
/reset          forget the conversation, keep the system message
/system TEXT    start over with another system message; without TEXT, with none
/save PATH      write the conversation; to a name that ends in .session with the model's memory of it
/load PATH      go on with a conversation that was saved
/stats          tokens, speed and memory of the last reply
/quit           leave (so does Ctrl-D); Ctrl-C stops a reply
"""


class TerminalChat:
    """One conversation between a person, or a script, and a model.

    Args:
        model: the loaded model; stays open.
        system: system message, or None.
        options: generation options of every reply, by their names in GenerationConfig.
        read: gives the next line without its end, and raises EOFError after the last; None reads stdin.
        out: where replies go.
        interactive: whether a person types: prompts are shown, and a mistake does not end the chat.
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        read: Callable[[], str] | None = None,
        out: TextIO | None = None,
        interactive: bool | None = None,
    ) -> None:
        self._model = model
        self._chat: Chat = model.chat(system=system)
        self._options = dict(options or {})
        self._out = out or sys.stdout
        self._interactive = sys.stdin.isatty() if interactive is None else interactive
        self._read = read or (_keyboard() if self._interactive else _lines(sys.stdin).__next__)
        self._last: Result | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._show_help,
            "/load": self._load,
            "/reset": self._reset,
            "/save": self._save,
            "/stats": self._stats,
            "/system": self._set_system,
        }

    def run(self) -> None:
        """Talks until the input ends or /quit.

        Raises:
            UserError: a mistake in input that does not come from a person.
            KeyboardInterrupt: Ctrl-C while reading input that does not come from a person.
        """
        if self._interactive:
            self._say("Type a message; /help lists commands, Ctrl-D leaves.")
        while True:
            try:
                line = self._read().strip()
            except (EOFError, StopIteration):
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._say("\nCtrl-D or /quit leaves.")
                continue
            if line == "/quit":
                return
            if line:
                self._answer(line)
        if self._interactive:
            self._say("")

    def _answer(self, line: str) -> None:
        try:
            if line.startswith("/"):
                self._command(line)
            else:
                self._reply(line)
        except UserError as error:
            if not self._interactive:
                raise
            self._say(f"error: {error}")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if name not in self._commands:
            raise UsageError(f"There is no command {name}.", "/help lists them.")
        self._commands[name](argument.strip())

    def _reply(self, text: str) -> None:
        written = ""
        with self._chat.stream(text, **self._options) as stream:
            with cancel_on_interrupt(stream) as interrupt:
                for chunk in stream:
                    self._out.write(chunk.text)
                    self._out.flush()
                    written = chunk.text or written
            self._last = stream.result
        if not written.endswith("\n"):
            self._say("")
        if interrupt.pressed and not self._interactive:
            raise KeyboardInterrupt

    def _show_help(self, _: str) -> None:
        self._say(_HELP.rstrip())

    def _reset(self, _: str) -> None:
        self._chat.reset()
        self._say("The conversation starts over.")

    def _set_system(self, text: str) -> None:
        self._chat = self._model.chat(system=text or None)
        self._say("The conversation starts over with the new system message.")

    def _load(self, path: str) -> None:
        if not path:
            raise UsageError("/load needs a path.", "For example: /load talk.session")
        self._chat = self._model.load_chat(path)
        self._say(f"Loaded {path}; {len(self._chat.messages)} messages so far.")

    def _save(self, path: str) -> None:
        if not path:
            raise UsageError("/save needs a path.", "For example: /save talk.session")
        self._chat.save(path)
        self._say(f"Saved to {path}.")

    def _stats(self, _: str) -> None:
        if self._last is None:
            self._say("There is no reply yet.")
            return
        usage, timings, memory = self._last.usage, self._last.timings, self._last.memory
        self._say(
            f"prompt {usage.prompt_tokens} tokens ({timings.cached_prompt_tokens} cached), "
            f"reply {usage.completion_tokens} tokens\n"
            f"first token {timings.ttft_ms:.0f} ms, then {timings.tokens_per_second:.1f} tokens per second\n"
            f"peak memory {format_size(memory.peak_rss_bytes)}, planned {format_size(memory.planned_bytes)}"
        )

    def _say(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def _keyboard() -> Callable[[], str]:
    """Reads from a person, with line editing and history where the platform has readline."""
    with contextlib.suppress(ModuleNotFoundError):  # Windows has none; its console edits lines itself
        import readline  # noqa: F401  # importing it is what gives input() its history
    return lambda: input("> ")


def _lines(source: TextIO) -> Iterator[str]:
    try:
        for line in source:
            line.encode("utf-8")
            yield line
    except UnicodeError as error:
        raise PromptError("The input is not UTF-8 text.", "Convert it, for example with iconv -t UTF-8.") from error
