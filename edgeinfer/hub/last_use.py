"""When each model was last loaded, in a small file of the user's; keeping it never fails a load."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from edgeinfer.bundle.writing import write_file
from edgeinfer.errors import StorageError
from edgeinfer.user_folders import user_data

_FILE = "last_use.json"
# The oldest make room.
_MOST_MODELS = 500
_MOST_BYTES = 1_000_000


def note_use(path: Path) -> None:
    """Notes that a model was loaded now, as far as that can be kept."""
    with contextlib.suppress(OSError, StorageError, ValueError):
        uses = last_uses() | {str(path.resolve()): time.time()}
        latest = sorted(uses.items(), key=lambda use: use[1])[-_MOST_MODELS:]
        file = _file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(file, json.dumps(dict(latest), indent=0).encode("utf-8"), durable=False)


def last_uses() -> dict[str, float]:
    """Seconds since 1970 by resolved path."""
    try:
        file = _file()
        if file.stat().st_size > _MOST_BYTES:
            return {}
        data = json.loads(file.read_text("utf-8"))
    except (OSError, StorageError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {path: float(when) for path, when in data.items() if isinstance(when, int | float) and 0 < when < 1e11}


def _file() -> Path:
    return user_data() / "edgeinfer" / _FILE
