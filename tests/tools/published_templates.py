"""Renders conversations of all shapes with the chat templates of a folder: `python -m tests.tools.published_templates
FOLDER [EVERY]`, the latter for one shape of so many. Prints how many texts are those of transformers, how many needed
another form, and what was refused; and names every text that differs, and every mark that is missing.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from edgeinfer.runtime.text.template import ChatTemplate
from tests.runtime.text.template_shapes import SHAPES, TOKENS, judged


def main(folder: Path, every: int = 1) -> None:
    """Prints the counts."""
    counts: Counter[str] = Counter()
    for number, path in enumerate(sorted(folder.rglob("*.jinja"))):
        own: Counter[str] = Counter()
        source = path.read_text("utf-8")
        template = ChatTemplate(source, TOKENS)
        for shape in SHAPES[number % every :: every]:
            for verdict in judged(source, shape, template):
                own[verdict.kind] += 1
                if verdict.kind in ("differs", "incomplete", "unnamed"):
                    print(f"{path.name}: {shape.name}: {verdict.kind}: {verdict.detail}")
        template.close()
        counts += own
        print(path.name, dict(own), flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
