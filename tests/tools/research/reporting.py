"""How a comparison tells its figures: a line for each as it is measured, and all of them as JSON in the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer.errors import EdgeInferError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def report_figures(measured: Iterable[tuple[DataclassInstance, str]], out: Path | None) -> int:
    """Prints the line of each figure and writes the figures to a file, if one is named; the command's exit status.

    Args:
        measured: figures with their lines, as they are measured; a mistake of the user's ends it with status 2.
    """
    figures = []
    try:
        for figure, line in measured:
            print(line, flush=True)
            figures.append(asdict(figure))
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return 2
    if out is not None:
        out.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return 0
