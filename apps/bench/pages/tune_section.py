"""The section of `edgeinfer tune --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from edgeinfer.apps.bench.render import Paragraph, Section, Table, commands, run_facts

__all__ = ["tune_section"]


def tune_section(data: Any) -> Section:
    """The usual settings beside the tuned ones, and the layers that draft."""
    device = data["device"]
    parts = [*(_device(device) if device else ()), *_layers(data)]
    facts = (("Threads", str(device["threads"])),) if device else ()
    return Section("What tuning gains", (*facts, *run_facts(data)), tuple(parts), commands(data))


def _device(device: Mapping[str, Any]) -> Iterator[Table | Paragraph]:
    rows = tuple(
        (name, f"{part['usual_ms']:.2f}", f"{part['tuned_ms']:.2f}", f"{part['ratio']:.2f}")
        for name, part in device["parts"].items()
    )
    yield Table("Milliseconds, as usual and as tuned, and how many times faster", ("", "usual", "tuned", "ratio"), rows)
    chosen = {name: value for name, value in device["settings"].items() if value not in (None, "")}
    kept = ", ".join(f"{name} {value}" for name, value in chosen.items())
    yield Paragraph(f"Kept: {kept}." if kept else "Nothing was better beyond doubt: the usual settings stay.")
    tried = tuple(
        (
            each["name"].replace("_", " "),
            str(each["value"]),
            "" if each["time_ratio"] is None else f"{each['time_ratio']:.2f}",
            each["outcome"],
        )
        for each in device["attempts"]
    )
    if tried:
        header = ("setting", "value", "time, of the usual", "outcome")
        yield Table("Settings that were tried", header, tried, words=("outcome",))


def _layers(data: Mapping[str, Any]) -> Iterator[Table]:
    names = {"exit": "leaving early", "skip": "skipping blocks"}
    rows = tuple(
        (words, f"{data[name]['matchness']:.1%}", f"{data[name]['predicted_speedup']:.2f}", _kept(data, name))
        for name, words in names.items()
        if name in data
    )
    if rows:
        yield Table("Layers that draft", ("", "guessed right", "predicted speed-up", "kept"), rows)


def _kept(data: Mapping[str, Any], name: str) -> str:
    return "yes" if data["kept"][name] else "no"
