"""`edgeinfer bench curve`: what a pass over several tokens costs; knows nothing of how it is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.bench_files import numbers, require_place, write_results, write_text
from edgeinfer.apps.cli.options import add_load_options, load_model, load_options
from edgeinfer.apps.cli.output import print_note, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, command_line

if TYPE_CHECKING:
    from edgeinfer.apps.bench.curve import Curve
    from edgeinfer.apps.cli.parser import Subparsers

__all__ = ["add_curve_parser"]

_DESCRIPTION = """\
Measure c(m): the time of a pass over m new tokens, which is what verifying a draft of m - 1 costs, beside the least
that reading the weights and multiplying take on this machine, measured in the same minutes.

example:
  edgeinfer bench curve -m BUNDLE -t 1 --svg curve.svg
"""


def add_curve_parser(kinds: Subparsers) -> None:
    """Adds the benchmark."""
    parser = add_command(kinds, "curve", _execute, "what a pass over several tokens costs", _DESCRIPTION)
    add_load_options(parser)
    group = parser.add_argument_group("passes")
    text = "numbers of tokens, separated by commas (default: 1 to 8, 10, 12, 16)"
    group.add_argument("--sizes", type=numbers, metavar="LIST", help=text)
    text = "tokens that are there before (default: 64)"
    group.add_argument("-d", "--n-depth", type=int, default=64, metavar="N", help=text)
    group.add_argument("-r", "--repetitions", type=int, default=9, metavar="N", help="visits to each (default: 9)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw them")


def _execute(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.curve import CurveConfig, curve_chart, run_curve
    from edgeinfer.apps.bench.plots import chart_svg

    require_place(args.json, args.svg)
    sizes = {} if args.sizes is None else {"sizes": args.sizes}
    config = CurveConfig(past=args.n_depth, repeats=args.repetitions, **sizes)
    options = {"context": config.context} | load_options(args)
    with load_model(args.model, options) as model, progress_bar() as bar:

        def told(done: int, total: int) -> None:
            if bar:
                bar("measuring", done, total)

        curve = run_curve(model, config, told, command_line())
    _print(curve)
    write_results(args.json, "curve", curve.to_dict())
    if args.svg:
        write_text(args.svg, chart_svg(curve_chart(curve)))
    return 0


def _print(curve: Curve) -> None:
    header = ("m", "ms", "25% to 75%", "c(m)/c(1)", "least ms", "times the least")
    rows = []
    for point in curve.points:
        least = point.limit_ms
        rows.append(
            (
                str(point.size),
                f"{point.ms.median:.2f}",
                f"{point.ms.p25:.2f} to {point.ms.p75:.2f}",
                f"{point.growth.median:.2f}",
                "-" if least is None else f"{least:.2f}",
                "-" if least is None else f"{point.ms.median / least:.2f}",
            )
        )
    print_table(rows, header=header, title=f"{curve.facts['model_type']}, {curve.facts['cpu_info']}")
    if curve.limits is None:
        print_note("The machine's limits are not known: the native kernel, which measures them, is not here.")
