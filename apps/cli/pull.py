"""`edgeinfer pull`: fetches a model from the hub."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from edgeinfer import hub
from edgeinfer.apps.cli.output import print_json, print_note
from edgeinfer.apps.cli.parser import add_command, add_json_option

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Fetch a model from the Hugging Face hub: a bundle or one GGUF file to run, or a checkpoint to export.
Prints the local path. An interrupted download resumes; code and pickles are never fetched.

examples:
  edgeinfer pull Qwen/Qwen2.5-0.5B-Instruct
  edgeinfer pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "pull", execute, _DESCRIPTION)
    parser.add_argument("repo", metavar="ORG/NAME[:TYPE]", help="hub id, of a GGUF repository with the type")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: the main branch)")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    shown = sys.stderr.isatty() and not args.json
    path = hub.pull(args.repo, revision=args.revision, progress=shown)
    kind = "gguf" if path.is_file() else "bundle" if hub.is_bundle(path) else "checkpoint"
    if args.json:
        print_json({"repo": args.repo, "path": str(path), "kind": kind})
        return 0
    sys.stdout.write(f"{path}\n")
    if kind != "checkpoint":
        print_note(f"Run it: edgeinfer run -m {args.repo} -p TEXT")
    else:
        print_note(f"Make a bundle of it: edgeinfer export {args.repo} {args.repo.split('/')[-1]}")
    return 0
