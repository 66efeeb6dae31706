"""Figures of speed as text: llama-bench's table in Markdown, CSV, JSON, JSON lines; knows nothing of how they arose."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence

from edgeinfer.apps.bench.speed import SpeedResult
from edgeinfer.config import format_size

__all__ = ["FORMATS", "speed_text"]

_HEADER = ("model", "size", "params", "backend", "threads", "test", "t/s")


def speed_text(results: Sequence[SpeedResult], form: str) -> str:
    """The results in one of FORMATS, ending in a newline."""
    return FORMATS[form](results)


def _markdown(results: Sequence[SpeedResult]) -> str:
    rows = []
    for result in results:
        data = result.to_dict()
        speed = f"{data['avg_ts']:.2f} ± {data['stddev_ts']:.2f}"
        parameters = f"{data['model_n_params'] / 1e6:.2f} M"
        model, size = data["model_type"], format_size(data["model_size"])
        rows.append((model, size, parameters, data["backends"], str(data["n_threads"]), data["test"], speed))
    widths = [max(map(len, column)) for column in zip(_HEADER, *rows, strict=True)]
    left = (0, 3)

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "| " + " | ".join(padded) + " |"

    ruler = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(map(line, (_HEADER, ruler, *rows))) + "\n"


def _csv(results: Sequence[SpeedResult]) -> str:
    out = io.StringIO()
    rows = [{k: v for k, v in result.to_dict().items() if not k.startswith("samples")} for result in results]
    writer = csv.DictWriter(out, list(rows[0]), quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _json(results: Sequence[SpeedResult]) -> str:
    return json.dumps([result.to_dict() for result in results], indent=2) + "\n"


def _jsonl(results: Sequence[SpeedResult]) -> str:
    return "".join(json.dumps(result.to_dict()) + "\n" for result in results)


FORMATS: dict[str, Callable[[Sequence[SpeedResult]], str]] = {
    "md": _markdown,
    "csv": _csv,
    "json": _json,
    "jsonl": _jsonl,
}
