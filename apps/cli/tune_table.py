"""What tuning found, as tables and as data; knows nothing of how it was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgeinfer.apps.cli.output import print_table

if TYPE_CHECKING:
    from edgeinfer import DeviceTuning, TuneResult

__all__ = ["device_facts", "layer_facts", "print_compute", "print_device", "print_layers"]

# Threads of other programs that disturb what is measured.
_BUSY = 1.0
# How a part of the work is called, and whether it is shown as a speed.
_PARTS = {
    "prompt": ("prompt", True),
    "decode": ("plain reply", True),
    "verify": ("pass that verifies", False),
    "turn": ("turn of 64 + 128 tokens", False),
    "load": ("loading", False),
}


def print_device(tuning: DeviceTuning, out: Path | None) -> None:
    """What was found on the device, what it gained, and where it is now: in the file asked for, or kept."""
    rows = [
        (_PARTS[name][0], _shown(name, part.usual_ms), _shown(name, part.tuned_ms), f"{part.ratio:.2f}x")
        for name, part in tuning.parts.items()
    ]
    print_table(rows, title="on this device", header=("", "usual", "tuned", "faster"))
    where = [] if tuning.path is None else [("written to", str(out)) if out else ("kept", "for this user's next loads")]
    if tuning.busy is not None and tuning.busy > _BUSY:
        text = f"{tuning.busy:.1f} threads of other programs ran when it began; tune again on a machine at rest"
        where.append(("busy", text))
    print_table([("settings", _settings(tuning)), *where])
    tried = [
        (f"{_words(each.name)} {each.value}", each.outcome, "" if each.ratio is None else f"{1 / each.ratio:.2f}x")
        for each in tuning.attempts
    ]
    if tried:
        print_table(tried, title="tried", header=("", "", "faster"))


def _shown(part: str, ms: float) -> str:
    return f"{1e3 / ms:.1f} tokens/s" if _PARTS[part][1] else f"{ms:.2f} ms"


def _settings(tuning: DeviceTuning) -> str:
    chosen = _named(tuning.settings)
    if chosen:
        return chosen
    if tuning.rejected is not None:
        return f"as usual: {_named(tuning.rejected)} looked better, but not when proved together"
    return "as usual: nothing else was better beyond doubt"


def _named(settings: Any) -> str:
    return ", ".join(f"{_words(name)} {getattr(settings, name)}" for name in settings.names)


def _words(name: str) -> str:
    return name.replace("_", " ")


def device_facts(tuning: DeviceTuning) -> dict[str, Any]:
    """The same as data."""
    return {
        "settings": tuning.settings.to_dict(),
        "threads": tuning.threads,
        "parts": {
            name: {"usual_ms": part.usual_ms, "tuned_ms": part.tuned_ms, "ratio": part.ratio}
            for name, part in tuning.parts.items()
        },
        "attempts": [
            {"name": each.name, "value": each.value, "outcome": each.outcome, "time_ratio": each.ratio}
            for each in tuning.attempts
        ],
        "rejected": None if tuning.rejected is None else tuning.rejected.to_dict(),
        "busy": tuning.busy,
        "seconds": tuning.seconds,
        "path": None if tuning.path is None else str(tuning.path),
    }


def print_layers(result: TuneResult) -> None:
    """The layers that draft."""
    rows = [
        ("exit after layer", f"{result.exit.layers}"),
        ("  matchness", f"{result.exit.matchness:.3f}"),
        ("  predicted speed-up", _gain(result.exit.speedup, result.tuning.exit_layer is not None)),
        ("blocks skipped", f"{int((~result.skip.layer_mask).sum())} of {len(result.skip.layer_mask)}"),
        ("  matchness", f"{result.skip.matchness:.3f}"),
        ("  predicted speed-up", _gain(result.skip.speedup, result.tuning.layer_mask is not None)),
        ("sets tried", f"{result.skip.evaluations}"),
    ]
    print_table(rows, title="drafting with the model's own layers")


def _gain(speedup: float, kept: bool) -> str:
    return f"{speedup:.2f}x, {'kept for auto' if kept else 'does not pay'}"


def print_compute(found: Mapping[str, Any]) -> None:
    """What answers can leave out, as data of `edgeinfer tune --json`."""
    if "skip" in found:
        rows = [
            (f"{level['speedup']:.2f}x", f"{level['divergence']:.4f}", _blocks(level["layer_mask"]))
            for level in found["skip"]
        ]
        header = ("faster", "divergence, nats", "layers (# whole, a attention only, m MLP only, . none)")
        print_table(rows, title="blocks that answers can skip, for --compute calibrated", header=header)
    if "entropy" in found:
        shares = [(f"{share:.0%}", f"{bits:.2f}") for share, bits in found["entropy"]["thresholds"].items()]
        title = "thresholds of --compute entropy to begin with"
        print_table(shares, title=title, header=("large model's share", "bits"))


def _blocks(mask: Sequence[bool]) -> str:
    """A letter for each layer."""
    names = {(True, True): "#", (True, False): "a", (False, True): "m", (False, False): "."}
    return "".join(names[pair] for pair in zip(mask[::2], mask[1::2], strict=True))


def layer_facts(result: TuneResult) -> dict[str, Any]:
    """The same as data."""
    found = {"exit": result.exit, "skip": result.skip}
    data: dict[str, Any] = {
        name: {
            "layers": each.layers,
            "layer_mask": each.layer_mask.tolist(),
            "matchness": each.matchness,
            "predicted_speedup": each.speedup,
            "draft_length": each.length,
            "sets_tried": each.evaluations,
        }
        for name, each in found.items()
    }
    data["kept"] = {"exit": result.tuning.exit_layer is not None, "skip": result.tuning.layer_mask is not None}
    return data
