"""`edgeinfer bench report`: results of benchmarks as one page; knows nothing of what is on it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.bench_files import write_text
from edgeinfer.apps.cli.parser import add_command

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers

__all__ = ["add_report_parser"]

_DESCRIPTION = """\
Make one HTML page, with tables, charts and the commands that give the figures again, of JSON files that benchmarks
wrote. The page needs no other file and no network.

example:
  edgeinfer bench report speed.json memory.json quality.json peers.json --out report.html
"""


def add_report_parser(kinds: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(kinds, "report", _execute, "results as one HTML page", _DESCRIPTION)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON of benchmarks or of edgeinfer tune")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the page")
    parser.add_argument("--title", default="edgeinfer, measured", metavar="TEXT", help="of the page")


def _execute(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.pages.sections import report_html

    lead = "Medians of visits in turns, in one process unless said otherwise."
    page = report_html(args.files, args.title, lead)
    write_text(args.out, page)
    return 0
