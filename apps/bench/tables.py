"""Prints a table of figures on the terminal; knows nothing of what they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["print_table"]


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str] = ()) -> None:
    """A table as wide as it is: a figure cut short is no figure.

    Args:
        words: names of columns that hold words, besides the first, and are aligned as such.
    """
    console = Console(highlight=False)
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(header):
        left = index == 0 or name in words
        table.add_column(Text(name), style="cyan" if index == 0 else "", justify="left" if left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
    Console(highlight=False, width=width).print(table)
    console.print()
