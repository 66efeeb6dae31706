"""`edgeinfer convert`: a bundle in the other layout or with today's graphs, or a .gguf file in another type."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer import hub
from edgeinfer.apps.cli.output import Progress, print_json, print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option, missing_extra
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.layouts import LAYOUTS
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.config import format_size
from edgeinfer.errors import StorageError, UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = """\
Store a bundle's weights in the layout of the native kernel (native) or of ONNX Runtime's operators (portable). The
conversion is lossless. Every bundle runs wherever edgeinfer does: a layout that the device cannot run is converted at
loading time, and this command does it in advance.

Bundles of earlier versions run with a float32 KV cache. With --renew they get today's graphs: attention is faster in
long conversations, and the cache can be float16, int8 or int4. The weights stay as they are.

A .gguf file is rewritten with another quantization type, or with fewer layers, which makes a drafter. Quantizing a file
that is already quantized loses more than starting from floats, and needs --requantize.

examples:
  edgeinfer convert my-bundle my-portable-bundle --to portable
  edgeinfer convert my-old-bundle my-bundle --renew
  edgeinfer convert model-f16.gguf model-q4.gguf --type Q4_K_M
  edgeinfer convert model.gguf drafter.gguf --prune-layers 9,10,12,13
"""
_GGUF = ".gguf"


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "convert", execute, _DESCRIPTION)
    parser.add_argument("bundle", metavar="MODEL", help="bundle directory, hub id ORG/NAME, or a .gguf file")
    parser.add_argument("out", metavar="OUT", type=Path, help="bundle directory or .gguf file to make")
    parser.add_argument("--to", choices=LAYOUTS, help="layout to store, for bundles")
    text = "write today's graphs, for bundles made by an earlier edgeinfer"
    parser.add_argument("--renew", action="store_true", help=text)
    text = "quantization type, such as Q4_K_M, for .gguf files (default: every tensor keeps its own)"
    parser.add_argument("--type", metavar="TYPE", help=text)
    text = "layers to leave out, such as 3,4,5, for .gguf files"
    parser.add_argument("--prune-layers", type=_layers, default=(), metavar="LAYERS", help=text)
    text = "accept a .gguf file that is already quantized, which loses more than starting from floats"
    parser.add_argument("--requantize", action="store_true", help=text)
    text = "number of CPU threads, for .gguf files (default: all cores)"
    parser.add_argument("-t", "--threads", type=int, metavar="N", help=text)
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_json_option(parser)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(each) for each in text.split(",")}))
    except ValueError:
        hint = "Write them like 3,4,5; edgeinfer export --prune-layers auto:N chooses them itself."
        raise UsageError(f"{text!r} is not a list of layers.", hint) from None


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    start = time.perf_counter()
    is_file = args.bundle.lower().endswith(_GGUF)
    with progress_bar(enabled=not args.json) as progress:
        (_convert_file if is_file else _convert_bundle)(args, progress)
    seconds = time.perf_counter() - start
    files = [args.out] if is_file else [file for file in args.out.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    if args.json:
        made = {"file": str(args.out), "type": args.type} if is_file else _made(args.out)
        print_json(made | {"bytes": size, "seconds": round(seconds, 3)})
    else:
        print_note(f"Wrote {format_size(size)} in {seconds:.1f} s. Run it: edgeinfer run -m {args.out} PROMPT")
    return 0


def _made(bundle: Path) -> dict[str, Any]:
    return {"bundle": str(bundle), "layout": open_bundle(bundle).manifest.layout}


def _convert_bundle(args: argparse.Namespace, progress: Progress | None) -> None:
    for name in ("type", "prune_layers", "requantize", "threads"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            hint = "Name the .gguf file itself, or export a bundle again from its checkpoint."
            raise UsageError(f"{option} applies to .gguf files, and {args.bundle} is not one.", hint)
    if args.renew and args.to is not None:
        raise UsageError("--renew and --to cannot be used together.", "Renew the bundle first, then convert that.")
    if args.renew:
        _renew_bundle(args)
        return
    if args.to is None:
        raise UsageError("No layout was given.", f"Add --to {' or --to '.join(LAYOUTS)}, or --renew.")
    convert_bundle(open_bundle(hub.resolve(args.bundle)), args.to, args.out, progress, replace_existing=args.force)


def _renew_bundle(args: argparse.Namespace) -> None:
    try:
        from edgeinfer.export.renewal import renew_bundle
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    renew_bundle(open_bundle(hub.resolve(args.bundle)), args.out, replace_existing=args.force)


def _convert_file(args: argparse.Namespace, progress: Progress | None) -> None:
    if args.renew:
        raise UsageError("--renew is for bundles; a .gguf file has no graphs.", "Use it as it is.")
    if args.to is not None:
        raise UsageError(
            "--to is for bundles; a .gguf file has only one layout.", "Choose a type, such as --type Q4_K_M."
        )
    if args.type is None and not args.prune_layers:
        hint = "Add --type TYPE or --prune-layers LAYERS; a bundle cannot be made of a .gguf file."
        raise UsageError("There is nothing to change.", hint)
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"{args.threads} threads are not valid.", "Use at least 1.")
    if args.out.suffix.lower() != _GGUF:
        raise UsageError(f"{args.out} does not end in {_GGUF}.", f"Call it {args.out}{_GGUF}.")
    if args.out.exists() and not args.force:
        raise StorageError(f"{args.out} already exists.", "Choose another name, or add --force to replace it.")
    try:
        from edgeinfer.export.gguf.quantize import quantize_gguf
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    quantize_gguf(
        Path(args.bundle),
        args.out,
        args.type or "COPY",
        prune_layers=args.prune_layers,
        requantize=args.requantize,
        threads=args.threads,
        progress=progress,
    )
