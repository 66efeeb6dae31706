"""`edgeinfer models` and `pull`: lists, removes and downloads models."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.inputs import show_notes, type_question
from edgeinfer.apps.cli.output import Progress, print_json, print_note, print_result, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.core.errors import UsageError, one_of
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import CONVERTED_BITS
from edgeinfer.hub.resolving import name_of

if TYPE_CHECKING:
    from edgeinfer import CatalogModel, LocalModel
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = """\
List the models on this machine, with what they take, or the catalog of good models for devices; remove models.

examples:
  edgeinfer models
  edgeinfer models --catalog
  edgeinfer models rm qwen2.5-0.5b
"""


def add_models(commands: Subparsers) -> None:
    parser = add_command(commands, "models", execute, _DESCRIPTION)
    text = "list models to fetch instead, with the memory they need"
    parser.add_argument("--catalog", action="store_true", help=text)
    add_json_option(parser)
    actions = parser.add_subparsers(title="remove", metavar="[rm NAME ...]")
    text = "Remove models that were fetched or converted. Your own files elsewhere are never touched."
    remove = add_command(actions, "rm", _remove, text, help="remove models")
    remove.add_argument("names", nargs="+", metavar="NAME", help="as edgeinfer models lists it")
    remove.add_argument("-y", "--yes", action="store_true", help="do not ask")


def execute(args: argparse.Namespace) -> int:
    if args.catalog:
        models = edgeinfer.catalog()
        facts = [
            {name: value for name, value in asdict(model).items() if name not in ("sizes", "file_bytes")}
            | {"memory": model.memory, "download": model.download, "gguf": model.is_gguf}
            for model in models
        ]
        return print_result(args, {"models": facts}, functools.partial(_print_catalog, models))
    here = edgeinfer.list_models()
    return print_result(args, {"models": list(map(_facts, here))}, functools.partial(_print_local, here))


def _print_local(models: Sequence[LocalModel]) -> None:
    rows = [
        (
            model.name,
            format_size(model.bytes + model.source_bytes),
            "cannot run" if model.memory is None else format_size(model.memory),
            "" if model.bits_per_weight is None else f"{model.bits_per_weight:.2f}",
            "" if model.divergence is None else f"{model.divergence:.2g}",
            _ago(model.last_used),
        )
        for model in models
    ]
    print_table(rows, header=("name", "on disk", "least memory", "bits", "divergence", "last used"))
    for model in models:
        if model.error is not None:
            print_note(f"{model.name}: {model.error}")


def _facts(model: LocalModel) -> dict[str, Any]:
    used = None if model.last_used is None else model.last_used.isoformat(timespec="seconds")
    return asdict(model) | {"path": str(model.path), "last_used": used}


def _ago(when: datetime | None) -> str:
    if when is None:
        return "never"
    seconds = max(0, int((datetime.now(UTC) - when).total_seconds()))
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = seconds // length
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


def _print_catalog(models: Sequence[CatalogModel]) -> None:
    rows = [
        (model.name, _short(model.parameters), format_size(model.memory), model.licence, model.purpose)
        for model in models
    ]
    print_table(rows, header=("name", "parameters", "memory", "licence", "good for"))
    print_note("Fetch and run one: edgeinfer chat -m NAME")


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 0.95e9 else f"{parameters / 1e6:.0f}M"


def _remove(args: argparse.Namespace) -> int:
    here = edgeinfer.list_models()
    for name in args.names:
        confirm = None if args.yes else functools.partial(_confirmed, name, here)
        freed = edgeinfer.remove_model(name, confirm=confirm)
        print_note(f"Removed {name} ({format_size(freed)})." if freed else f"{name} stays.")
    return 0


def _confirmed(name: str, here: list[LocalModel]) -> bool:
    """Ask on the terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError("Cannot ask for confirmation without a terminal.", f"Add -y to remove {name}.")
    found = [model for model in here if name in (model.name, str(model.path))]
    what = name
    if found:
        size = format_size(sum(model.bytes for model in found))
        source = sum(model.source_bytes for model in found)
        rest = f" and the checkpoint it was converted from ({format_size(source)})" if source else ""
        what = f"{name} ({size}){rest}"
    return input(f"Remove {what}? [y/N] ").strip().lower() in ("y", "yes")


_PULL_DESCRIPTION = """\
Fetch a model, or bring it up to date: one of the catalog, or any of the Hugging Face hub that edgeinfer runs. A
checkpoint is converted, once. Prints the local path. An interrupted download resumes; code and pickles are
never fetched.

examples:
  edgeinfer pull qwen2.5-0.5b
  edgeinfer pull Qwen/Qwen2.5-0.5B-Instruct --bits 8
  edgeinfer pull Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q4_K_M
"""


def add_pull(commands: Subparsers) -> None:
    parser = add_command(commands, "pull", _pull, _PULL_DESCRIPTION)
    text = "catalog name (edgeinfer models --catalog), or Hugging Face id; of a GGUF repository with the type"
    parser.add_argument("repo", metavar="NAME|ORG/NAME[:TYPE]", help=text)
    text = (
        f"bits per weight of a checkpoint, on average: {one_of(CONVERTED_BITS)} (default: as many as the model "
        "needs, or as fit this machine's memory)"
    )
    parser.add_argument("--bits", type=int, choices=CONVERTED_BITS, help=text)
    text = "convert a checkpoint in seconds, without running it over a text; it takes more space or loses more"
    parser.add_argument("--no-calibration", dest="calibrated", action="store_false", help=text)
    text = "take the type of a GGUF repository that suits this machine, without asking"
    parser.add_argument("-y", "--yes", action="store_true", help=text)
    parser.add_argument("--no-convert", action="store_true", help="only fetch a checkpoint, for edgeinfer export")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: the main branch)")
    add_json_option(parser)


def _pull(args: argparse.Namespace) -> int:
    show_notes()
    with progress_bar(enabled=not args.json) as progress:
        path = _fetch(args, progress)
    kind = "gguf" if path.is_file() else "bundle" if hub.is_bundle(path) else "checkpoint"
    if args.json:
        print_json({"repo": args.repo, "path": str(path), "kind": kind})
        return 0
    sys.stdout.write(f"{path}\n")
    if kind != "checkpoint":
        name = args.repo if args.revision is None and hub.find_model(args.repo).here == path else path
        print_note(f"Run it: edgeinfer chat -m {name}")
    else:
        print_note(f"Make a bundle of it: edgeinfer export {args.repo} {args.repo.split('/')[-1]}")
    return 0


def _fetch(args: argparse.Namespace, progress: Progress | None) -> Path:
    if args.no_convert:
        return hub.pull(str(name_of(args.repo)), revision=args.revision, progress=progress or False)
    choose = None if args.yes or args.json else type_question()
    return hub.update(
        args.repo,
        revision=args.revision,
        bits=args.bits,
        progress=progress or (lambda *_: None),
        choose=choose,
        calibrated=args.calibrated,
    )
