"""Renders conversations of all shapes with the chat templates of a folder: `python -m tests.tools.published_templates
FOLDER`. Prints how many texts are those of transformers, how many needed another form, and what was refused; and names
every text that differs, and every mark that is missing.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from tests.runtime.text.template_shapes import SHAPES, judged

__all__ = ["main"]


def main(folder: Path) -> None:
    """Prints the counts."""
    counts: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.jinja")):
        own: Counter[str] = Counter()
        for shape in SHAPES:
            for verdict in judged(path.read_text("utf-8"), shape):
                own[verdict.kind] += 1
                if verdict.kind in ("differs", "incomplete", "unnamed"):
                    print(f"{path.name}: {shape.name}: {verdict.kind}: {verdict.detail}")
        counts += own
        print(path.name, dict(own))
    print(dict(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
