"""Reads the text of a PDF file in a process of its own, whose memory is bounded and which can be ended at any moment:

    python -m edgeinfer.apps.desktop.pdf_text CHARACTERS < FILE

It writes one line of JSON: `pages` and `text`, or a `refusal` that documents.py puts into words."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from typing import Any

# Virtual memory: Python takes a quarter of it, and a page of text a few megabytes.
_MOST_MEMORY = 1_200_000_000
_MOST_PAGES = 1000


def main(characters: int) -> int:
    """Read a PDF from standard input; refuse more than so many characters."""
    _bound_memory()
    # pypdf's warnings about imperfect files are useless here.
    logging.disable(logging.CRITICAL)
    try:
        said = _read(sys.stdin.buffer.read(), characters)
    except MemoryError:
        said = {"refusal": "memory"}
    except Exception:  # of any kind: the file is untrusted
        said = {"refusal": "damaged"}
    sys.stdout.write(json.dumps(said) + "\n")
    return 0


def _read(data: bytes, characters: int) -> dict[str, Any]:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError

    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            return {"refusal": "locked"}
        pages = len(reader.pages)
        if pages > _MOST_PAGES:
            return {"refusal": "pages", "most": _MOST_PAGES, "pages": pages}
        found: list[str] = []
        length = 0
        for page in reader.pages:
            text = page.extract_text().strip()
            length += len(text)
            if length > characters:
                return {"refusal": "long"}
            found.append(text)
    except (DependencyError, FileNotDecryptedError):
        return {"refusal": "locked"}
    return {"pages": pages, "text": "\n\n".join(text for text in found if text)}


def _bound_memory() -> None:
    """Limit this process's memory where the system can; elsewhere the parent watches it."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
