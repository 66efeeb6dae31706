"""`edgeinfer methods`: lists drafters, verification rules, searches and ways to compute less."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.output import print_json, print_table
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.core.methods import KINDS, DeclaredMethod, product_methods, research_methods

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = """\
List the methods that --speculation, --verification, --search and --compute choose by name. Research methods have no
measured gain, or belong to another package; they run only when named.

example:
  edgeinfer methods
"""


def add_methods(commands: Subparsers) -> None:
    add_json_option(add_command(commands, "methods", execute, _DESCRIPTION))


def execute(args: argparse.Namespace) -> int:
    if args.json:
        print_json({kind: [_facts(method, research) for method, research in _all(kind)] for kind in KINDS})
        return 0
    for kind, declared in KINDS.items():
        rows = [(method.name, "research" if research else "", method.help) for method, research in _all(kind)]
        print_table(rows, title=f"--{declared.option}")
    return 0


def _all(kind: str) -> list[tuple[DeclaredMethod, bool]]:
    """Each method with whether it is research."""
    found = [(method, False) for method in product_methods(kind).values()]
    return found + [(method, True) for method in research_methods(kind).values()]


def _facts(method: DeclaredMethod, research: bool) -> dict[str, Any]:
    return {"name": method.name, "help": method.help, "research": research}
