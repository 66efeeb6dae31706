"""Tables and paragraphs, shown in a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.core.options import format_size

Facts = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Rows of figures; the first column names them, `words` names other columns of text, the caption says units."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Paragraph:
    """A sentence below the part before it."""

    text: str


Part = Table | Paragraph


@dataclass(frozen=True)
class Section:
    """The figures of one run; `facts` are names and values that they depend on, `commands` reproduce them."""

    title: str
    facts: Facts
    parts: tuple[Part, ...]
    commands: tuple[str, ...] = ()


def print_section(section: Section, machine: Facts = ()) -> None:
    """Print a section: title, facts, tables, paragraphs, and the machine."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(section.title, style="bold"), soft_wrap=True)
    if section.facts:
        facts = "; ".join(f"{name.lower()}: {value}" for name, value in section.facts)
        console.print(Text(facts), soft_wrap=True)
    console.print()
    for part in section.parts:
        if isinstance(part, Table):
            print_table(part)
        else:
            console.print(part.text, markup=False, soft_wrap=True)
    if machine:
        console.print("; ".join(value for _, value in machine), markup=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table at its full width: figures are never cut."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(table.caption, style="bold"), soft_wrap=True)
    shown = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(table.header):
        left = index == 0 or name in table.words
        shown.add_column(Text(name), style="cyan" if index == 0 else "", justify="left" if left else "right")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    width = Measurement.get(console, console.options.update(max_width=10_000), shown).maximum
    Console(highlight=False, width=width).print(shown)
    console.print()


def markdown(parts: Sequence[Part]) -> list[str]:
    """Tables and paragraphs as Markdown."""
    return [part.text if isinstance(part, Paragraph) else _table_markdown(part) for part in parts]


def _table_markdown(table: Table) -> str:
    rows = [f"| {' | '.join(cells)} |" for cells in (table.header, ["---"] * len(table.header), *table.rows)]
    return "\n".join([f"{table.caption}:", "", *rows])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] | None = None) -> str:
    """A Markdown table with padded columns; those in `left` are aligned left, the others right (None: no alignment)."""
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (
            cell.ljust(width) if left is None or index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if left is None or i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(map(line, (header, rule, *rows))) + "\n"


def run_facts(data: Mapping[str, Any]) -> Facts:
    """Facts about the model and settings of a run."""
    facts = {
        "Model": data.get("model_type"),
        "Size": format_size(data["model_size"]) if "model_size" in data else None,
        "Parameters": f"{data['model_n_params'] / 1e6:.1f} M" if "model_n_params" in data else None,
        "Engine": data.get("backends"),
        "Threads": data.get("n_threads"),
        "Cache": data.get("type_k"),
        "When": data.get("test_time"),
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def machine_facts(data: Any) -> Facts:
    """Facts about the machine and the library versions."""
    row = data[0] if isinstance(data, list) else data
    environment = row.get("environment") or {}
    libraries = [f"{name} {number}" for name, number in environment.get("libraries", {}).items()]
    python = environment.get("python")
    version = f"edgeinfer {row['edgeinfer']}" if "edgeinfer" in row else row.get("build_commit")
    facts = {
        "Processor": environment.get("processor", row.get("cpu_info")),
        "Cores": str(environment["cores"]) if "cores" in environment else None,
        "Memory": format_size(environment["memory_bytes"]) if "memory_bytes" in environment else None,
        "System": environment.get("system", row.get("platform")),
        "Version": version,
        "Libraries": ", ".join([f"python {python}", *libraries]) if python else None,
    }
    return tuple((name, str(value)) for name, value in facts.items() if value is not None)


def commands(data: Mapping[str, Any]) -> tuple[str, ...]:
    """The recorded command, if any."""
    return (data["command"],) if data.get("command") else ()
