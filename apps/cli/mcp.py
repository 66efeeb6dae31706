"""`edgeinfer mcp`: offers the model to other programs by the Model Context Protocol."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.inputs import prepared
from edgeinfer.apps.cli.options import (
    add_generation_options,
    add_load_options,
    generation_options,
    load_model,
    load_options,
)
from edgeinfer.apps.cli.parser import add_command, missing_extra

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers


_DESCRIPTION = """\
Offer a model to a program that speaks the Model Context Protocol, over stdin and stdout. It has the tools ask,
extract (a text into a JSON Schema), choose and about. Needs the extra: pip install 'edgeinfer[mcp]'.

Name it in the program's settings, for example:
  {"mcpServers": {"local-model": {"command": "edgeinfer", "args": ["mcp", "-m", "qwen3-4b"]}}}

examples:
  edgeinfer mcp -m qwen3-4b --memory 4GB
"""


def add_mcp(commands: Subparsers) -> None:
    parser = add_command(commands, "mcp", execute, _DESCRIPTION)
    add_load_options(parser, remote=True)
    add_generation_options(parser)


def execute(args: argparse.Namespace) -> int:
    try:
        import mcp  # noqa: F401 - the SDK, before a model is fetched in vain

        from edgeinfer.apps.mcp.offered import serve
    except ModuleNotFoundError as error:
        raise missing_extra(error) from error
    name, options = prepared(args.model, load_options(args))
    asyncio.run(serve(lambda: load_model(name, options), generation_options(args)))
    return 0
