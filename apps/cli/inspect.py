"""`edgeinfer inspect`: prints what a bundle or GGUF file says of itself; knows nothing of how it is run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer import hub
from edgeinfer.apps.cli.gguf_table import (
    TENSOR_HEADER,
    TYPE_HEADER,
    gguf_facts,
    memory_rows,
    metadata_rows,
    tensor_rows,
    type_rows,
)
from edgeinfer.apps.cli.options import add_command, add_json_option
from edgeinfer.apps.cli.output import print_json, print_note, print_table, progress_bar
from edgeinfer.apps.cli.plan_table import PLAN_HEADER, plan_rows
from edgeinfer.bundle import Bundle, TensorEntry, open_bundle
from edgeinfer.bundle.gguf.reader import GgufFile
from edgeinfer.bundle.static_graph import StaticGraphs
from edgeinfer.config import format_size

if TYPE_CHECKING:
    from edgeinfer.apps.cli.options import Subparsers

__all__ = ["add_parser", "execute"]

_DESCRIPTION = """\
Show what is in a bundle: sizes, bits, memory per token, how it was made, how good it is; of a GGUF file its metadata.

examples:
  edgeinfer inspect my-bundle --verify
  edgeinfer inspect model.gguf --tensors
"""


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "inspect", execute, "show what is in a bundle", _DESCRIPTION)
    text = "bundle directory, .gguf file or hub id ORG/NAME (default: the built-in model)"
    parser.add_argument("path", metavar="PATH", nargs="?", help=text)
    parser.add_argument("--tensors", action="store_true", help="list every weight with its shape and type")
    text = "compare every file with its recorded sha256, a .gguf file with what it was at first use"
    parser.add_argument("--verify", action="store_true", help=text)
    text = "take a .gguf file that was replaced on purpose as the right one from now on"
    parser.add_argument("--accept", action="store_true", help=text)
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    bundle = open_bundle(hub.resolve(args.path))
    verified: Mapping[str, str] = {}
    if args.verify or args.accept:
        with progress_bar(enabled=not args.json) as progress:
            verified = edgeinfer.verify(args.path, accept=args.accept, progress=progress)
    if args.json:
        print_json(_facts(bundle, with_tensors=args.tensors) | ({"verified": True} if verified else {}))
        return 0
    print_table(_summary(bundle), title=str(_path(bundle)))
    _section("files", [(name, format_size(entry.bytes)) for name, entry in bundle.manifest.files.items()])
    _section("made with", [(name, _plain(value)) for name, value in bundle.manifest.export.items()])
    _section("quality", [(name, f"{value:.6g}") for name, value in bundle.manifest.quality.items()])
    _section("bits", list(plan_rows(bundle.manifest)), header=PLAN_HEADER)
    if bundle.header is not None:
        _print_gguf(bundle.header, bundle.manifest.geometry.max_positions, with_tensors=args.tensors)
    elif args.tensors:
        rows = [_tensor_row(entry) for entry in bundle.manifest.tensors]
        _section("tensors", rows, header=("name", "shape", "bits", "block", "size"))
    if "first" in verified.values():
        print_note("Replies are given from now on as long as the file stays what it is.")
    elif verified:
        print_note("Every file matches its sha256.")
    return 0


def _print_gguf(gguf: GgufFile, context: int, *, with_tensors: bool) -> None:
    """What only GGUF files have."""
    _section("metadata", list(metadata_rows(gguf)))
    _section("types", list(type_rows(gguf)), header=TYPE_HEADER)
    if with_tensors:
        _section("tensors", tensor_rows(gguf), header=TENSOR_HEADER)
    _section("memory it will need", list(memory_rows(gguf, context)))


def _path(bundle: Bundle) -> Path:
    """What was inspected: a folder, or a file that is a bundle by itself."""
    return bundle.path if bundle.digests else bundle.gguf.path


def _section(title: str, rows: list[tuple[str, ...]], header: tuple[str, ...] = ()) -> None:
    if rows:
        print_table(rows, title=f"\n{title}", header=header)


def _summary(bundle: Bundle) -> list[tuple[str, str]]:
    manifest = bundle.manifest
    geometry, able = manifest.geometry, manifest.capabilities
    abilities = {"layer skipping": able.layer_skip, "early exit": able.hidden, "draft trees": able.tree}
    abilities |= {"drafts from half the bits": able.elastic}
    rows = [
        ("name", manifest.name),
        ("architecture", manifest.architecture),
        ("backend", manifest.backend),
        ("parameters", f"{manifest.parameters:,}"),
        ("weights", f"{format_size(manifest.weight_bytes)}, {manifest.bits_per_weight:.2f} bits per parameter"),
        ("layers", f"{geometry.num_layers}, hidden size {geometry.hidden_size}, vocabulary {geometry.vocab_size:,}"),
        ("context", f"up to {geometry.max_positions:,} tokens"),
        ("capabilities", ", ".join(name for name, has in abilities.items() if has) or "plain decoding"),
    ]
    if bundle.header is None:
        rows.insert(5, ("layout", manifest.layout))
        rows.insert(7, ("KV cache", f"{geometry.kv_bytes_per_token():,} bytes per token"))
    if manifest.static is not None:
        rows.append(("shapes", _shapes(manifest.static)))
    plan = manifest.plan
    if plan is not None:
        calibrated = f", calibrated on {plan.calibration_tokens:,} tokens" if plan.calibration_tokens else ""
        rows.append(("quantized by", f"{plan.method}{calibrated}"))
    if plan is not None and plan.budget_bytes is not None:
        rows.append(("budget", f"{format_size(plan.budget_bytes)} of weights"))
    if manifest.exits:
        rows.append(("exit layers", ", ".join(map(str, manifest.exits))))
    if manifest.drafters:
        rows.append(("drafters", ", ".join(manifest.drafters)))
    return rows


def _shapes(static: StaticGraphs) -> str:
    """Rows of the graphs, and the layers where some were left out."""
    widths = ", ".join(map(str, static.widths))
    layers = "" if static.layers[-1] == len(static.layers) - 1 else f"; layers {', '.join(map(str, static.layers))}"
    return f"passes of {widths} rows, prompts by {static.chunk}, {static.context:,} tokens in all{layers}"


def _tensor_row(entry: TensorEntry) -> tuple[str, ...]:
    shape = " x ".join(map(str, entry.shape))
    return (entry.name, shape, str(entry.bits), str(entry.block_size or ""), format_size(entry.nbytes))


def _facts(bundle: Bundle, *, with_tensors: bool) -> dict[str, Any]:
    manifest = bundle.manifest
    data: dict[str, Any] = json.loads(manifest.to_json())
    if not with_tensors:
        del data["tensors"]
    data |= {
        "path": str(_path(bundle)),
        "weight_bytes": manifest.weight_bytes,
        "bits_per_weight": manifest.bits_per_weight,
    }
    if bundle.header is not None:
        return data | {"gguf": gguf_facts(bundle.header, with_tensors=with_tensors)}
    return data | {"kv_bytes_per_token": manifest.geometry.kv_bytes_per_token()}


def _plain(value: str | int | float | bool | None) -> str:
    if value is None or isinstance(value, bool):
        return {True: "yes", False: "no", None: "none"}[value]
    return str(value)
