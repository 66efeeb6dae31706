"""How the help of a command is laid out: one usage line, then its options under their headings, the rare ones apart."""

from __future__ import annotations

import argparse
import copy
import shutil
import textwrap
from collections.abc import Mapping, Set

_NARROWEST, _WIDEST = 60, 110  # columns: longer lines are hard to read
_INDENT = 28


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Names the value of an option once: `-n, --max-tokens N`."""

    def __init__(self, prog: str) -> None:
        width = min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)
        super().__init__(prog, max_help_position=_INDENT, width=width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fills paragraphs to the width; examples, which are indented, stay as they are."""
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
    """One line: the command, its arguments and what it cannot do without."""
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
    """The help of a command.

    Args:
        left_out: options that it does not show.
    """
    layout = _Layout(parser.prog)
    layout.add_text(parser.description)
    # What argparse collects without a heading of its own comes last.
    for group in sorted(parser._action_groups, key=lambda group: group is parser._optionals):
        actions = [action for action in group._group_actions if action not in left_out]
        if any(action.help is not argparse.SUPPRESS for action in actions):
            layout.start_section(group.title)
            layout.add_arguments(
                _with_help(action, briefs[action]) if action in briefs else action for action in actions
            )
            layout.end_section()
    layout.add_text(parser.epilog)
    return usage(parser) + "\n" + layout.format_help()


def _with_help(action: argparse.Action, text: str) -> argparse.Action:
    shown = copy.copy(action)
    shown.help = text
    return shown
