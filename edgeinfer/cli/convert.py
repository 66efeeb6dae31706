"""`edgeinfer convert`: a bundle becomes one that stores the other layout of weights; knows nothing of the layouts."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer import hub
from edgeinfer.bundle import LAYOUTS, open_bundle
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.cli.options import add_command, add_json_option
from edgeinfer.cli.output import print_json, print_note, progress_bar
from edgeinfer.config import format_size

if TYPE_CHECKING:
    from edgeinfer.cli.options import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Store a bundle's weights as our own kernel reads them (native) or as onnxruntime's operators do (portable).
Nothing is lost either way. Every bundle runs wherever edgeinfer does; one whose layout the device does not run is
converted when it is loaded, and this does so beforehand.

example:
  edgeinfer convert my-bundle my-portable-bundle --to portable
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "convert", execute, "lay out a bundle's weights for another kernel", _DESCRIPTION)
    parser.add_argument("bundle", metavar="BUNDLE", help="bundle directory or hub id ORG/NAME")
    parser.add_argument("out", metavar="OUT", type=Path, help="bundle directory to make")
    parser.add_argument("--to", choices=LAYOUTS, required=True, help="layout to store")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a bundle")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    bundle = open_bundle(hub.resolve(args.bundle))
    start = time.perf_counter()
    with progress_bar(enabled=not args.json) as progress:
        convert_bundle(bundle, args.to, args.out, progress, replace_existing=args.force)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    if args.json:
        print_json({"bundle": str(args.out), "layout": args.to, "bytes": size, "seconds": round(seconds, 3)})
    else:
        print_note(f"{format_size(size)} in {seconds:.1f} s. Run it: edgeinfer run -m {args.out} -p TEXT")
    return 0
