"""`edgeinfer bench peers`: other engines on the same work; knows nothing of how they are run."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.apps.cli.bench_files import names, require_place, write_results
from edgeinfer.apps.cli.output import print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command
from edgeinfer.config import parse_size
from edgeinfer.errors import UsageError
from edgeinfer.hub import resolve

if TYPE_CHECKING:
    from edgeinfer.apps.bench.peers_figures import PeersConfig
    from edgeinfer.apps.bench.peers_models import PeerModel
    from edgeinfer.apps.cli.parser import Parser, Subparsers

__all__ = ["add_peers_parser"]

_DESCRIPTION = """\
The same work on edgeinfer, llama.cpp, onnxruntime-genai, OpenVINO GenAI and transformers, each in a process of its own
and, where it needs one, an environment of its own: loading, prompts (pp512), replies (tg128), passes over 1 and 4
tokens, memory, and replies inside memory limits that the system enforces. edgeinfer is told the limit; the others know
none. Engines take turns, and speed counts only where their replies are right. What is not installed is left out.

The built-in model has 8-bit weights in every engine, models of a shape random ones of 4 bits; transformers has floating
point. Where edgeinfer's default groups are larger than llama.cpp's 32, it is measured with 32 as well. Model files are
made once and kept; those of qwen2.5-0.5b take 6 GB.

examples:
  edgeinfer bench peers --quick
  edgeinfer bench peers --python genai=GENAI/bin/python --python openvino=OPENVINO/bin/python --json peers.json
  edgeinfer bench peers --engines edgeinfer,llamacpp --models qwen2.5-0.5b --budgets 300MB,400MB
"""
_MODELS = "tales,qwen2.5-0.5b"
_PROBE, _PROBE_SECONDS = "print('it runs')", 60


def add_peers_parser(kinds: Subparsers) -> None:
    """Adds the benchmark."""
    parser = add_command(kinds, "peers", _execute, "other engines on the same work", _DESCRIPTION)
    group = parser.add_argument_group("what is compared")
    text = "edgeinfer, edgeinfer-g32, llamacpp, genai, openvino, transformers, transformers-bf16 (default: all)"
    group.add_argument("--engines", type=names, metavar="LIST", help=text)
    text = f"tales, the built-in model, and names of shapes, whose weights are random (default: {_MODELS})"
    group.add_argument("--models", type=names, metavar="LIST", help=text)
    text = "a trained checkpoint (Hugging Face, safetensors) besides --models, or instead of the default ones"
    group.add_argument("--checkpoint", type=Path, metavar="PATH", help=text)
    text = "an interpreter that has an engine; may be given several times"
    group.add_argument("--python", action="append", type=_python, default=[], metavar="ENGINE=PATH", help=text)
    group.add_argument("-t", "--threads", type=int, default=1, metavar="N", help="of every engine (default: 1)")
    group.add_argument("-c", "--context", type=int, default=1024, metavar="N", help="tokens of cache (default: 1024)")
    _add_sizes(parser)
    group = parser.add_argument_group("files")
    group.add_argument("--work", type=Path, metavar="PATH", help="where model files are kept")
    group.add_argument("--json", type=Path, metavar="FILE", help="write everything")


def _add_sizes(parser: Parser) -> None:
    group = parser.add_argument_group("what is timed")
    group.add_argument("-p", "--n-prompt", type=int, default=512, metavar="N", help="of the prompt (default: 512)")
    group.add_argument("-n", "--n-gen", type=int, default=128, metavar="N", help="of the reply (default: 128)")
    text = "memory limits, as 250MB or, in megabytes, 250; none leaves them out (default: 250,350,500,700,1000)"
    group.add_argument("--budgets", type=_budgets, metavar="LIST", help=text)
    text = "starts of, and visits to, every engine and test (default: 5)"
    group.add_argument("--repeats", type=int, default=5, metavar="N", help=text)
    text = "processes of every engine and budget (default: 3)"
    group.add_argument("--rounds", type=int, default=3, metavar="N", help=text)
    text = "for a process within a budget, which may take ever so long (default: 120)"
    group.add_argument("--patience", type=float, default=120.0, metavar="SECONDS", help=text)
    group.add_argument("--quick", action="store_true", help="one of each: figures to be looked at, not to be kept")


def _python(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UsageError(
            f"--python {text!r} does not name an engine and its interpreter.", "Write --python genai=PATH."
        )
    return name, path


def _budgets(text: str) -> tuple[int, ...]:
    if text == "none":
        return ()
    return tuple(parse_size(f"{part}MB" if part.isdecimal() else part) for part in names(text))


def _execute(args: argparse.Namespace) -> int:
    from edgeinfer.apps.bench.peers_figures import peers_json, peers_section
    from edgeinfer.apps.bench.peers_run import PeersRun
    from edgeinfer.apps.bench.render import section_markdown

    config = _config(args)
    require_place(args.json)
    models = _models(args)
    for _, path in args.python:
        _require_interpreter(path)
    runs: list[PeersRun] = []
    finished = True
    with progress_bar() as bar:
        try:
            for model in models:
                runs.append(PeersRun(model, config, bar or (lambda stage, done, total: None)))
                runs[-1].run()
        except KeyboardInterrupt:
            finished = False
    data = peers_json([run.figures() for run in runs], config)
    sys.stdout.write(section_markdown(peers_section(data)))
    write_results(args.json, "peers", data)
    if not finished:
        print_note("Interrupted: the figures are those of what was done.")
    return 0 if finished else 130


def _config(args: argparse.Namespace) -> PeersConfig:
    from edgeinfer.apps.bench.peers_figures import PeersConfig

    config = PeersConfig(
        pythons=dict(args.python),
        threads=args.threads,
        context=args.context,
        prompt=args.n_prompt,
        reply=args.n_gen,
        repeats=1 if args.quick else args.repeats,
        rounds=1 if args.quick else args.rounds,
        patience=args.patience,
    )
    if args.engines is not None:
        config = replace(config, engines=args.engines)
    return config if args.budgets is None else replace(config, budgets=args.budgets)


def _models(args: argparse.Namespace) -> list[PeerModel]:
    from edgeinfer.apps.bench.model_files import default_folder
    from edgeinfer.apps.bench.peers_models import BUILTIN, builtin_model, checkpoint_model, shape_model

    work = args.work or default_folder()
    wanted = args.models if args.models is not None else () if args.checkpoint else names(_MODELS)
    models = [builtin_model(work, resolve(None)) if name == BUILTIN else shape_model(work, name) for name in wanted]
    if args.checkpoint:
        models.append(checkpoint_model(work, args.checkpoint))
    if not models:
        raise UsageError("There is no model to compare engines on.", f"Give --models {_MODELS}.")
    return models


def _require_interpreter(path: str) -> None:
    """Refuses what does not run Python, before anything is made for it."""
    hint = "Give the python of an environment that has the engine."
    command = [path, "-c", _PROBE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"Cannot run {path}: {getattr(error, 'strerror', None) or 'it does not end'}.", hint
        ) from error
    if done.stdout.strip() != "it runs":
        raise UsageError(f"{path} is no Python interpreter.", hint)
