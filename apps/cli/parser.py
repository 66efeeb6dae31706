"""Parsers of all commands: two levels of help, one-line errors with suggestions, missing extras, completion."""

from __future__ import annotations

import argparse
import copy
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any, NoReturn

from edgeinfer.core.errors import Setting, UsageError, shown
from edgeinfer.core.options import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Subparsers = argparse._SubParsersAction["Parser"]


_NARROWEST, _WIDEST = 60, 110  # columns: longer lines are hard to read
_INDENT = 28


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Help that shows the value of an option once: `-n, --max-tokens N`."""

    def __init__(self, prog: str) -> None:
        width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
        super().__init__(prog, max_help_position=_INDENT, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap paragraphs; indented examples stay as they are."""
        lines: list[str] = []
        prose: list[str] = []
        for line in [*text.splitlines(), ""]:
            if line and not line.startswith(" "):
                prose.append(line)
                continue
            lines += [*textwrap.wrap(" ".join(prose), width), line]
            prose = []
        return "\n".join(lines[:-1])

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def usage(parser: argparse.ArgumentParser) -> str:
    """One line: the command, its arguments and required options."""
    words = [f"usage: {parser.prog}", "[options]"]
    for action in parser._actions:
        if not action.option_strings:
            words.append(_placeholder(action))
        elif action.required:
            words.append(f"{action.option_strings[-1]} {action.metavar or action.dest.upper()}")
    return " ".join(words) + "\n"


def _placeholder(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    if action.choices is not None and action.metavar is None:
        name = "|".join(map(str, action.choices))
    if action.nargs == argparse.PARSER:
        return f"{name} ..."
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def help_text(
    parser: argparse.ArgumentParser, left_out: Set[argparse.Action], briefs: Mapping[argparse.Action, str]
) -> str:
    """Format the help of a command without the actions in `left_out`."""
    layout = _Layout(parser.prog)
    layout.add_text(parser.description)
    # Options without a heading come last.
    for group in sorted(parser._action_groups, key=lambda group: group is parser._optionals):
        actions = [action for action in group._group_actions if action not in left_out]
        if any(action.help is not argparse.SUPPRESS for action in actions):
            layout.start_section(group.title)
            for action in actions:
                shown = copy.copy(action)
                shown.help = briefs.get(action, action.help)
                layout.add_argument(shown)
            layout.end_section()
    layout.add_text(parser.epilog)
    return usage(parser) + "\n" + layout.format_help()


# The extra that provides a module.
_EXTRAS = {
    "safetensors": "train",
    "starlette": "server",
    "uvicorn": "server",
    "llguidance": "structured",
    "markdown_it": "desktop",
    "gguf": "gguf",
    "llama_cpp": "gguf",
    "optimum": "optimum",
    "torch": "optimum",
    "transformers": "optimum",
    "argcomplete": "completion",
    "mcp": "mcp",
}


class _ShowHelp(argparse.Action):
    """Prints the short or full help and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, everything: bool, help: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self._everything = everything

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser), "only parsers of this class have this option"
        sys.stdout.write(parser.format_help_all() if self._everything else parser.format_help())
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of exiting; only --help-all shows options marked `advanced`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        settings = {"add_help": False, "allow_abbrev": False, "exit_on_error": False} | settings
        super().__init__(*args, **settings)
        self._given: list[str] = []
        self._briefs: dict[argparse.Action, str] = {}
        self.register("type", int, _number(int, "a whole number"))
        self.register("type", float, _number(float, "a number"))
        self.add_argument("-h", "--help", action=_ShowHelp, everything=False, help="show this help")
        self._help_all = self.add_argument("--help-all", action=_ShowHelp, everything=True, help="show every option")
        self._rare: set[argparse.Action] = {self._help_all}

    def advanced(self, *options: argparse.Action | str) -> None:
        """Leave options out of the short help."""
        self._rare.update(self._option_string_actions[each] if isinstance(each, str) else each for each in options)

    def brief(self, option: argparse.Action, text: str) -> None:
        """Set a shorter text for the short help."""
        self._briefs[option] = text

    def format_usage(self) -> str:
        return usage(self)

    def format_help(self) -> str:
        text = help_text(self, self._rare, self._briefs)
        shorter = any(action.help is not argparse.SUPPRESS for action in self._rare - {self._help_all})
        return f"{text}\nAll options: {self.prog} --help-all\n" if shorter else text

    def format_help_all(self) -> str:
        return help_text(self, frozenset(), {})

    def parse_known_args(  # type: ignore[override]  # argparse has overloads for what nothing here passes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments; unknown ones are errors."""
        self._given = list(sys.argv[1:] if args is None else args)
        try:
            found, unknown = super().parse_known_args(self._given, namespace)
        except argparse.ArgumentError as error:
            raise self._wrong(error) from error
        if unknown:
            raise self._unknown(unknown)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Refuse a line that lacks something required."""
        misspelt = [text for text in self._given if text.startswith("--") and not self._knows(text)]
        raise self._unknown(misspelt) if misspelt else UsageError(_sentence(message), f"See: {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # Overridden for the message only.
        if action.choices is None or value in action.choices:
            return
        name = action.option_strings[-1] if action.option_strings else str(action.metavar or action.dest)
        known = [str(choice) for choice in action.choices]
        meant = nearest(str(value), known)
        hint = f"Did you mean {meant}?" if meant else f"Choose one of {', '.join(known)}."
        raise UsageError(f"{name} cannot be {str(value)!r}.", hint)

    def _knows(self, text: str) -> bool:
        return text == "--" or text.partition("=")[0] in self._option_string_actions

    def _unknown(self, given: Sequence[str]) -> UsageError:
        word = given[0]
        if not word.startswith("-") or len(word) == 1:
            return UsageError(f"Unexpected argument {word!r}.", f"See: {self.prog} --help")
        flag = word.partition("=")[0]
        meant = nearest(flag, self._option_string_actions)
        hint = f"Did you mean {self._shown(meant)}?" if meant else f"See: {self.prog} --help-all"
        return UsageError(f"No such option: {flag}.", hint)

    def _shown(self, flag: str) -> str:
        """The visible flag for the option that a flag sets."""
        meant = self._option_string_actions[flag]
        if meant.help is not argparse.SUPPRESS:
            return flag
        others = (each for each in self._actions if each.dest == meant.dest and each.help is not argparse.SUPPRESS)
        return next((each.option_strings[-1] for each in others), flag)

    def _wrong(self, error: argparse.ArgumentError) -> UsageError:
        name = "" if error.argument_name is None else f"{error.argument_name.rpartition('/')[2]}: "
        return UsageError(_sentence(f"{name}{error.message}"), f"See: {self.prog} --help")


def _number(kind: type[int] | type[float], what: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None

    return read


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?")) else f"{text}."


def add_command(
    commands: Subparsers,
    name: str,
    execute: Callable[[argparse.Namespace], int],
    description: str,
    *,
    help: str | None = None,
) -> Parser:
    """Add a subcommand; its description ends in an example and is shown as written."""
    parser = commands.add_parser(name, help=help, description=description)
    parser.set_defaults(execute=execute)
    parser.advanced(parser.add_argument("--debug", action="store_true", help="show the traceback of an error"))
    return parser


def own_flag(parser: argparse.ArgumentParser, words: Sequence[str], setting: Setting) -> str | None:
    """The flag and value of a command's option as typed; None if it has no such option."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = next((word for word in words if word in action.choices), None)
            if chosen is not None:
                return own_flag(action.choices[chosen], words[words.index(chosen) + 1 :], setting)
        elif action.dest == setting.name and action.option_strings:
            flag = action.option_strings[-1]
            return flag if setting.value is ... else f"{flag} {shown(setting.value)}"
    return None


def add_json_option(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else")


def add_hide_option(parser: Parser) -> None:
    text = "do not show what the model thinks before it answers; piped output never has it"
    parser.add_argument("--hide-thinking", action="store_true", help=text)


def command_line() -> str:
    """The running command as a shell takes it, for reproducing figures."""
    return shlex.join(["edgeinfer", *sys.argv[1:]])


def missing_extra(error: ModuleNotFoundError) -> Exception:
    """The error for a missing module: a hint if an extra provides it, else the error itself, which is a bug."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return error
    return UsageError(f"This needs {error.name}, which is not installed.", f"pip install 'edgeinfer[{extra}]'")


_COMPLETION_DESCRIPTION = """\
Print the script that makes a shell complete edgeinfer's commands, options and models.
Needs the extra: pip install 'edgeinfer[completion]'.

examples:
  eval "$(edgeinfer completion bash)"                                       in ~/.bashrc
  eval "$(edgeinfer completion zsh)"                                        in ~/.zshrc, after compinit
  edgeinfer completion fish > ~/.config/fish/completions/edgeinfer.fish     once
"""
_SHELLS = ("bash", "zsh", "fish", "powershell")
# Arguments that name a model.
_MODELS = ("model", "draft_model", "reference")


def add_completion(commands: Subparsers) -> None:
    parser = add_command(commands, "completion", _completion, _COMPLETION_DESCRIPTION)
    parser.add_argument("shell", choices=_SHELLS, help="the shell that the script is for")


def _completion(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["edgeinfer"], shell=args.shell))
    return 0


def complete(build_parser: Callable[..., Parser]) -> None:
    """Answer a shell's request for completions and end the process. argcomplete reads the line from the environment and
    writes to a file descriptor that the shell opened."""
    import argcomplete

    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", sys.maxsize))]
    words = line.split()
    # The word that is being typed does not count.
    command = words[1] if len(words) > 2 or (len(words) == 2 and line[-1:].isspace()) else ""
    parser = build_parser(command, all_names=True)
    _name_models(parser)
    argcomplete.autocomplete(parser, always_complete_options="long")


def _name_models(parser: Parser) -> None:
    """Complete model names where an argument is a model."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                _name_models(each)
        elif action.dest in _MODELS:
            action.completer = _models  # type: ignore[attr-defined]  # argcomplete's own attribute


def _models(prefix: str, **_: Any) -> list[str]:
    """Local models, those of the catalog, and paths."""
    import argcomplete

    from edgeinfer import hub  # not the package's face, which would import the runtime

    names = [hub.BUILTIN, *(model.source.name for model in hub.converted_models())]
    names += [*(model.name for model in hub.cached_models()), *(model.name for model in hub.catalog())]
    return [*dict.fromkeys(names), *argcomplete.completers.FilesCompleter()(prefix)]
