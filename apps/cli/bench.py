"""`edgeinfer bench`: a subcommand for each benchmark, generated from the options that it declares."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.options import add_load_options, load_model, load_options
from edgeinfer.apps.cli.output import print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, command_line
from edgeinfer.bundle.writing import storage_errors, write_file
from edgeinfer.core.errors import StorageError
from edgeinfer.hub import resolve

if TYPE_CHECKING:
    from edgeinfer.apps.bench.benchmark import Benchmark
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = """\
Measure on this device.

examples:
  edgeinfer bench speed
  edgeinfer bench curve
  edgeinfer bench spec
  edgeinfer bench memory plans
  edgeinfer bench quality --json quality.json
"""


def add_bench(commands: Subparsers) -> None:
    """Add `bench` and its subcommands."""
    from edgeinfer.apps.bench.listing import BENCHMARKS
    from edgeinfer.apps.bench.memory import GROUP

    parser = commands.add_parser("bench", description=_DESCRIPTION)
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    groups: dict[str, Subparsers] = {}
    for benchmark in BENCHMARKS:
        group, _, name = benchmark.name.rpartition(" ")
        if group and group not in groups:
            text, description = GROUP
            inner = kinds.add_parser(group, help=text, description=description)
            groups[group] = inner.add_subparsers(title="parts", metavar="PART", required=True)
        _add_benchmark(groups[group] if group else kinds, name, benchmark)


def _add_benchmark(commands: Subparsers, name: str, benchmark: Benchmark) -> None:
    from edgeinfer.apps.bench.benchmark import add_declared

    parser = add_command(
        commands, name, lambda args: _execute(benchmark, args), benchmark.description, help=benchmark.help
    )
    if benchmark.loads:
        add_load_options(parser, converts=False)
        parser.advanced("--speculation", "--memory")
    parser.advanced(*add_declared(parser, benchmark.options))
    if benchmark.files:
        parser.add_argument("--json", type=Path, metavar="FILE", help="file to write all figures to, samples included")


def _execute(benchmark: Benchmark, args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.benchmark import BenchContext, options_from, result_json
    from edgeinfer.apps.bench.render import machine_facts, print_section

    options = options_from(benchmark.options, args)
    out, written = (getattr(args, name, None) for name in ("out", "json"))
    _require_place(out, written)
    model, load = (args.model, load_options(args, converts=False)) if benchmark.loads else (None, {})
    with progress_bar() as bar:
        shown: dict[str, Any] = {} if bar is None else {"progress": bar}
        context = BenchContext(model, load, resolve, load_model, command=command_line(), **shown)
        result = benchmark.run(options, context)
    if benchmark.text:
        text = benchmark.text(options, result.data)
        if out:
            _write_text(out, text)
        else:
            sys.stdout.write(text)
    else:
        text = result_json(benchmark.key, command_line(), result.data)
        data = json.loads(text)
        assert benchmark.section is not None, "what is not text has sections"
        print_section(benchmark.section(data), machine_facts(data))
        if written:
            _write_text(written, text)
    if not result.finished:
        print_note("Interrupted: the figures cover what was done so far.")
        return 130
    return 0 if result.passed else 1


def _require_place(*paths: Path | None) -> None:
    """Refuse output files in missing folders before anything is measured."""
    for path in paths:
        if path and not path.absolute().parent.is_dir():
            raise StorageError(f"Cannot write {path}: there is no such folder.", "Choose another place.")


def _write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    with storage_errors(path):
        write_file(path, text.encode("utf-8"))
