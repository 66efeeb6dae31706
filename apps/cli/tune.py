"""`edgeinfer tune`: finds how a model runs fastest on this device."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgeinfer
from edgeinfer.apps.cli.inputs import read_text
from edgeinfer.apps.cli.options import add_load_options, load_model, load_options
from edgeinfer.apps.cli.output import print_note, print_result, print_table, progress_bar, stage
from edgeinfer.apps.cli.parser import add_command, add_json_option
from edgeinfer.core.errors import CapabilityError, UsageError

if TYPE_CHECKING:
    from edgeinfer.apps.cli.parser import Subparsers
    from edgeinfer.tools import CacheTuning, DeviceTuning, DrafterGain, DraftersTuning, TuneResult


def tune_cache(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Measure what policies for full contexts lose on a text."""
    text = None if args.text is None else read_text(args.text)
    with progress_bar() as bar:
        found = edgeinfer.tools.tune_cache(args.model, text, progress=stage(bar, "readings"), **options)
    return print_result(args, asdict(found), partial(_print_cache, found))


def tune_steering(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Learn a steering vector."""
    if args.text is None:
        raise UsageError("--steering learns from a text.", "Name one with --text.")
    text = read_text(args.text)
    with progress_bar() as bar:
        tokens = stage(bar, "tokens")
        found = edgeinfer.tools.tune_steering(args.model, args.steering, text, progress=tokens, **options)
    rows = [
        ("vector", f"{found.name}, of {found.entries} tokens"),
        ("validation", f"{found.plain:.3f} nats a token, {found.steered:.3f} with it, over {found.tokens} tokens"),
    ]
    return print_result(args, asdict(found), partial(print_table, rows))


def _print_cache(found: CacheTuning) -> None:
    rows = []
    for loss in (found.whole, *found.losses):
        text, copying, needles = (f"{each.perplexity:.2f}" for each in loss.kinds)
        shares = f"{loss.copying.share:.0%}", f"{loss.needles.share:.0%}"
        name = "all of the text" if loss is found.whole else loss.policy
        rows.append((name, str(loss.context), text, copying, shares[0], needles, shares[1]))
    header = ("overflow", "context", "text", "copied", "", "needles", "")
    title = f"perplexity over {found.kept.tokens} tokens, and how many were foreseen"
    print_table(rows, title=title, header=header)
    kept = found.kept
    facts = [("auto takes", f"{kept.policy}, which is lossy")]
    facts += [("it loses", f"{kept.text:.3f} nats on text, {kept.copying:.3f} copying, {kept.needles:.3f} on needles")]
    facts += [(f"no {name}", why) for name, why in found.unusable.items()]
    print_table(facts)


_DESCRIPTION = """\
Find the fastest settings for a model on this device and keep those that are clearly faster than the defaults: number
and placement of threads, prompt tokens per pass, where the weights are kept, and the layer to leave after in drafts.
Options given here, such as -t, are not tuned.

examples:
  edgeinfer tune -m my-bundle --drafters --text prompts.txt
  edgeinfer tune -m my-bundle --draft-model my-small-bundle --skip --entropy
"""


def add_tune(commands: Subparsers) -> None:
    parser = add_command(commands, "tune", execute, _DESCRIPTION)
    add_load_options(parser)
    group = parser.add_argument_group("device")
    text = "measure for seconds, which misses small gains"
    group.add_argument("--quick", action="store_true", help=text)
    text = "write the settings to FILE, for use with --profile FILE, instead of keeping them for this user"
    group.add_argument("--out", type=Path, metavar="FILE", help=text)
    text = "delete the settings kept for this model, and do nothing else"
    group.add_argument("--forget", action="store_true", help=text)
    group = parser.add_argument_group("reduced compute (lossy); with any of these, nothing else is tuned")
    text = "find the blocks that can be skipped with the least loss, for --compute calibrated"
    group.add_argument("--skip", action="store_true", help=text)
    text = "measure how uncertain --draft-model is about this model's replies, for --compute entropy"
    group.add_argument("--entropy", action="store_true", help=text)
    group = parser.add_argument_group("steering")
    text = "learn from --text a vector of this name that moves replies towards such texts, and put it into the model's "
    group.add_argument("--steering", metavar="NAME", help=text + "bundle, for --steering NAME:X of replies")
    group = parser.add_argument_group("full contexts (lossy)")
    text = "measure what each --overflow loses of --text, else of the model's own text, for --overflow auto; nothing "
    group.add_argument("--cache", action="store_true", help=text + "else is tuned")
    group = parser.add_argument_group("drafters, and the layer that drafting leaves after")
    text = "measure each drafter on the replies to --text, and let auto ask those that pay; nothing else is tuned"
    group.add_argument("--drafters", action="store_true", help=text)
    text = "UTF-8 file with a prompt on each line (default: a few built-in prompts); or one text to learn from"
    group.add_argument("--text", type=Path, metavar="FILE", help=text)
    text = "number of consecutive layers that are skipped or left together (default: 1)"
    group.add_argument("--granularity", type=int, default=1, metavar="N", help=text)
    text = "maximum number of sets of layers to try (default: 200)"
    group.add_argument("--evaluations", type=int, default=200, metavar="N", help=text)
    advanced = ("--granularity", "--evaluations", "--speculation", "--out", "--forget")
    parser.advanced(*advanced, "--steering")
    add_json_option(parser)


def execute(args: argparse.Namespace) -> int:
    options = load_options(args)
    if args.forget:
        return _forget(args, options)
    _require_one(args)
    if args.cache:
        return tune_cache(args, options)
    if args.steering is not None:
        return tune_steering(args, options)
    prompts = _prompts(args)
    if args.drafters:
        return _tune_drafters(args, options, prompts)
    if args.skip or args.entropy:
        return _tune_compute(args, options, prompts)
    device = _tune_device(args, options)
    layers = _tune_layers(args, options, prompts, device)
    facts = {} if layers is None else _layer_facts(layers)
    facts["device"] = None if device is None else _device_facts(device)

    def show() -> None:
        if device is not None:
            _print_device(device, args.out)
        if layers is not None:
            _print_layers(layers)
        else:
            print_table([("layers that draft", "none, as this backend cannot skip layers")])

    return print_result(args, facts, show)


def _require_one(args: argparse.Namespace) -> None:
    """Refuse goals that exclude each other."""
    named = ("cache", "drafters", "skip", "entropy", "steering")
    asked = [f"--{name}" for name in named if getattr(args, name) not in (None, False)]
    if len(asked) > 1 and set(asked) != {"--skip", "--entropy"}:
        raise UsageError(f"{' and '.join(asked)} cannot be tuned together.", "Run edgeinfer tune once for each.")


def _forget(args: argparse.Namespace, options: dict[str, Any]) -> int:
    options.pop("profile", None)
    forgotten = edgeinfer.tools.forget_tuning(args.model, **options)
    said = "Deleted the settings kept for this model." if forgotten else "No settings are kept for this model."
    return print_result(args, {"forgotten": forgotten}, partial(print_note, said))


def _tune_drafters(args: argparse.Namespace, options: dict[str, Any], prompts: list[str] | None) -> int:
    """Choose the drafters for auto."""
    with load_model(args.model, options) as model, progress_bar() as bar:
        found = edgeinfer.tools.tune_drafters(model, prompts, progress=stage(bar, "replies"))
    facts = asdict(found) | {"gains": [asdict(gain) | {"pays": gain.pays} for gain in found.gains]}
    return print_result(args, facts, partial(_print_drafters, found))


def _tune_compute(args: argparse.Namespace, options: dict[str, Any], prompts: list[str] | None) -> int:
    """Tune what replies may skip, and when a draft model may write them."""
    if args.entropy and "draft_model" not in options:
        raise UsageError("--entropy needs a draft model.", "Name one with --draft-model.")
    found: dict[str, Any] = {}
    with load_model(args.model, options) as model, progress_bar() as bar:
        if args.skip:
            sizes = {"granularity": args.granularity, "evaluations": 2 * args.evaluations}
            levels = edgeinfer.tools.tune_skips(model, prompts, **sizes, progress=stage(bar, "sets of blocks"))
            found["skip"] = [asdict(level) for level in levels]
        if args.entropy:
            found["entropy"] = asdict(edgeinfer.tools.tune_entropy(model, prompts))
    return print_result(args, found, partial(_print_compute, found))


def _prompts(args: argparse.Namespace) -> list[str] | None:
    """Read the prompts; refuse wrong options before measuring for minutes."""
    if args.granularity < 1 or args.evaluations < 1:
        message = "--granularity and --evaluations must be at least 1."
        raise UsageError(message, "Use larger numbers.")
    if args.text is None:
        return None
    prompts = [line for line in read_text(args.text).splitlines() if line.strip()]
    if not prompts:
        raise UsageError(f"{args.text} contains no prompts.", "Write a prompt on each line.")
    return prompts


def _tune_device(args: argparse.Namespace, options: dict[str, Any]) -> DeviceTuning | None:
    """Tune device settings; None if the backend has none."""
    with progress_bar() as bar:
        try:
            return edgeinfer.tools.tune_device(args.model, quick=args.quick, out=args.out, progress=bar, **options)
        except CapabilityError:
            return None


def _tune_layers(
    args: argparse.Namespace, options: dict[str, Any], prompts: list[str] | None, device: DeviceTuning | None
) -> TuneResult | None:
    """Load the tuned model and search; None if layers cannot be skipped."""
    tuned = options | ({} if args.out is None or device is None else {"profile": str(args.out)})
    with load_model(args.model, tuned) as model, progress_bar() as bar:
        try:
            searching = stage(bar, "searching layers")
            return edgeinfer.tools.tune_drafting(model, prompts, granularity=args.granularity, progress=searching)
        except CapabilityError:
            if device is None:
                raise
            return None


# Busy threads of other programs that disturb measurements.
_BUSY = 1.0
# Name of each part of the work, and whether it is shown as a speed.
_PARTS = {
    "prompt": ("prompt", True),
    "decode": ("plain reply", True),
    "verify": ("verification pass", False),
    "turn": ("turn of 64 + 128 tokens", False),
    "load": ("loading", False),
}


def _print_device(tuning: DeviceTuning, out: Path | None) -> None:
    """Print the settings found, their gain, and where they are kept."""
    rows = [
        (_PARTS[name][0], _shown(name, part.usual_ms), _shown(name, part.tuned_ms), f"{part.ratio:.2f}x")
        for name, part in tuning.parts.items()
    ]
    print_table(rows, title="on this device", header=("", "default", "tuned", "speedup"))
    kept = ("written to", str(out)) if out else ("kept", "for this user, from the next load on")
    where = [] if tuning.path is None else [kept]
    if tuning.busy is not None and tuning.busy > _BUSY:
        text = f"other programs kept {tuning.busy:.1f} threads busy at the start; tune again on an idle machine"
        where.append(("busy", text))
    print_table([("settings", _settings(tuning)), *where])
    tried = [
        (f"{_words(each.name)} {each.value}", each.outcome, "" if each.ratio is None else f"{1 / each.ratio:.2f}x")
        for each in tuning.attempts
    ]
    if tried:
        print_table(tried, title="tried", header=("", "", "speedup"))


def _shown(part: str, ms: float) -> str:
    return f"{1e3 / ms:.1f} tokens/s" if _PARTS[part][1] else f"{ms:.2f} ms"


def _settings(tuning: DeviceTuning) -> str:
    if chosen := _named(tuning.settings):
        return chosen
    if tuning.rejected is not None:
        return f"defaults: {_named(tuning.rejected)} looked faster, but not when checked together"
    return "defaults: nothing else was clearly faster"


def _named(settings: Any) -> str:
    return ", ".join(f"{_words(name)} {getattr(settings, name)}" for name in settings.names)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _device_facts(tuning: DeviceTuning) -> dict[str, Any]:
    """Figures for JSON."""
    return {
        "settings": asdict(tuning.settings),
        "threads": tuning.threads,
        "parts": {name: asdict(part) | {"ratio": part.ratio} for name, part in tuning.parts.items()},
        "attempts": [
            {"name": each.name, "value": each.value, "outcome": each.outcome, "time_ratio": each.ratio}
            for each in tuning.attempts
        ],
        "rejected": None if tuning.rejected is None else asdict(tuning.rejected),
        "busy": tuning.busy,
        "seconds": tuning.seconds,
        "path": None if tuning.path is None else str(tuning.path),
    }


def _print_layers(result: TuneResult) -> None:
    rows = [
        ("exit after layer", f"{result.exit.layers}"),
        ("  match rate", f"{result.exit.match_rate:.3f}"),
        ("  predicted speedup", _gain(result.exit.speedup, result.tuning.exit_layer is not None)),
        ("exits tried", f"{result.exit.evaluations}"),
    ]
    print_table(rows, title="drafting with the model's own layers")


def _gain(speedup: float, kept: bool) -> str:
    return f"{speedup:.2f}x, {'kept for auto' if kept else 'does not pay'}"


# Draft positions whose acceptance is printed.
_PLACES = 4


def _print_drafters(found: DraftersTuning) -> None:
    """Print the gain of each drafter, their joint gain, and which ones auto uses from now on."""
    rows = [(*_drafter_row(gain), "pays" if gain.pays else "") for gain in found.gains]
    if found.usual is not None:
        rows.append((*_drafter_row(found.usual), "until now"))
    if found.together is not None:
        rows.append((*_drafter_row(found.together), "that pay"))
    header = ("", "accepted by place", "tokens per pass", "ms per guess", "pass cost", "speedup", "least", "")
    print_table(rows, title=f"drafters, on {found.texts} texts", header=header)
    facts = [("plain decoding", f"{found.plain_ms:.2f} ms per token")]
    facts += [("auto uses", ", ".join(found.kept) or "none of them: it decodes plainly")]
    facts += [(f"no {name}", why) for name, why in found.unusable.items()]
    print_table(facts)


def _drafter_row(gain: DrafterGain) -> tuple[str, ...]:
    places = " ".join(f"{share:.0%}" for share in gain.acceptance[:_PLACES])
    return (
        gain.drafters,
        places or "no drafts",
        f"{gain.mean_accepted_length:.2f}",
        f"{gain.guess_ms:.3f}",
        f"{gain.pass_ratio:.2f}x",
        f"{gain.speedup:.2f}x",
        f"{gain.least_speedup:.2f}x",
    )


def _print_compute(found: Mapping[str, Any]) -> None:
    """Print what replies can skip."""
    if "skip" in found:
        rows = [
            (f"{level['speedup']:.2f}x", f"{level['divergence']:.4f}", _blocks(level["layer_mask"]))
            for level in found["skip"]
        ]
        header = ("faster", "divergence, nats", "layers (# all, a attention only, m MLP only, . none)")
        print_table(rows, title="blocks to skip, for --compute calibrated", header=header)
    if "entropy" in found:
        shares = [(f"{share:.0%}", f"{bits:.2f}") for share, bits in found["entropy"]["thresholds"].items()]
        title = "initial thresholds for --compute entropy"
        print_table(shares, title=title, header=("large model's share", "bits"))


def _blocks(mask: Sequence[bool]) -> str:
    """A letter per layer."""
    names = {(True, True): "#", (True, False): "a", (False, True): "m", (False, False): "."}
    return "".join(names[pair] for pair in zip(mask[::2], mask[1::2], strict=True))


def _layer_facts(result: TuneResult) -> dict[str, Any]:
    """Figures for JSON."""
    found = result.exit
    facts = {"layers": found.layers, "match_rate": found.match_rate, "predicted_speedup": found.speedup}
    facts |= {"draft_length": found.length, "exits_tried": found.evaluations}
    return {"exit": facts, "kept": {"exit": result.tuning.exit_layer is not None}}
