"""`edgeinfer bench report`: results of benchmarks and of `edgeinfer tune` as one page, each by what is in its file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgeinfer.apps.bench.registry import BENCHMARKS
from edgeinfer.apps.bench.render import (
    Facts,
    Paragraph,
    Section,
    Table,
    commands,
    common,
    machine_facts,
    page_html,
    run_facts,
)
from edgeinfer.errors import UsageError

_MOST_BYTES = 256 * 1024**2


def read_section(path: Path) -> tuple[Section, Facts]:
    """The section of a file that a benchmark wrote, and the facts of its machine."""
    hint = "Give JSON files that edgeinfer bench and edgeinfer tune wrote."
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(f"{path} is too large.", hint)
        data = json.loads(path.read_text(encoding="utf-8"))
        kind, sections = _kind(data), {each.key: each.section for each in BENCHMARKS} | {"tune": tune_section}
        if kind not in sections:
            raise UsageError(f"{path} is not what a benchmark wrote.", hint)
        return sections[kind](data), machine_facts(data)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror}.", hint) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, StopIteration) as error:
        raise UsageError(f"{path} is not what a benchmark wrote ({error}).", hint) from error


def _kind(data: Any) -> str:
    """The benchmark that data say they are of. Lists are of speed, whose form is llama-bench's."""
    if isinstance(data, list):
        return "speed"
    if "benchmark" not in data and "device" in data and "kept" in data:
        return "tune"  # the command's own output, which has no header
    return str(data.get("benchmark"))


def report_html(paths: Sequence[Path], title: str, lead: str) -> str:
    """The page of these files, in order; errors as `read_section`."""
    found = [read_section(path) for path in paths]
    shared = common([facts for _, facts in found])
    # What is the same everywhere stands once; what is not stands where it belongs.
    sections = [
        replace(section, facts=(*section.facts, *(fact for fact in facts if fact not in shared)))
        for section, facts in found
    ]
    return page_html(title, lead, sections, shared)


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
