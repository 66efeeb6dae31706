"""`edgeinfer distill heads`, `acceptance` and `routers`: what is trained beside a model and kept in its bundle."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer import hub
from edgeinfer.apps.cli.distill_drafter import repliers
from edgeinfer.apps.cli.distill_training import (
    add_training_options,
    given,
    report,
    require_free,
    torch_needed,
    working_folder,
)
from edgeinfer.apps.cli.output import print_note, progress_bar
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.errors import UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Parser, Subparsers
    from edgeinfer.bundle.additions import Heads
    from edgeinfer.export.training.heads import HeadsTraining


_HEADS = (
    "Train small heads that predict further tokens from a model's hidden states: Medusa heads, one "
    "per position; Hydra heads,\nwhich also see the tokens drafted so far; or prompt tokens (PPD), "
    "embeddings that the model's own passes evaluate. They\nbecome part of the bundle and draft "
    "whenever it is loaded. Replies stay exactly the same.\nNeeds an extra: pip install "
    "'edgeinfer[train]'.\n\nexamples:\n  edgeinfer distill heads my-bundle my-bundle-with-heads --kind "
    "hydra --text texts.jsonl\n  edgeinfer distill heads my-bundle my-bundle --kind prompt --text "
    "texts.jsonl --steps 300\n"
)
_ACCEPTANCE = (
    "Train an acceptance predictor, a head that predicts whether a drafter's next token will be "
    "accepted (SpecDec++). It\nbecomes part of the drafter's bundle and decides how long drafts "
    "are.\nNeeds an extra: pip install 'edgeinfer[train]'.\n\nexample:\n  edgeinfer distill acceptance "
    "my-drafter my-drafter-2 --target my-bundle --text texts.jsonl\n"
)
_ROUTERS = (
    "Train routers that decide from a prompt which layers its reply needs (FiRST), for --compute "
    "routers. Replies that skip\nlayers are faster, but differ from the whole model's.\nNeeds an "
    "extra: pip install 'edgeinfer[train]'.\n\nexample:\n  edgeinfer distill routers my-bundle "
    "my-bundle-2 --text texts.jsonl --keep 0.75\n"
)
_MEASURED_PROMPTS = 12


def add_heads_parsers(commands: Subparsers) -> None:
    """Adds the three subcommands."""
    parser = add_command(commands, "heads", _execute, _HEADS, help="heads that draft from a model's hidden states")
    _add_bundles(parser, "TARGET", "bundle directory, or hub id, of the model (tales is the built-in one)")
    text = "what to train: medusa, hydra, or prompt (PPD)"
    parser.add_argument("--kind", choices=("medusa", "hydra", "prompt"), required=True, help=text)
    parser.add_argument("--count", type=int, metavar="N", help="number of tokens to predict ahead (default: 3)")
    text = "number of tokens to choose from, the most frequent ones (default: all; with hydra 1024)"
    parser.add_argument("--tokens", type=int, metavar="N", help=text)
    _add_training(parser, "a tenth of what the training reads")
    parser = add_command(commands, "acceptance", _execute, _ACCEPTANCE, help="an acceptance predictor for a drafter")
    _add_bundles(parser, "DRAFTER", "bundle directory of the draft model")
    text = "model that it drafts for: bundle or checkpoint directory, or hub id"
    parser.add_argument("--target", dest="model", metavar="MODEL", required=True, help=text)
    _add_training(parser)
    parser.set_defaults(kind="acceptance")
    parser = add_command(commands, "routers", _execute, _ROUTERS, help="routers that choose layers for each prompt")
    _add_bundles(parser, "TARGET", "bundle directory, or hub id, of the model (tales is the built-in one)")
    text = "average share of layers to keep (default: 0.75)"
    parser.add_argument("--keep", type=float, metavar="X", help=text)
    text = "directory of a LoRA adapter to make as well, which makes up for the layers that are left out"
    parser.add_argument("--lora", type=Path, metavar="DIR", help=text)
    text = "rank of that adapter (default: 8)"
    parser.add_argument("--lora-rank", type=int, metavar="N", default=8, help=text)
    _add_training(parser)
    parser.set_defaults(kind="routers")


def _add_bundles(parser: Parser, name: str, text: str) -> None:
    parser.add_argument("target", metavar=name, help=text)
    text = f"bundle directory to make, a copy of {name}; or {name} itself, to replace what it has"
    parser.add_argument("out", metavar="OUT", type=Path, help=text)


def _add_training(parser: Parser, samples: str = "none") -> None:
    add_training_options(parser)
    text = f"number of tokens that the model writes as additional training text (default: {samples})"
    parser.add_argument("--samples", type=int, metavar="N", help=text)
    add_json_option(parser)


def _execute(args: argparse.Namespace) -> int:
    """Runs any of the three."""
    source = hub.find(args.target)
    if not hub.is_bundle(source):
        raise UsageError(f"{args.target} is not a bundle, and only bundles can contain heads.", "Export it first.")
    adapter: Path | None = getattr(args, "lora", None)
    in_place = args.out.exists() and args.out.resolve() == source.resolve()
    if not in_place:
        require_free(args.out)
    if adapter is not None:
        if args.lora_rank < 1:
            raise UsageError(
                f"--lora-rank {args.lora_rank} trains no adapter.", "Give at least 1, or leave out --lora."
            )
        if adapter.resolve() == args.out.resolve():
            raise UsageError("--lora and OUT are the same directory.", "Give the adapter a directory of its own.")
        require_free(adapter)
    with torch_needed():
        from edgeinfer.export.training.heads import HeadsOptions, train_heads
        from edgeinfer.export.training.models import load_target
        from edgeinfer.export.training.text import TextSource
        from edgeinfer.export.training.trainer import find_device

        own = {name: getattr(args, name, None) for name in ("count", "tokens", "keep", "samples")}
        if adapter is not None:
            own["adapter_rank"] = args.lora_rank
        options = HeadsOptions(args.kind, **given(args), **{n: value for n, value in own.items() if value is not None})
        device = find_device(options.device)
        judged = args.kind == "acceptance"
        model = hub.find(args.model) if judged else source
        target, drafter = load_target(model, device), load_target(source, device) if judged else None
        text = TextSource(tuple(args.text), target)
        with working_folder(args) as work, progress_bar(enabled=not args.json) as bar, repliers(model) as replier:
            trained = train_heads(target, text, options, work, drafter=drafter, replier=replier, progress=bar)
            _keep(source, args.out, trained.heads, in_place=in_place)
            if adapter is not None and trained.adapter is not None:
                trained.adapter.save(adapter)
        places = {"bundle": str(args.out)} | ({} if adapter is None else {"adapter": str(adapter)})
        facts = places | trained.facts() | _measured(args, trained)
    _report(args, trained, facts)
    return 0


def _keep(source: Path, out: Path, heads: Heads, *, in_place: bool) -> None:
    from edgeinfer.bundle.additions import add_heads, copy_with_heads

    if in_place:
        add_heads(out, heads)
    else:
        copy_with_heads(source, out, heads)


def _measured(args: argparse.Namespace, trained: HeadsTraining) -> dict[str, Any]:
    """Measures on the engine what heads that draft gain."""
    from edgeinfer.tools.distilling import measure_drafter

    if args.kind in ("acceptance", "routers"):
        return {}
    prompts = [prompt.tolist() for prompt in trained.prompts[:_MEASURED_PROMPTS]]
    return {"engine": asdict(measure_drafter(args.out, None, prompts, who=args.kind))}


def _report(args: argparse.Namespace, trained: HeadsTraining, facts: dict[str, Any]) -> None:
    from edgeinfer.bundle.additions import JUDGED, TRUSTED

    rows: list[tuple[str, ...]] = [("on test text", "before", "after")]
    for name, value in trained.after.items():
        before = trained.before.get(name)
        rows.append((name, "" if before is None else f"{before:.3f}", f"{value:.3f}"))
    if engine := facts.get("engine"):
        rows.append(("accepted tokens per pass", "1.00", f"{engine['mean_accepted_length']:.2f}"))
        rows.append(("speed", "1.00", f"{engine['speedup']:.2f}"))
    report(args, facts, rows)
    judged, trusted = (trained.after.get(name, 0.0) for name in (JUDGED, TRUSTED))
    if not args.json and judged < trusted:
        print_note(
            f"The drafter's own probabilities predict acceptance better. Draft with {args.target}, or train for longer."
        )
    if not args.json and args.kind == "routers":
        adapted = "" if args.lora is None else f" --lora skips={args.lora} --adapter skips"
        print_note(f"Use them: edgeinfer run -m {args.out} --compute routers{adapted} PROMPT")
