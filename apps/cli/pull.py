"""`edgeinfer pull`: fetches a model, and converts a checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer import hub
from edgeinfer.apps.cli.fetching import show_notes, type_question
from edgeinfer.apps.cli.output import Progress, print_json, print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.config import CONVERTED_BITS
from edgeinfer.hub.resolving import name_of
from edgeinfer.wording import one_of

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = """\
Fetch a model, or bring it up to date: one of the catalog, or any of the Hugging Face hub that edgeinfer runs. A
checkpoint is converted to 4 bits, once. Prints the local path. An interrupted download resumes; code and pickles are
never fetched.

examples:
  edgeinfer pull qwen2.5-0.5b
  edgeinfer pull Qwen/Qwen2.5-0.5B-Instruct --bits 8
  edgeinfer pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "pull", execute, _DESCRIPTION)
    text = "catalog name (edgeinfer models --catalog), or Hugging Face id; of a GGUF repository with the type"
    parser.add_argument("repo", metavar="NAME|ORG/NAME[:TYPE]", help=text)
    text = f"bits of a checkpoint's weights: {one_of(CONVERTED_BITS)} (default: 4, or what fits this machine's memory)"
    parser.add_argument("--bits", type=int, choices=CONVERTED_BITS, help=text)
    text = "take the type of a GGUF repository that suits this machine, without asking"
    parser.add_argument("-y", "--yes", action="store_true", help=text)
    parser.add_argument("--no-convert", action="store_true", help="only fetch a checkpoint, for edgeinfer export")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: the main branch)")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    show_notes()
    with progress_bar(enabled=not args.json) as progress:
        path = _fetch(args, progress)
    kind = "gguf" if path.is_file() else "bundle" if hub.is_bundle(path) else "checkpoint"
    if args.json:
        print_json({"repo": args.repo, "path": str(path), "kind": kind})
        return 0
    sys.stdout.write(f"{path}\n")
    if kind != "checkpoint":
        name = args.repo if args.revision is None and hub.local(args.repo) == path else path
        print_note(f"Run it: edgeinfer chat -m {name}")
    else:
        print_note(f"Make a bundle of it: edgeinfer export {args.repo} {args.repo.split('/')[-1]}")
    return 0


def _fetch(args: argparse.Namespace, progress: Progress | None) -> Path:
    if args.no_convert:
        return hub.pull(str(name_of(args.repo)), revision=args.revision, progress=progress or False)
    choose = None if args.yes or args.json else type_question()
    return hub.update(
        args.repo, revision=args.revision, bits=args.bits, progress=progress or (lambda *_: None), choose=choose
    )
