"""`edgeinfer tune`: lets a model's own layers draft where that pays; knows nothing of how that is found out."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import edgeinfer
from edgeinfer.cli.loading import load_model
from edgeinfer.cli.options import (
    add_command,
    add_json_option,
    add_load_options,
    load_options,
    read_text,
)
from edgeinfer.cli.output import print_json, print_note, print_table, progress_bar

if TYPE_CHECKING:
    from edgeinfer import TuneResult
    from edgeinfer.cli.options import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Find the layers of a model that can be skipped while drafting, measured on this device, and keep what pays for `auto`.
Where the bundle brings no scales for int8 and int4 caches, find these too.

example:
  edgeinfer tune -m my-bundle --text prompts.txt
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "tune", execute, "find layers that draft well", _DESCRIPTION)
    add_load_options(parser)
    group = parser.add_argument_group("search")
    text = "prompts to tune by, one per line of a UTF-8 file (default: a few of edgeinfer's own)"
    group.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "consecutive layers that are skipped together (default: 1)"
    group.add_argument("--granularity", type=int, default=1, metavar="N", help=text)
    text = "sets of layers to try at most (default: 200)"
    group.add_argument("--evaluations", type=int, default=200, metavar="N", help=text)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the search (default: 0)")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    prompts = None if args.text is None else [line for line in read_text(args.text).splitlines() if line.strip()]
    with load_model(args.model, load_options(args)) as model, progress_bar() as bar:
        shown = {} if bar is None else {"progress": lambda done, total: bar("searching", done, total)}
        result = model.tune(
            prompts, granularity=args.granularity, evaluations=args.evaluations, seed=args.seed, **shown
        )
    with progress_bar() as bar:
        scales = edgeinfer.tune_kv(args.model, prompts, **({} if bar is None else {"progress": bar}))
    if args.json:
        print_json(_object(result) | {"kv_scales": scales})
        return 0
    rows = [
        ("exit after layer", f"{result.exit.layers}"),
        ("  matchness", f"{result.exit.matchness:.3f}"),
        ("  predicted speed-up", _gain(result.exit.speedup, result.tuning.exit_layer is not None)),
        ("blocks skipped", f"{int((~result.skip.layer_mask).sum())} of {len(result.skip.layer_mask)}"),
        ("  matchness", f"{result.skip.matchness:.3f}"),
        ("  predicted speed-up", _gain(result.skip.speedup, result.tuning.layer_mask is not None)),
        ("sets tried", f"{result.skip.evaluations}"),
    ]
    print_table(rows, title="drafting with the model's own layers")
    if scales:
        print_note("Fitted int8 and int4 caches to this model; kept for this user.")
    return 0


def _gain(speedup: float, kept: bool) -> str:
    return f"{speedup:.2f}x, {'kept for auto' if kept else 'does not pay'}"


def _object(result: TuneResult) -> dict[str, object]:
    found = {"exit": result.exit, "skip": result.skip}
    data: dict[str, object] = {
        name: {
            "layers": each.layers,
            "layer_mask": each.layer_mask.tolist(),
            "matchness": each.matchness,
            "predicted_speedup": each.speedup,
            "draft_length": each.length,
            "sets_tried": each.evaluations,
        }
        for name, each in found.items()
    }
    data["kept"] = {"exit": result.tuning.exit_layer is not None, "skip": result.tuning.layer_mask is not None}
    return data
