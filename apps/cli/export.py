"""`edgeinfer export` and `convert`: bundles from checkpoints, and models in another layout or type."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer import hub
from edgeinfer.apps.cli.inspect import PLAN_HEADER, plan_facts, plan_rows
from edgeinfer.apps.cli.output import Progress, print_json, print_note, print_result, print_table, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.bundle.conversion import convert_bundle
from edgeinfer.bundle.layouts import LAYOUTS, PORTABLE
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.core.errors import StorageError, UsageError
from edgeinfer.core.options import format_size, parse_size
from edgeinfer.core.options.load import CONVERTED_BITS, FLOAT_BITS

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers


_DESCRIPTION = """\
Turn a Hugging Face checkpoint (safetensors) into a bundle that edgeinfer runs.
edgeinfer run and chat convert a checkpoint by themselves; this makes a bundle to keep or give away.
--format gguf needs pip install 'edgeinfer[gguf]'.

examples:
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct qwen --bits 4
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct qwen-gguf --format gguf --type Q4_K_M --calibration text.txt
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct drafter --format gguf --prune-layers auto:8
  edgeinfer export Qwen/Qwen2.5-0.5B-Instruct qwen-npu --static --static-context 2048
  edgeinfer run -m qwen "What is a quark?"
"""
# Options that are fields of ExportConfig under the same name.
_OPTIONS = (
    *("bits", "max_divergence", "target_size", "calibration", "calibration_tokens", "method"),
    *("group_size", "symmetric", "minima", "head_bits", "keep_small", "layout", "exporter", "name", "gguf_type"),
)
# Options that are fields of StaticOptions, named --static-*.
_STATIC = ("context", "chunk", "widths", "layers")
# The most layers of a manifest.
_MOST_LAYERS = 2048
# GGUF types by bits.
_BITS_TYPES = {"2": "Q2_K", "3": "Q3_K", "4": "Q4_0", "5": "Q5_K", "6": "Q6_K", "8": "Q8_0", "16": "F16", "32": "F32"}


def add_export(commands: Subparsers) -> None:
    parser = add_command(commands, "export", execute, _DESCRIPTION)
    parser.add_argument("source", metavar="SOURCE", help="checkpoint directory, or hub id ORG/NAME")
    parser.add_argument("out", metavar="OUT", type=Path, help="bundle directory to make")
    text = "format of the model file; gguf is that of llama.cpp (default: onnx)"
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
    parser.advanced("--max-divergence", "--bits-for", "--calibration-tokens", "--method", "--group-size", "--symmetric")
    parser.advanced(
        "--asymmetric", "--minima", "--head-bits", "--no-keep-small", "--prune-layers", "--portable", "--exporter"
    )
    parser.advanced("--show-plan", "--drafter")
    parser.advanced("--static-context", "--static-chunk", "--static-widths", "--static-layers")
    add_json_option(parser)


def _add_quantization(parser: Parser) -> None:
    size = parser.add_mutually_exclusive_group()
    text = (
        "average bits per weight, spread so that the model loses least, or 8 or 32 (float32) for all; auto is the "
        "fewest that lose little; 16 needs --format gguf (default: auto)"
    )
    size.add_argument("--bits", type=_bits, metavar="auto|N", help=text)
    text = "with --format gguf, instead of --bits: quantization type, such as Q4_K_M (default: Q4_0, the fastest)"
    size.add_argument("--type", dest="gguf_type", metavar="TYPE", help=text)
    text = "instead of --bits: size of the whole weights.bin or model.gguf, such as 350MB"
    size.add_argument("--target-size", type=parse_size, metavar="SIZE", help=text)
    text = (
        "bits of the matrices whose names match a glob pattern, such as 'layers.*.mlp.down=8', or with "
        "--format gguf their types, such as 'blk.*.ffn_down.weight=Q8_0'; can be repeated, the last "
        "match wins (edgeinfer inspect --tensors lists names)"
    )
    parser.add_argument("--bits-for", type=_pattern, action="append", default=[], metavar="PATTERN=BITS", help=text)
    text = "calibration text in UTF-8, similar to what the model will read (default: one that ships)"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--calibration", type=Path, metavar="FILE", help=text)
    text = "convert without a text: in seconds, with bits chosen by rules"
    source.add_argument("--no-calibration", dest="calibration", action="store_const", const="none", help=text)
    text = "with --bits auto: divergence from the float model that is allowed, in nats a token (default: 0.03)"
    parser.add_argument("--max-divergence", type=float, metavar="NATS", help=text)
    text = "number of calibration tokens (default: 16384, fewer for large models)"
    parser.add_argument("--calibration-tokens", type=int, metavar="N", help=text)
    text = "quantization method: rtn, or with a calibration text gptq (default: gptq with a calibration text, else rtn)"
    parser.add_argument("--method", metavar="NAME", help=text)
    text = "number of weights that share a scale: fewer are more precise, more take less space (default: by model size)"
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), help=text)
    sign = parser.add_mutually_exclusive_group()
    text = "quantize with scales only, which takes a little less space"
    sign.add_argument("--symmetric", dest="symmetric", action="store_true", default=None, help=text)
    text = "quantize with scales and zero points, which is a little more precise (default)"
    sign.add_argument("--asymmetric", dest="symmetric", action="store_false", help=text)
    text = "quantize 4 bits with a minimum for each group of 32, where rows allow it; more precise than --asymmetric"
    sign.add_argument("--minima", action="store_true", default=None, help=text)
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


def _bits(text: str) -> float | None:
    """Parse bits a weight; None is auto."""
    if text == "auto":
        return None
    try:
        bits = float(text)
    except ValueError:
        bits = 0.0
    if not 1 < bits <= FLOAT_BITS:
        raise UsageError(f"--bits {text} is not supported.", "Write auto, or a number from 2 to 32.")
    return int(bits) if bits.is_integer() else bits


def _numbers(text: str, what: str = "numbers", hint: str = "Write them like 1,2,4,8.") -> tuple[int, ...]:
    """Parse numbers between commas."""
    try:
        return tuple(int(each) for each in text.split(","))
    except ValueError:
        raise UsageError(f"{text!r} is not a list of {what}.", hint) from None


def _ranges(text: str) -> tuple[int, ...]:
    """Parse numbers and ranges between commas, in the order given."""
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
    """Split a pattern from its bits or type."""
    pattern, sign, said = text.rpartition("=")
    if not sign or not pattern or not said:
        raise UsageError(f"{text!r} is not of the form PATTERN=BITS.", "Write it like layers.*.mlp.down=8.")
    return pattern, said


def _layers(text: str) -> dict[str, Any]:
    """Parse the layers to leave out: their numbers, or how many."""
    way, _, count = text.partition(":")
    if way == "auto" and count.isdecimal() and int(count) > 0:
        return {"prune_count": int(count)}
    hint = "Write them like 3,4,5, or auto:2 for the two that matter least."
    return {"prune_layers": tuple(sorted({*_numbers(text, "layers", hint)}))}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given fields of ExportConfig."""
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
    """Return the `static` field of ExportConfig if it is given."""
    from edgeinfer.export.options import StaticOptions

    given = {name: getattr(args, f"static_{name}") for name in _STATIC if getattr(args, f"static_{name}") is not None}
    if not args.static:
        for name in given:
            raise UsageError(f"--static-{name} needs --static.", f"Add --static, or leave --static-{name} out.")
        return {}
    return {"static": StaticOptions(**given)}


def execute(args: argparse.Namespace) -> int:
    from edgeinfer.export.exporter import Check, export_checkpoint
    from edgeinfer.export.options import ExportConfig
    from edgeinfer.tools.checking import described, measure_quality

    config = ExportConfig(**_options(args), force=args.force)
    source = hub.find_checkpoint(args.source)
    start = time.perf_counter()
    with progress_bar(enabled=not args.json) as progress:
        check = Check(measure_quality, print_note)
        bundle = export_checkpoint(source, args.out, config, progress, check)
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in bundle.rglob("*") if file.is_file())
    manifest = open_bundle(bundle).manifest
    if args.json:
        plan = {"plan": plan_facts(manifest)} if args.show_plan else {}
        quality = {} if manifest.quality is None else {"quality": asdict(manifest.quality)}
        print_json({"bundle": str(bundle), "bytes": size, "seconds": round(seconds, 3)} | quality | plan)
    else:
        if args.show_plan:
            print_table(plan_rows(manifest), header=PLAN_HEADER)
        for line in described(manifest):
            print_note(line)
        print_note(f"Wrote {format_size(size)} in {seconds:.1f} s. Run it: edgeinfer run -m {bundle} PROMPT")
    return 0


_CONVERT_DESCRIPTION = """\
Store a bundle's weights in the layout of the native kernel (native) or of ONNX Runtime's operators (portable). The
conversion is lossless. Every bundle runs wherever edgeinfer does: a layout that the device cannot run is converted at
loading time, and this command does it in advance.

A .gguf file becomes a bundle for the native kernel, whose weights keep the file's own types, and such a bundle becomes
the same file again, byte for byte. With --type or
--prune-layers it becomes another .gguf file: of another quantization type, or of fewer layers, which makes a
drafter. Quantizing a file that is already quantized loses more than starting from floats, and needs --requantize.

examples:
  edgeinfer convert my-bundle my-portable-bundle --to portable
  edgeinfer convert model.gguf my-bundle
  edgeinfer convert my-bundle model.gguf
  edgeinfer convert model-f16.gguf model-q4.gguf --type Q4_K_M
  edgeinfer convert model.gguf drafter.gguf --prune-layers 9,10,12,13
"""
_GGUF = ".gguf"


def add_convert(commands: Subparsers) -> None:
    parser = add_command(commands, "convert", _convert, _CONVERT_DESCRIPTION)
    parser.add_argument("bundle", metavar="MODEL", help="bundle directory, hub id ORG/NAME, or a .gguf file")
    parser.add_argument("out", metavar="OUT", type=Path, help="bundle directory or .gguf file to make")
    parser.add_argument("--to", choices=LAYOUTS, help="layout to store, for bundles")
    text = "quantization type, such as Q4_K_M, for .gguf files (default: every tensor keeps its own)"
    parser.add_argument("--type", metavar="TYPE", help=text)
    text = "layers to leave out, such as 3,4,5, for .gguf files"
    parser.add_argument("--prune-layers", type=_layer_numbers, default=(), metavar="LAYERS", help=text)
    text = "accept a .gguf file that is already quantized, which loses more than starting from floats"
    parser.add_argument("--requantize", action="store_true", help=text)
    text = "number of CPU threads, for .gguf files (default: all cores)"
    parser.add_argument("-t", "--threads", type=int, metavar="N", help=text)
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    add_json_option(parser)


def _layer_numbers(text: str) -> tuple[int, ...]:
    hint = "Write them like 3,4,5; edgeinfer export --prune-layers auto:N chooses them itself."
    return tuple(sorted({*_numbers(text, "layers", hint)}))


def _convert(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    of_file = args.bundle.lower().endswith(_GGUF)
    is_file = of_file and bool(args.type or args.prune_layers or args.out.suffix.lower() == _GGUF)
    back = not of_file and args.out.suffix.lower() == _GGUF
    run = _convert_file if is_file else _read_file if of_file else _restore_file if back else _convert_bundle
    with progress_bar(enabled=not args.json) as progress:
        run(args, progress)
    seconds = time.perf_counter() - start
    is_file = is_file or back
    files = [args.out] if is_file else [file for file in args.out.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    layout = "" if is_file else open_bundle(args.out).manifest.layout
    made = {"file": str(args.out), "type": args.type} if is_file else {"bundle": str(args.out), "layout": layout}
    note = f"Wrote {format_size(size)} in {seconds:.1f} s. Run it: edgeinfer run -m {args.out} PROMPT"
    return print_result(args, made | {"bytes": size, "seconds": round(seconds, 3)}, partial(print_note, note))


def _refuse_options_of_files(args: argparse.Namespace) -> None:
    for name in ("type", "prune_layers", "requantize", "threads"):
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            hint = "Name the .gguf file itself, or export a bundle again from its checkpoint."
            raise UsageError(f"{option} applies to .gguf files, and {args.bundle} is not one.", hint)


def _restore_file(args: argparse.Namespace, progress: Progress | None) -> None:
    """Makes the .gguf file again that a bundle was made of."""
    from edgeinfer.export.gguf.reading import restore_gguf

    _refuse_options_of_files(args)
    if args.to is not None:
        raise UsageError("--to is for bundles; a .gguf file has only one layout.", "Leave it out.")
    restore_gguf(open_bundle(hub.resolve(args.bundle)), args.out, progress, replace_existing=args.force)


def _convert_bundle(args: argparse.Namespace, progress: Progress | None) -> None:
    _refuse_options_of_files(args)
    if args.to is None:
        raise UsageError("No layout was given.", f"Add --to {' or --to '.join(LAYOUTS)}.")
    convert_bundle(open_bundle(hub.resolve(args.bundle)), args.to, args.out, progress, replace_existing=args.force)


def _read_file(args: argparse.Namespace, progress: Progress | None) -> None:
    """Makes a bundle of a .gguf file."""
    from edgeinfer.export.gguf.reading import convert_gguf

    if args.to == PORTABLE:
        hint = "Leave --to out: the native kernel alone multiplies a .gguf file's types."
        raise UsageError("Portable bundles of .gguf files are not supported.", hint)
    convert_gguf(Path(args.bundle), args.out, args.out.name, progress, replace_existing=args.force)


def _convert_file(args: argparse.Namespace, progress: Progress | None) -> None:
    if args.to is not None:
        raise UsageError(
            "--to is for bundles; a .gguf file has only one layout.", "Choose a type, such as --type Q4_K_M."
        )
    if args.type is None and not args.prune_layers:
        hint = "Add --type TYPE or --prune-layers LAYERS, or name a folder instead, which becomes a bundle."
        raise UsageError("There is nothing to change.", hint)
    if args.threads is not None and args.threads < 1:
        raise UsageError(f"{args.threads} threads are not valid.", "Use at least 1.")
    if args.out.suffix.lower() != _GGUF:
        raise UsageError(f"{args.out} does not end in {_GGUF}.", f"Call it {args.out}{_GGUF}.")
    if args.out.exists() and not args.force:
        raise StorageError(f"{args.out} already exists.", "Choose another name, or add --force to replace it.")
    from edgeinfer.export.gguf.quantize import quantize_gguf

    quantize_gguf(
        Path(args.bundle),
        args.out,
        args.type or "COPY",
        prune_layers=args.prune_layers,
        requantize=args.requantize,
        threads=args.threads,
        progress=progress,
    )
