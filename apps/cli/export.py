"""`edgeinfer export`: a checkpoint becomes a bundle."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer import hub
from edgeinfer.apps.cli.bits_table import PLAN_HEADER, plan_facts, plan_rows
from edgeinfer.apps.cli.output import print_json, print_note, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option, missing_extra
from edgeinfer.bundle.layouts import PORTABLE
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.config import BITS, CONVERTED_BITS, FLOAT_BITS, format_size, parse_size
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers


_DESCRIPTION = """\
Turn a Hugging Face checkpoint (safetensors) into a bundle that edgeinfer runs.
edgeinfer run and chat convert a checkpoint by themselves; this makes a bundle to keep or give away. Calibration and
budgets need pip install 'edgeinfer[export]', --format gguf needs 'edgeinfer[gguf]'.

examples:
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct qwen --bits 4
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct qwen-gguf --format gguf --type Q4_K_M --calibration text.txt
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct drafter --format gguf --prune-layers auto:8
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct qwen-npu --static --static-context 2048
  edgeinfer run -m qwen "What is a quark?"
"""
# Options that are fields of ExportConfig under the same name.
_OPTIONS = (
    *("bits", "budget_bits", "target_size", "calibration", "calibration_tokens", "method"),
    *("group_size", "symmetric", "head_bits", "keep_small", "layout", "exporter", "name", "gguf_type"),
)
# Options that are fields of StaticOptions, named --static-*.
_STATIC = ("context", "chunk", "widths", "layers")
# The most that a manifest may have.
_MOST_LAYERS = 2048
# What bits of single tensors mean in a GGUF model.
_BITS_TYPES = {"2": "Q2_K", "3": "Q3_K", "4": "Q4_0", "8": "Q8_0", "16": "F16", "32": "F32"}


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "export", execute, _DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help="checkpoint directory, or hub id ORG/NAME")
    parser.add_argument("out", metavar="OUT", type=Path, help="bundle directory to make")
    text = "format of the model file; gguf runs on llama.cpp and cannot skip layers (default: onnx)"
    parser.add_argument("--format", choices=("onnx", "gguf"), default="onnx", help=text)
    _add_quantization(parser)
    text = (
        "with --format gguf: layers to leave out, such as 3,4,5, or auto:N for the N that matter least; makes a drafter"
    )
    parser.add_argument("--prune-layers", type=_layers, default={}, metavar="LAYERS", help=text)
    text = (
        "store the weights in the layout of ONNX Runtime's operators instead of the native kernel's; "
        "edgeinfer convert changes it later"
    )
    parser.add_argument("--portable", dest="layout", action="store_const", const=PORTABLE, help=text)
    text = (
        "native builds edgeinfer's own graphs; optimum supports further architectures through "
        "optimum-onnx (default: native)"
    )
    parser.add_argument("--exporter", choices=("native", "optimum"), help=text)
    text = "print the bits of each kind of matrix; edgeinfer inspect shows them later"
    parser.add_argument("--show-plan", action="store_true", help=text)
    _add_static(parser)
    text = "EAGLE-1, -2 or -3 head for this model, a directory or a hub id, which then drafts for it"
    parser.add_argument("--drafter", metavar="HEAD", help=text)
    parser.add_argument("--name", metavar="NAME", help="name of the model in results (default: from SOURCE)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it is a bundle")
    parser.advanced("--budget-bits", "--bits-for", "--calibration-tokens", "--method", "--group-size", "--symmetric")
    parser.advanced("--asymmetric", "--head-bits", "--no-keep-small", "--prune-layers", "--portable", "--exporter")
    parser.advanced("--show-plan", "--drafter")
    parser.advanced("--static-context", "--static-chunk", "--static-widths", "--static-layers")
    add_json_option(parser)


def _add_quantization(parser: Parser) -> None:
    size = parser.add_mutually_exclusive_group()
    text = (
        "bits per weight: fewer make a smaller and faster model, more stay closer to the original; 16 "
        "needs --format gguf, 32 is float32 (default: 4)"
    )
    size.add_argument("--bits", type=int, choices=(*BITS, 16, FLOAT_BITS), help=text)
    text = "with --format gguf, instead of --bits: quantization type, such as Q4_K_M (default: Q4_0, the fastest)"
    size.add_argument("--type", dest="gguf_type", metavar="TYPE", help=text)
    text = (
        "instead of --bits: average bits per parameter, scales, zero points and float32 parts included; "
        "spread over the matrices so that the model loses least"
    )
    size.add_argument("--budget-bits", type=float, metavar="BITS", help=text)
    text = "instead of --bits: size of the whole weights.bin or model.gguf, such as 350MB"
    size.add_argument("--target-size", type=parse_size, metavar="SIZE", help=text)
    text = (
        "bits of the matrices whose names match a glob pattern, such as 'layers.*.mlp.down=8', or with "
        "--format gguf their types, such as 'blk.*.ffn_down.weight=Q8_0'; can be repeated, the last "
        "match wins (edgeinfer inspect --tensors lists names)"
    )
    parser.add_argument("--bits-for", type=_pattern, action="append", default=[], metavar="PATTERN=BITS", help=text)
    text = (
        "calibration text in UTF-8, similar to what the model will read; weights that matter for it are "
        "kept most precisely"
    )
    parser.add_argument("--calibration", type=Path, metavar="FILE", help=text)
    text = "number of calibration tokens (default: 16384, or 8192 for large models)"
    parser.add_argument("--calibration-tokens", type=int, metavar="N", help=text)
    text = (
        "quantization method: rtn, or with a calibration text gptq or awq (default: gptq with a "
        "calibration text, else rtn)"
    )
    parser.add_argument("--method", metavar="NAME", help=text)
    text = "number of weights that share a scale: fewer are more precise, more take less space (default: by model size)"
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help=text)
    sign = parser.add_mutually_exclusive_group()
    text = "quantize with scales only, which takes a little less space"
    sign.add_argument("--symmetric", dest="symmetric", action="store_true", default=None, help=text)
    text = "quantize with scales and zero points, which is a little more precise (default)"
    sign.add_argument("--asymmetric", dest="symmetric", action="store_false", help=text)
    text = "bits of the output layer (default: chosen by --bits)"
    parser.add_argument("--head-bits", type=int, choices=CONVERTED_BITS, help=text)
    text = "quantize layers of at most 65536 weights like the others, instead of with more bits"
    parser.add_argument("--no-keep-small", dest="keep_small", action="store_false", default=None, help=text)


def _add_static(parser: Parser) -> None:
    text = (
        "export graphs of fixed shapes with standard operators, for devices that run no others, such as "
        "neural processors; adds a model file per shape, with one copy of the weights"
    )
    parser.add_argument("--static", action="store_true", help=text)
    text = "with --static: context window in tokens (default: 1024, or what the model allows)"
    parser.add_argument("--static-context", type=int, metavar="N", help=text)
    text = "with --static: prompt tokens processed per pass (default: 64)"
    parser.add_argument("--static-chunk", type=int, metavar="N", help=text)
    text = "with --static: tokens per pass for decoding and for verifying drafts (default: 1,2,4,8)"
    parser.add_argument("--static-widths", type=_numbers, metavar="N,N,...", help=text)
    text = "with --static: layers to keep, such as 0-5,8; fewer layers make a drafter (default: all)"
    parser.add_argument("--static-layers", type=_ranges, metavar="LAYERS", help=text)


def _numbers(text: str) -> tuple[int, ...]:
    """Parses numbers between commas."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise UsageError(f"{text!r} is not a list of numbers.", "Write them like 1,2,4,8.") from None


def _ranges(text: str) -> tuple[int, ...]:
    """Parses numbers and ranges between commas, in the order given."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise UsageError(f"{text!r} is not a list of layers.", "Write them like 0-5,8.")
        if dash and int(last) - int(first) >= _MOST_LAYERS:
            raise UsageError(f"{part!r} is more layers than any model has.", "Write them like 0-5,8.")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _pattern(text: str) -> tuple[str, str]:
    """Splits a pattern from its bits or type."""
    pattern, sign, said = text.rpartition("=")
    if not sign or not pattern or not said:
        raise UsageError(f"{text!r} is not of the form PATTERN=BITS.", "Write it like layers.*.mlp.down=8.")
    return pattern, said


def _layers(text: str) -> dict[str, Any]:
    """Parses the layers to leave out: their numbers, or how many."""
    way, sign, count = text.partition(":")
    try:
        if sign and way == "auto" and int(count) > 0:
            return {"prune_count": int(count)}
        return {"prune_layers": tuple(sorted({int(each) for each in text.split(",")}))}
    except ValueError:
        hint = "Write them like 3,4,5, or auto:2 for the two that matter least."
        raise UsageError(f"{text!r} is not a list of layers.", hint) from None


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the fields of ExportConfig that the user gave."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    given |= args.prune_layers | _static_options(args)
    if args.drafter is not None:
        given["drafter"] = hub.find_checkpoint(args.drafter)
    if args.format == "gguf":
        types = tuple((pattern, _BITS_TYPES.get(said, said)) for pattern, said in args.bits_for)
        return given | {"format": args.format} | ({"types_for": types} if types else {})
    for pattern, said in args.bits_for:
        if not said.isdecimal():
            hint = "Write it like layers.*.mlp.down=8; types need --format gguf."
            raise UsageError(f"'{pattern}={said}' is not of the form PATTERN=BITS.", hint)
    return given | {"bits_for": tuple((pattern, int(said)) for pattern, said in args.bits_for)}


def _static_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the field of ExportConfig for fixed shapes, if they are asked for."""
    from edgeinfer.export.options.config import StaticOptions

    given = {name: getattr(args, f"static_{name}") for name in _STATIC if getattr(args, f"static_{name}") is not None}
    if not args.static:
        for name in given:
            raise UsageError(f"--static-{name} needs --static.", f"Add --static, or leave --static-{name} out.")
        return {}
    return {"static": StaticOptions(**given)}


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    try:
        from edgeinfer.export.exporter import export_checkpoint
        from edgeinfer.export.options.config import ExportConfig
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    config = ExportConfig(**_options(args), force=args.force)
    source = hub.find_checkpoint(args.source)
    start = time.perf_counter()
    with progress_bar(enabled=not args.json) as progress:
        try:
            bundle = export_checkpoint(source, args.out, config, progress)
        except ModuleNotFoundError as error:
            raise missing_extra(error) from error
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    manifest = open_bundle(bundle).manifest if args.show_plan else None
    if args.json:
        plan = {} if manifest is None else {"plan": plan_facts(manifest)}
        print_json({"bundle": str(bundle), "bytes": size, "seconds": round(seconds, 3)} | plan)
    else:
        if manifest is not None:
            print_table(plan_rows(manifest), header=PLAN_HEADER)
        print_note(f"Wrote {format_size(size)} in {seconds:.1f} s. Run it: edgeinfer run -m {bundle} PROMPT")
    return 0
