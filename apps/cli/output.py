"""What the command line writes in addition to a model's text: errors, tables, progress.

rich limits colour and bars to terminals, and respects NO_COLOR.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

Progress = Callable[[str, int, int], None]

_UNBOUNDED = 1_000_000  # columns; rich's default for files is 80


def print_error(text: str) -> None:
    """Print an error on stderr as one line."""
    # File names may contain bytes that are not text.
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode("utf-8")
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        console.print("[bold red]error:[/]", end=" ")
        console.print(line, markup=False, soft_wrap=True)
    else:
        # If stderr cannot be written, the exit code still tells.
        with contextlib.suppress(OSError):
            sys.stderr.write(f"error: {line}\n")


def print_note(text: str) -> None:
    """Print a note on stderr, dim on a terminal."""
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True, highlight=False).print(text, style="dim", markup=False, soft_wrap=True)
    else:
        sys.stderr.write(text + "\n")


def abandon_stdout() -> None:
    """Drop unwritten output, so that Python does not fail again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(data: Mapping[str, Any]) -> None:
    """Print a JSON object on stdout, escaped where its encoding lacks characters."""
    text = json.dumps(data, indent=2, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(data, indent=2)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_result(args: argparse.Namespace, facts: Mapping[str, Any], show: Callable[[], object]) -> int:
    """Print the facts as one object with --json, else what `show` prints; return the exit code 0."""
    if args.json:
        print_json(facts)
    else:
        show()
    return 0


def print_table(rows: Iterable[tuple[str, ...]], *, title: str = "", header: tuple[str, ...] = ()) -> None:
    """Print a table without borders on stdout. Header names of columns that no row has are left out."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0))
    body = [[Text(cell) for cell in row] for row in rows]
    for index in range(max(map(len, body), default=len(header))):
        name = header[index] if header else ""
        table.add_column(name, style="cyan" if index == 0 else "", no_wrap=index == 0, overflow="fold")
    for row in body:
        table.add_row(*row)
    # A file or pipe has no width: nothing is cut or folded.
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _UNBOUNDED)
    if title:
        console.print(title, style="bold", markup=False, soft_wrap=True)
    width = console.width if console.is_terminal else max(console.measure(table).maximum, 1)
    console.print(table, width=width, crop=False)


@contextlib.contextmanager
def progress_bar(*, enabled: bool = True) -> Iterator[Progress | None]:
    """Show a bar on stderr from the first call (stage, done, total) on; give None if stderr is not a terminal."""
    if not (enabled and sys.stderr.isatty()):
        yield None
        return
    with contextlib.ExitStack() as shown:
        update: list[Progress] = []

        def report(stage: str, done: int, total: int) -> None:
            if not update:
                update.append(_show_bar(shown))
            update[0](stage, done, total)

        yield report


def stage(bar: Progress | None, name: str) -> Callable[[int, int], None] | None:
    """The progress of one stage; None without a bar."""
    return None if bar is None else functools.partial(bar, name)


def _show_bar(shown: contextlib.ExitStack) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    bar = shown.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
    task = bar.add_task("")
    return lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)
