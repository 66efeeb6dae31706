"""The chat in the terminal: reads messages, streams replies, obeys /commands."""

from __future__ import annotations

import contextlib
import json
import re
import select
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TextIO

from rich.cells import cell_len

from edgeinfer.apps.terminal.endings import EndingHints, ShownReply, cancel_on_interrupt, ending
from edgeinfer.core.errors import PromptError, Setting, UsageError, UserError
from edgeinfer.core.options import format_size, nearest, options_of
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.user_files import decode_text, marked_encoding

if TYPE_CHECKING:
    from edgeinfer import Chat, Model, Result, TokenStream
    from edgeinfer.apps.mcp.servers import Permission, ServerTool, ToolServers
    from edgeinfer.apps.mcp.turns import ToolCall
    from edgeinfer.openai.replies import Call, Reply


# Words, blanks and line ends.
_PIECES = re.compile(r"\n|[^\S\n]+|[^\s]+")


def keyboard() -> Callable[[str], str]:
    """Return a function that reads a line, with editing and history where readline exists. A paste of several lines is
    one message: GNU readline sees to it; elsewhere, lines that wait right behind the first belong to it."""
    try:
        import readline
    except ModuleNotFoundError:  # Windows has none; its console edits lines itself
        return _with_waiting_lines
    if "libedit" in (readline.__doc__ or ""):
        return _with_waiting_lines
    # Python switches it off for its own prompt.
    readline.parse_and_bind("set enable-bracketed-paste on")
    return input


def _with_waiting_lines(prompt: str) -> str:
    lines = [input(prompt)]
    while _is_waiting():
        lines.append(input())
    return "\n".join(lines)


def _is_waiting() -> bool:
    """Whether input is waiting that was pasted, not typed."""
    if sys.platform == "win32":
        import msvcrt

        return bool(msvcrt.kbhit())
    return bool(select.select([sys.stdin], [], [], 0)[0])


class WrappedText:
    """Writes a reply as it comes and breaks lines of `width` cells between words."""

    def __init__(self, out: TextIO, width: int) -> None:
        self._out = out
        self._width = width
        self._column = 0
        self._blank = self._word = ""

    def write(self, text: str) -> None:
        """Write all but the last word, which may continue."""
        for piece in _PIECES.findall(text):
            if piece == "\n":
                self._end_word()
                self._put(f"{self._blank}\n")
                self._column, self._blank = 0, ""
            elif piece.isspace():
                self._end_word()
                self._blank += piece
            else:
                self._word += piece
        self._out.flush()

    def finish(self) -> None:
        """Write the rest and end the line."""
        self._end_word()
        if self._column or self._blank:
            self._put(f"{self._blank}\n")
        self._out.flush()

    def _end_word(self) -> None:
        if not self._word:
            return
        size = cell_len(self._blank.expandtabs()) + cell_len(self._word)
        if self._column + size > self._width:
            self._put("\n" if self._column else "")
            self._column, self._blank = 0, ""
            size = cell_len(self._word)
        self._put(self._blank + self._word)
        end = self._column + size
        self._column = end if end <= self._width else end % self._width or self._width
        self._blank = self._word = ""

    def _put(self, text: str) -> None:
        self._out.write(text)


_QUOTES = '"""'
_FIRST, _MORE = "> ", "... "
# What a person answers when a call is to be remembered.
_CHOICES: Mapping[str, Permission] = {"a": "always", "always": "always", "never": "never"}
_HINTS = EndingHints("/set max_tokens N for more", "/reset starts over; -c for more", "ask in other words")


@dataclass(frozen=True)
class Command:
    """A command of the chat."""

    names: tuple[str, ...]  # the first is the one that help shows
    argument: str  # placeholder in help; empty without one
    help: str
    run: Callable[[str], None]


class SwitchedModel(Protocol):
    """A loaded model that can be replaced."""

    @property
    def model(self) -> Model:
        """The one that is loaded."""

    def switch(self, name: str) -> None:
        """Load another model; if that fails, load the former one again and raise the error."""


class TerminalChat:
    """A conversation between a person, or a script, and a model, which stays open. `read` shows a prompt and returns
    the next line, or raises EOFError; without it, stdin is read. Prompts are shown only to a person (`interactive`),
    whose mistakes do not end the chat; `say` words options in errors; `thoughts` shows the model's. The model may call
    the tools of `servers`, each call if the person allows it."""

    def __init__(
        self,
        models: SwitchedModel,
        *,
        servers: ToolServers | None = None,
        system: str | None = None,
        options: Mapping[str, Any] | None = None,
        read: Callable[[str], str] | None = None,
        out: TextIO | None = None,
        interactive: bool | None = None,
        say: Callable[[Setting], str] = str,
        thoughts: bool = True,
    ) -> None:
        self._models = models
        self._servers = servers
        self._failed: set[str] = set()  # what was said of servers
        self._chat: Chat = models.model.chat(system=system)
        self._options = dict(options or {})
        self._out = out or sys.stdout
        if sys.stdin is None and read is None:
            raise PromptError("stdin is closed.", "Pipe the messages into it, or start it in a terminal.")
        self._interactive = sys.stdin.isatty() if interactive is None else interactive
        lines = _lines(sys.stdin)
        self._read = read or (keyboard() if self._interactive else lambda _: next(lines))
        self._say_setting, self._thoughts = say, thoughts
        self._last: Result | None = None
        self._interrupted = False  # whether Ctrl-C stopped it
        self._leaving = False
        self._commands = (
            Command(("/?", "/help"), "", "this list", self._show_help),
            Command(
                ("/bye", "/exit", "/quit"),
                "",
                "leave (so does Ctrl-D); Ctrl-C stops a thought, then the reply",
                self._leave,
            ),
            Command(("/reset", "/clear"), "", "forget the conversation, keep the system message", self._reset),
            Command(("/regen",), "", "another reply to the last message", self._regenerate),
            Command(("/set",), "NAME VALUE", "an option of replies, such as temperature 0.3; alone: list", self._set),
            Command(("/system",), "TEXT", "start over with this system message; alone: with none", self._set_system),
            Command(("/model",), "NAME", "go on with another model; alone: which one this is", self._set_model),
            Command(
                ("/tools",),
                "NAME WHEN",
                "allow a tool always, never, or when you are asked; alone: list",
                self._set_tool,
            ),
            Command(("/show",), "", "the model, its context and the system message", self._show),
            Command(("/stats",), "", "tokens, speed and memory of the last reply", self._stats),
            Command(("/save",), "FILE", "write the conversation; to NAME.session with the model's cache", self._save),
            Command(("/load",), "FILE", "go on with a conversation that was saved", self._load),
        )

    @property
    def _model(self) -> Model:
        return self._models.model

    def run(self) -> None:
        """Talk until the input ends or the user leaves."""
        if self._interactive:
            name = self._model.info.name
            self._say(f"Talking to {name}. Type a message; /? lists commands, Ctrl-D leaves.")
        while not self._leaving:
            try:
                text, is_command = self._next()
            except (EOFError, StopIteration):
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                self._say("\nCtrl-D or /bye leaves.")
                continue
            if text:
                self._answer(text, self._command if is_command else self._reply)
        if self._interactive:
            self._say("")

    def _next(self) -> tuple[str, bool]:
        """Return the next message, pasted or between triple quotes if it has several lines, and whether it is a
        command."""
        line = self._read(_FIRST).strip()
        if not line.startswith(_QUOTES):
            return line, line.startswith("/") and "\n" not in line
        lines = [line.removeprefix(_QUOTES)]
        while not lines[-1].rstrip().endswith(_QUOTES):
            try:
                lines.append(self._read(_MORE))
            except (EOFError, StopIteration):
                break
        return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip(), False

    def _answer(self, text: str, how: Callable[[str], None]) -> None:
        try:
            how(text)
        except UserError as error:
            if not self._interactive:
                raise
            self._say(f"error: {error.text(self._say_setting)}")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        found = next((command for command in self._commands if name in command.names), None)
        if found is None:
            meant = nearest(name, [each for command in self._commands for each in command.names])
            raise UsageError(f"There is no command {name}.", f"Did you mean {meant}?" if meant else "/? lists them.")
        found.run(argument.strip())

    def _reply(self, text: str) -> None:
        if tools := self._tools():
            self._reply_with(tools, text)
        else:
            self._show_reply(self._chat.stream(text, **self._options))
            self._end_reply()

    def _show_reply(self, stream: TokenStream, reply: Reply | None = None) -> None:
        """Show a reply as it comes; without its calls, where `reply` reads them."""
        from edgeinfer.apps.mcp.turns import text_of

        columns = shutil.get_terminal_size().columns if self._interactive and self._out.isatty() else sys.maxsize
        shown = WrappedText(self._out, columns)
        with stream:
            writer = ShownReply(self._out, shown.write, thoughts=self._thoughts)
            with cancel_on_interrupt(stream, answers=self._interactive) as interrupt:
                for chunk in stream:
                    writer.add(chunk.reasoning, chunk.text if reply is None else text_of(reply.push(chunk)))
            writer.end_thought()
            self._last = stream.result
        shown.write("" if reply is None else text_of(reply.finish(self._last)))
        shown.finish()
        self._interrupted = interrupt.pressed

    def _end_reply(self) -> None:
        assert self._last is not None, "it was just shown"
        if note := ending(self._last, self._options.get("max_tokens"), _HINTS):
            self._note(note)
        if self._interrupted and not self._interactive:
            raise KeyboardInterrupt

    def _note(self, text: str) -> None:
        """Say something about a reply, apart from it where a program reads it."""
        if self._interactive:
            self._say(text)
        else:
            sys.stderr.write(f"{text}\n")

    def _tools(self) -> dict[str, ServerTool]:
        """The tools to offer, once their servers have started; says which have failed."""
        if self._servers is None:
            return {}
        if self._servers.starting:
            self._note("[starting MCP servers]")
            self._servers.wait()
        for state in self._servers.states:
            said = f"[the MCP server {state.name} cannot be used: {state.message}]"
            if state.status == "failed" and said not in self._failed:
                self._failed.add(said)
                self._note(said)
        return self._servers.tools

    def _reply_with(self, tools: Mapping[str, ServerTool], text: str) -> None:
        """Answer a message, and call the tools that the model asks for."""
        from edgeinfer.apps.mcp.turns import MOST_ROUNDS, tool_prompt, turn_messages
        from edgeinfer.openai.replies import Reply

        turn: list[dict[str, Any]] = [{"role": "user", "content": text}]
        try:
            for _ in range(MOST_ROUNDS):
                prompt = tool_prompt(self._model, [*self._chat.messages, *turn], tools.values(), self._options)
                stream, reader = prompt.start(self._model, 0)
                reply = Reply(reader)
                self._show_reply(stream, reply)
                if self._interrupted or reply.finish_reason != "tool_calls":
                    turn += turn_messages(reply.text, ())
                    self._end_reply()
                    return
                calls = [self._called(tools.get(call.name), call, len(reply.text)) for call in reply.calls]
                turn += turn_messages(reply.text, calls)
            self._note(f"[stopped after {MOST_ROUNDS} rounds of calls]")
        finally:
            if len(turn) > 1:
                self._chat.extend(turn)

    def _called(self, tool: ServerTool | None, call: Call, at: int) -> ToolCall:
        """Show a call, make it if it is allowed, and show what came of it."""
        from edgeinfer.apps.mcp.turns import REFUSED, STOPPED, ToolCall, most_characters, printable

        made = ToolCall.of(call.id, call.name, call.arguments, tool, at=at)
        self._note(f"[{made.server or 'no server'}] {call.name} {printable(call.arguments, 4000)}")
        if tool is not None and self._servers is not None:
            if not self._allowed(tool):
                made = made.ended("refused", REFUSED)
            else:
                future = self._servers.call(tool, call.arguments, most_characters(self._model))
                try:
                    answer = future.result()
                    made = made.ended("failed" if answer.failed else "done", answer.text)
                except KeyboardInterrupt:
                    future.cancel()
                    made = made.ended("failed", STOPPED)
        self._note(f"[{made.status}] {printable(made.result, 400)}")
        return made

    def _allowed(self, tool: ServerTool) -> bool:
        assert self._servers is not None
        permission = self._servers.permission(tool)
        if permission == "ask" and self._interactive:
            question = f"Allow {tool.name}? y = once, a = always, n = no, never = never: "
            try:
                said = self._read(question).strip().lower()
            except (EOFError, KeyboardInterrupt, StopIteration):
                said = "n"
            if (chosen := _CHOICES.get(said)) is not None:
                self._servers.allow(tool, chosen)
            return said in ("y", "yes", "once") or chosen == "always"
        return permission == "always"

    def _set_tool(self, text: str) -> None:
        if self._servers is None:
            raise UsageError("No MCP servers are configured.", "Name a file of them with --mcp FILE.")
        from edgeinfer.apps.mcp.turns import printable

        name, _, permission = text.partition(" ")
        known = {tool.name: tool for state in self._servers.states for tool in state.tools}
        if name == "reload":
            self._servers.reload()
        elif name:
            given = permission.strip().lower()
            chosen: Permission | None = "ask" if given == "ask" else _CHOICES.get(given)
            if name not in known or chosen is None:
                raise UsageError(f"/tools {text} is no tool and permission.", "For example: /tools read_file always")
            self._servers.allow(known[name], chosen)
        self._servers.wait()
        for state in self._servers.states:
            self._say(f"{state.name}: {state.status}{f', {state.message}' if state.message else ''} ({state.place})")
            for tool in state.tools:
                about = printable(tool.description.partition("\n")[0], 100)
                self._say(f"  {tool.name} [{self._servers.permission(tool)}] {about}")

    def _show_help(self, _: str) -> None:
        rows = [(" ".join((", ".join(each.names), each.argument)).strip(), each.help) for each in self._commands]
        rows.append((_QUOTES, "begins and ends a message of several lines"))
        width = max(len(name) for name, _ in rows) + 2
        self._say("\n".join(f"{name:<{width}}{text}" for name, text in rows))

    def _leave(self, _: str) -> None:
        self._leaving = True

    def _reset(self, _: str) -> None:
        self._chat.reset()
        self._say("The conversation starts over.")

    def _regenerate(self, _: str) -> None:
        before = self._chat.messages
        asked = max((place for place, message in enumerate(before) if message["role"] == "user"), default=-1)
        if asked in (-1, len(before) - 1):
            raise UsageError("There is no reply yet.", "Write a message first.")
        self._chat = self._model.chat(history=before[:asked])
        self._reply(before[asked]["content"])

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if name == "system":
            self._set_system(value.strip())
        elif name:
            self._set_option(name, value.strip())
        else:
            self._show_options()

    def _set_option(self, name: str, value: str) -> None:
        declared = options_of(ReplyOptions)
        if name not in declared:
            meant = nearest(name, declared)
            hint = f"Did you mean {meant}?" if meant else "Such as: /set temperature 0.7"
            raise UsageError(f"Replies have no option {name}.", hint)
        options = {each: given for each, given in self._options.items() if each != name}
        if value:
            options[name] = value if declared[name].type is str else _parsed(value)
        self._model.check(**options)
        self._options = options
        self._show_options()

    def _show_options(self) -> None:
        given = ", ".join(f"{name} {value}" for name, value in self._options.items())
        self._say(f"Set: {given}." if given else "Nothing is set: replies go by the defaults.")

    def _show(self, _: str) -> None:
        info = self._model.info
        self._say(f"{info.name}, {info.parameters / 1e6:,.0f}M parameters of {info.bits_per_weight:g} bits")
        self._say(f"context {self._model.context} tokens, planned {format_size(self._model.plan.planned_bytes)}")
        self._say(f"system message: {self._chat.system}" if self._chat.system else "no system message")
        self._show_options()

    def _set_system(self, text: str) -> None:
        self._chat = self._model.chat(system=text or None)
        self._say("The conversation starts over with the new system message.")

    def _set_model(self, name: str) -> None:
        if not name:
            self._show("")
            return
        messages = self._chat.messages
        try:
            self._models.switch(name)
        finally:
            self._chat = self._model.chat(history=messages)
        self._say(f"Talking to {self._model.info.name}.")

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


def _parsed(value: str) -> Any:
    """A JSON value, or the text itself."""
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(value)
    return value


def _lines(source: TextIO) -> Iterator[str]:
    file: BinaryIO | None = getattr(source, "buffer", None)
    # Decoded here, as Python expects ASCII in the C locale. A stand-in for stdin may have text only.
    if file is None:
        yield from (line.removesuffix("\n") for line in source)
        return
    for line in file:
        whole = marked_encoding(line) not in (None, "utf-8-sig")
        text = decode_text(line + file.read() if whole else line, "The input").removesuffix("\n")
        yield from (each.removesuffix("\r") for each in text.split("\n"))
