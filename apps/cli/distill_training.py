"""What all trainings ask on the command line, and where they keep what is interrupted."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.output import print_json, print_table
from edgeinfer.bundle.writing import write_file
from edgeinfer.errors import StorageError, UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser


_TRAIN = ("torch", "transformers", "safetensors", "onnx", "scipy")
# Fields of every training's options, by the names of the arguments.
_COMMON = ("steps", "minutes", "learning_rate", "rows", "length", "seed", "device", "threads")


def add_training_options(parser: Parser, minutes: float | None = None) -> None:
    """Adds the options of every training.

    Args:
        minutes: that it takes unless told otherwise; None where it goes by steps only.
    """
    group = parser.add_argument_group("training")
    text = 'training text similar to real use: UTF-8 .txt files, or .jsonl files with "text" or "messages" on each line'
    group.add_argument("--text", type=Path, nargs="+", required=True, metavar="FILE", help=text)
    length = group.add_mutually_exclusive_group()
    if minutes is not None:
        text = f"time limit for the whole training, in minutes (default: {minutes:g})"
        length.add_argument("--minutes", type=float, metavar="M", help=text)
    length.add_argument("--steps", type=int, metavar="N", help="number of training steps, instead of a time limit")
    group.add_argument("--learning-rate", type=float, metavar="X", help="peak learning rate")
    group.add_argument("--rows", type=int, metavar="N", help="batch size, in sequences")
    group.add_argument("--length", type=int, metavar="N", help="sequence length in tokens")
    group.add_argument("--seed", type=int, metavar="N", help="random seed (default: 0)")
    group.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), help="device to train on (default: CUDA if available)"
    )
    text = "number of CPU threads; the same number makes results reproducible (default: PyTorch's)"
    group.add_argument("-t", "--threads", type=int, metavar="N", help=text)
    text = "folder for checkpoints of the training, to resume it (default: OUT.work, removed at the end)"
    group.add_argument("--work", type=Path, metavar="DIR", help=text)
    group.add_argument(
        "--report", type=Path, metavar="FILE", help="file to write all figures to as JSON, losses included"
    )
    parser.advanced("--learning-rate", "--rows", "--length", "--seed", "--report")


def given(args: argparse.Namespace, own: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the fields of a training's options that the user gave.

    Args:
        own: those that not every training has.
    """
    found = {name: getattr(args, name, None) for name in (*_COMMON, *own)}
    return {name: value for name, value in found.items() if value is not None}


def require_free(out: Path) -> None:
    """Refuses, before hours of work, a path that could not be written after them."""
    if out.exists():
        raise StorageError(f"{out} already exists.", "Choose another name, or remove it.")


@contextlib.contextmanager
def torch_needed() -> Iterator[None]:
    """Turns a missing module into the name of the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _TRAIN:
            raise
        raise UsageError(
            f"Training needs {error.name}, which is not installed.", "pip install 'edgeinfer[train]'"
        ) from None


@contextlib.contextmanager
def working_folder(args: argparse.Namespace) -> Iterator[Path]:
    """Gives the folder of an interrupted training; it is removed at the end, unless the user named it."""
    folder = args.work or args.out.with_name(f"{args.out.name}.work")
    yield folder
    if args.work is None:
        shutil.rmtree(folder, ignore_errors=True)


def report(args: argparse.Namespace, facts: Mapping[str, Any], rows: list[tuple[str, ...]]) -> None:
    """Writes and prints the results; losses of single steps go to the file only."""
    if args.report is not None:
        import json

        write_file(args.report, (json.dumps(facts, indent=1) + "\n").encode())
    if args.json:
        print_json({name: value for name, value in facts.items() if name != "losses"})
    else:
        print_table(rows)
