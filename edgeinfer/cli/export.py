"""`edgeinfer export`: a checkpoint becomes a bundle; knows nothing of graphs or bits."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.bundle import PORTABLE
from edgeinfer.cli.options import add_command, add_json_option, read_paragraphs
from edgeinfer.cli.output import Progress, print_json, print_note, progress_bar
from edgeinfer.config import format_size
from edgeinfer.errors import EdgeInferError, UsageError

if TYPE_CHECKING:
    from edgeinfer.cli.options import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Turn a Hugging Face checkpoint (safetensors) into a bundle that edgeinfer runs.
Needs the extra: pip install 'edgeinfer[export]'

example:
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct qwen --bits 4
  edgeinfer run -m qwen -p "What is a quark?" --chat
"""
# What `edgeinfer[export]` and `edgeinfer[optimum]` bring.
_EXTRAS = {
    "onnx": "export",
    "safetensors": "export",
    "ml_dtypes": "export",
    "optimum": "optimum",
    "torch": "optimum",
    "transformers": "optimum",
}


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "export", execute, "make a bundle from a checkpoint", _DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help="checkpoint directory, or hub id ORG/NAME")
    parser.add_argument("out", metavar="OUT", type=Path, help="bundle directory to make")
    parser.add_argument("--format", choices=("onnx",), default="onnx", help="model file in the bundle")
    text = "bits of each weight: fewer are smaller and faster, more are closer to the original (default: 4)"
    parser.add_argument("--bits", type=int, choices=(2, 4, 8, 32), help=text)
    text = "weights that share a scale: fewer are more exact, more are smaller (default: by size)"
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help=text)
    sign = parser.add_mutually_exclusive_group()
    text = "scale only: a little smaller"
    sign.add_argument("--symmetric", dest="symmetric", action="store_true", default=None, help=text)
    text = "scale and zero point: a little more exact (default)"
    sign.add_argument("--asymmetric", dest="symmetric", action="store_false", help=text)
    text = "bits of the output layer alone (default: chosen from --bits)"
    parser.add_argument("--head-bits", type=int, choices=(2, 4, 8, 32), help=text)
    text = "give layers of at most 65536 weights these bits too, instead of more"
    parser.add_argument("--no-keep-small", dest="keep_small", action="store_false", default=None, help=text)
    text = (
        "store weights as onnxruntime's operators read them, not as our own kernel does; edgeinfer convert changes it"
    )
    parser.add_argument("--portable", dest="layout", action="store_const", const=PORTABLE, help=text)
    text = "native: edgeinfer's own graphs (default); optimum: other architectures, through optimum-onnx"
    parser.add_argument("--exporter", choices=("native", "optimum"), help=text)
    text = "UTF-8 text, paragraphs parted by empty lines, to fit int8 and int4 caches to (default: the model's own)"
    parser.add_argument("--kv-calibration", type=Path, metavar="FILE", help=text)
    text = "do not run the model afterwards to fit int8 and int4 caches to it; edgeinfer tune can do it later"
    parser.add_argument("--no-kv-scales", dest="kv_scales", action="store_false", help=text)
    parser.add_argument("--name", metavar="NAME", help="the model's name in results (default: from SOURCE)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a bundle")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    try:
        from edgeinfer.export import ExportConfig, export_checkpoint
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    names = ("bits", "group_size", "symmetric", "head_bits", "keep_small", "layout", "exporter", "name")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    config = ExportConfig(**given, force=args.force)
    texts = None if args.kv_calibration is None else read_paragraphs(args.kv_calibration)
    source = hub.find_checkpoint(args.source)
    start = time.perf_counter()
    with progress_bar(enabled=not args.json) as progress:
        try:
            bundle = export_checkpoint(source, args.out, config, progress)
        except ModuleNotFoundError as error:
            raise _missing(error) from error
        if args.kv_scales and config.exporter == "native":
            _calibrate(bundle, texts, progress)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    if args.json:
        print_json({"bundle": str(bundle), "bytes": size, "seconds": round(seconds, 3)})
    else:
        print_note(f"{format_size(size)} in {seconds:.1f} s. Run it: edgeinfer run -m {bundle} -p TEXT")
    return 0


def _calibrate(bundle: Path, texts: list[str] | None, progress: Progress | None) -> None:
    """Adds scales for quantized caches; a model that cannot run here goes without."""
    try:
        edgeinfer.calibrate_kv(bundle, texts, progress=progress)
    except EdgeInferError as error:
        print_note(f"No scales for int8 and int4 caches: {error.message} {error.hint}")


def _missing(error: ModuleNotFoundError) -> Exception:
    """The error to raise for a module that is not there: a missing extra is the user's to add, any other is our bug."""
    extra = _EXTRAS.get((error.name or "").partition(".")[0])
    if extra is None:
        return error
    return UsageError(f"Exporting needs {error.name}, which is not installed.", f"pip install 'edgeinfer[{extra}]'")
