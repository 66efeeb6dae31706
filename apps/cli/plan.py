"""`edgeinfer plan` and `devices`: whether a model fits and how fast it runs, and where models can run."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING

import edgeinfer
from edgeinfer.apps.cli.inputs import engine_of, engine_words, planned
from edgeinfer.apps.cli.options import CONVERTING, DRAFTING, MEMORY, add_model_option, add_options, given_options
from edgeinfer.apps.cli.output import print_json, print_result, print_table
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.core.errors import BudgetError
from edgeinfer.core.options import format_size
from edgeinfer.core.options.load import ENGINE_OPTIONS, LoadOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgeinfer import MemoryPlan
    from edgeinfer.apps.cli.parser import Subparsers
    from edgeinfer.core.results import DeviceFacts


_DESCRIPTION = """\
Show whether a model fits in memory, what it needs and how fast it runs, without loading it. The exit code is 4 if it
does not fit.

example:
  edgeinfer plan -m my-bundle --memory 600MB -c 4096
  edgeinfer plan -m my-bundle --curve
"""
_PLANNED = (*MEMORY, "parallel", *CONVERTING, *ENGINE_OPTIONS, *DRAFTING)
# Rows of the table and their terms; other terms have rows of their own.
_ROWS = {
    "weights": ("weights_packed", "weights_mapped", "experts", "routers"),
    "KV cache": ("kv", "overflow"),
    "other conversations": ("prefix_cache",),
    "replies side by side": ("sequences",),
    "drafting": ("drafting", "draft_model"),
    "working memory": ("activations", "session", "loading"),
    "tokenizer": ("tokenizer", "tokenizer_mapped"),
    "Python and libraries": ("interpreter", "objects", "libraries", "code"),
    "reserve": ("reserve",),
}
# Length of the longest bar in characters.
_BAR = 40


def add_plan(commands: Subparsers) -> None:
    parser = add_command(commands, "plan", execute, _DESCRIPTION)
    add_model_option(parser)
    add_options(parser, LoadOptions, _PLANNED)
    parser.add_argument("-v", "--verbose", action="store_true", help="show every term of the plan and every setting")
    parser.add_argument("--curve", action="store_true", help="show the speed that every budget gives, as bars")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    model, options = planned(args.model, given_options(args, _PLANNED))
    plan, engine = edgeinfer.plan(model, **options), engine_of(model, options)
    if args.json:
        print_json(plan.to_dict() | ({"gguf": engine} if engine else {}))
    else:
        _print_plan(plan)
        if engine:
            print(f"Runs on: {engine_words(engine)}.")
        elif model is not None:
            _print_quality(model)
        if args.curve:
            _print_curve(plan)
        if args.verbose:
            _print_terms(plan)
    return 0 if plan.fits else BudgetError.exit_code


def _print_plan(plan: MemoryPlan) -> None:
    """Print the verdict, what was given up for it, and a table of needs and alternatives."""
    print(_verdict(plan))
    if plan.draft_max and plan.fits:
        plain, drafted = _pace(plan.speed.plain_tokens_per_second), _pace(plan.speed.tokens_per_second)
        print(f"A text it has never seen: {plain} tokens/s plain, {drafted} expected with drafts.", end=" ")
        print("Text that repeats itself or its prompt comes faster.")
    if plan.fits and plan.given_up:
        print(f"Given up to fit: {'; '.join(plan.given_up)}.")
    if plan.hints:
        print(f"Possible with less: {'; '.join(plan.hints)}.")
    print()
    needs, choices = list(_needs(plan)), list(_choices(plan))
    width = max(len(size) for _, size in needs)
    rows = [
        (name, f"{size.rjust(width)}  ", *choice)
        for (name, size), choice in zip_longest(needs, choices, fillvalue=("", ""))
    ]
    print_table(rows, header=("memory", "", "if you changed one thing", "needs", "tokens/s"))
    if plan.footprint.device:
        own = [(name, format_size(size)) for name, size in plan.footprint.device.items()]
        layers = f", for {plan.configuration.gpu_layers} layers" if plan.configuration.gpu_layers else ""
        print_table(own, title=f"\nmemory of {plan.device}{layers}, which no budget counts")
    print()
    for line in _bounds(plan):
        print(line)
    if plan.disk is not None:
        print(_from_disk(plan))
    print(_basis(plan))


def _print_quality(model: str) -> None:
    """Print a converted model's bits and how far it is from the float model."""
    from edgeinfer import hub
    from edgeinfer.bundle.opening import open_bundle
    from edgeinfer.tools.checking import described

    for line in described(open_bundle(hub.resolve(model)).manifest):
        print(line)


def _verdict(plan: MemoryPlan) -> str:
    least = format_size(plan.minimum_bytes, up=True)
    if not plan.fits:
        return f"Does not fit in {_budget(plan)}: needs at least {least}."
    about = "" if plan.speed.measured else "about "
    device = "" if plan.device == "cpu" else f", on {plan.device}"
    runs = f"{about}{_pace(plan.speed.tokens_per_second)} tokens/s, context {plan.context}{device}"
    if plan.budget_bytes is None:
        less = f" (runs in {least} or more)" if plan.minimum_bytes < plan.planned_bytes else ""
        return f"Needs {format_size(plan.planned_bytes, up=True)}{less}: {runs}."
    return f"Fits in {_budget(plan)}: needs {format_size(plan.planned_bytes, up=True)}, {runs}."


def _budget(plan: MemoryPlan) -> str:
    assert plan.budget_bytes is not None, "without a budget everything fits"
    counted = "" if plan.counted == "resident" else " of anonymous memory"
    return format_size(plan.budget_bytes).replace(".0 ", " ") + counted


def _needs(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    known = {term for terms in _ROWS.values() for term in terms}
    pages = plan.terms if plan.counted == "resident" else plan.footprint.anonymous
    rows = _ROWS | {name.replace("_", " "): (name,) for name in pages if name not in known}
    for name, terms in rows.items():
        if size := sum(pages.get(term, 0) for term in terms):
            yield name, format_size(size)
    yield "total", format_size(plan.planned_bytes, up=True)


def _choices(plan: MemoryPlan) -> Iterator[tuple[str, ...]]:
    """List this plan and its alternatives."""
    own, ways = plan.speed, plan.useful_alternatives
    chosen = "this plan" if plan.fits else "smallest"
    yield chosen, format_size(plan.planned_bytes, up=True), _pace(own.tokens_per_second, measured=own.measured)
    for way in ways:
        pace = _pace(way.speed.tokens_per_second, measured=way.speed.measured)
        note = "" if way.fits or not plan.fits else ", does not fit"
        yield way.name, format_size(way.planned_bytes, up=True), pace + note


def _bounds(plan: MemoryPlan) -> Iterator[str]:
    """The smallest budgets at which drafting pays, and at which nearly all of the speed is there."""
    assert plan.curve is not None, "all ways were asked for"
    if pays := plan.curve.speculation_bytes:
        yield f"Drafting is faster than plain decoding from {format_size(pays, up=True)} on."
    if plan.curve.best_speed_bytes < plan.planned_bytes:
        yield f"95% of the best speed needs {format_size(plan.curve.best_speed_bytes, up=True)}."


def _from_disk(plan: MemoryPlan) -> str:
    """The effect of weights that do not all stay in memory."""
    disk = plan.disk
    assert disk is not None, "only then is there something to say"
    size, room = format_size(disk.weights), format_size(disk.room)
    begin = f"Of {size} of weights this system can keep {room}, and tokens wait for its disk"
    if disk.rate is None:
        usual = format_size(round(disk.taken_rate))
        return f"{begin}, which is taken to give {usual} a second, as it was not measured."
    return f"{begin}, which gave {format_size(round(disk.rate))} a second."


def _print_curve(plan: MemoryPlan) -> None:
    """Print a bar for each budget at which the speed changes."""
    assert plan.curve is not None, "all ways were asked for"
    points = plan.curve.points
    best = max(point.tokens_per_second for point in points)
    # Steps too small to see are left out, except the last.
    shown = [
        point
        for point, after in zip_longest(points, points[1:])
        if after is None or abs(after.tokens_per_second - point.tokens_per_second) >= best / _BAR
    ]
    rows = [
        (
            format_size(point.budget_bytes, up=True),
            _pace(point.tokens_per_second, measured=plan.speed.measured),
            "#" * max(1, round(_BAR * point.tokens_per_second / best)),
            point.summary,
        )
        for point in shown
    ]
    print_table(rows, title=f"\nspeed by budget, context {plan.context}", header=("budget", "tokens/s", "", "with"))


def _pace(tokens_per_second: float, *, measured: bool = True) -> str:
    return f"{'' if measured else '~'}{tokens_per_second:.{0 if tokens_per_second >= 100 else 1}f}"


def _basis(plan: MemoryPlan) -> str:
    measured = [plan.speed.measured, *(way.speed.measured for way in plan.useful_alternatives)]
    if all(measured):
        return "Speeds come from passes timed on this device."
    if any(measured):
        return "Speeds come from passes timed on this device; those marked ~ are estimates."
    return "Speeds are estimates until the model has run on this device."


def _print_terms(plan: MemoryPlan) -> None:
    """Print every term and setting of the plan."""
    rows = [(name.replace("_", " "), format_size(size), _kind(plan, name)) for name, size in plan.terms.items() if size]
    print_table(rows, title="\nterms")
    choice = plan.configuration
    settings = {
        "KV cache data type": choice.kv,
        "weights": choice.weights,
        # GGUF models, which include their tokenizer, have no layouts.
        "layout": "" if choice.tokenizer == "model" else plan.layout,
        "tokenizer": choice.tokenizer,
        "drafters": ", ".join(choice.drafters),
        "draft tokens": str(choice.draft_max),
        "threads": _tuned(plan, "threads"),
        "prompt tokens per pass": _tuned(plan, "prefill_chunk"),
        "device": plan.device,
        "layers on the device": str(choice.gpu_layers or ""),
    }
    print_table([(name, value) for name, value in settings.items() if value], title="\nsettings")
    if plan.not_chosen:
        print_table(list(plan.not_chosen.items()), title="\nKV caches that are not chosen unless asked for")


def _kind(plan: MemoryPlan, term: str) -> str:
    if not plan.footprint.file.get(term):
        return ""
    return "mapped from files" if not plan.footprint.anonymous.get(term) else "partly mapped from files"


def _tuned(plan: MemoryPlan, name: str) -> str:
    return f"{getattr(plan, name)}{' (tuned)' if name in plan.tuned else ''}"


_DEVICES_DESCRIPTION = """\
List the devices that models can run on, whether they are available here, and whether a small model gives the same
results on them as on the CPU. `--device NAME` selects one; `auto`, the default, uses the first one that runs the model.

example:
  edgeinfer devices
"""
_WORDS = {
    "in_place_kv": "in-place KV cache",
    "quantized_kv": "int8 and int4 KV caches",
    "branches": "branches",
    "tree_bias": "draft trees",
    "custom_ops": "native kernel",
}

_RUNS = {"all": "all bundles", "static": "static bundles", "gguf": "GGUF files"}


def add_devices(commands: Subparsers) -> None:
    parser = add_command(commands, "devices", _devices, _DEVICES_DESCRIPTION)
    parser.add_argument(
        "--no-check", action="store_true", help="only look for devices, without running anything on them"
    )
    add_json_option(parser)


def _devices(args: argparse.Namespace) -> int:
    devices = edgeinfer.list_devices(check=not args.no_check)
    rows = []
    for d in devices:
        traits = ", ".join(_WORDS[name] for name, there in d.traits.items() if there) or "fixed shapes"
        rows.append((d.name, _state(d), d.check, _RUNS[d.bundles], traits, d.tried))
    show = partial(print_table, rows, header=("device", "here", "check", "runs", "with", "tried"))
    return print_result(args, {"devices": [dataclasses.asdict(device) for device in devices]}, show)


def _state(device: DeviceFacts) -> str:
    if device.installed:
        return (device.description or "yes") if device.hardware else "no hardware"
    return f"needs {device.package}" + ("" if device.plugin else " in place of onnxruntime")
