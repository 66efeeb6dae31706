"""`edgeinfer devices`: where models can run on this machine."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

import edgeinfer
from edgeinfer.apps.cli.output import print_json, print_table
from edgeinfer.apps.cli.parser import add_command, add_json_option

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers
    from edgeinfer.results import DeviceFacts


_DESCRIPTION = (
    "List the devices that models can run on, whether they are available here, and whether a small "
    "model gives the same\nresults on them as on the CPU. `--device NAME` selects one; `auto`, the "
    "default, uses the first in the list that runs the\nmodel.\n\nexample:\n  edgeinfer devices\n"
)
_WORDS = {
    "in_place_kv": "in-place KV cache",
    "quantized_kv": "int8 and int4 KV caches",
    "branches": "branches",
    "tree_bias": "draft trees",
    "custom_ops": "native kernel",
}

_RUNS = {"all": "all bundles", "static": "static bundles", "gguf": "GGUF files"}


def add_parser(commands: Subparsers) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "devices", execute, _DESCRIPTION)
    parser.add_argument(
        "--no-check", action="store_true", help="only look for devices, without running anything on them"
    )
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    """Runs the subcommand."""
    devices = edgeinfer.list_devices(check=not args.no_check)
    if args.json:
        print_json({"devices": [dataclasses.asdict(device) for device in devices]})
        return 0
    rows = [(d.name, _here(d), d.check, _RUNS[d.bundles], _traits(d), d.tried) for d in devices]
    print_table(rows, header=("device", "here", "check", "runs", "with", "tried"))
    return 0


def _here(device: DeviceFacts) -> str:
    if device.installed:
        return (device.description or "yes") if device.hardware else "no hardware"
    return f"needs {device.package}" + ("" if device.beside else " in place of onnxruntime")


def _traits(device: DeviceFacts) -> str:
    return ", ".join(_WORDS[name] for name, there in device.traits.items() if there) or "fixed shapes"
