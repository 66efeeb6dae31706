"""Session files of a loaded model: its cache written to one, and taken over from one; knows nothing of messages."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from edgeinfer.errors import BackendError, UsageError
from edgeinfer.model_parts import ModelParts
from edgeinfer.runtime.kv_cache.session_file import SessionFile, write_session

__all__ = ["resume", "save"]

_log = logging.getLogger("edgeinfer")


def save(parts: ModelParts, path: Path, tokens: Sequence[int] | None = None, text: str = "") -> None:
    """Writes the tokens and rows that the cache holds.

    Args:
        tokens: only as far as both begin alike; None writes all.
        text: kept with them.

    Raises:
        StorageError: the place cannot be written, or the disk is full.
    """
    engine = parts.engine
    held = engine.cached_tokens if tokens is None else engine.cached_tokens[: engine.shared(tokens)]
    write_session(path, parts.origin, held, engine.backend.cache.snapshot, text)


def resume(parts: ModelParts, session: SessionFile) -> bool:
    """Takes the rows of a session file over where this model, as it runs here, would have made the same; else says why
    not in the log, as replies are then only slower to begin. Whether it did."""
    engine = parts.engine
    kind = engine.backend.cache.snapshot(0, 0)
    obstacles = {
        "they are another model's": session.origin.model != parts.origin.model,
        "the model ran in another way": session.origin.run != parts.origin.run,
        "the cache is of another type": (session.kv, session.scales) != (kind.kv, kind.scales),
        "the context is smaller": len(session.tokens) > engine.backend.cache.capacity,
        "there are no such tokens": max(session.tokens, default=0) >= engine.backend.geometry.vocab_size,
    }
    reason = next((reason for reason, met in obstacles.items() if met), None)
    if reason is None and session.tokens:
        try:
            engine.adopt(session.tokens, session.pieces())
        except (BackendError, UsageError) as error:
            reason = error.message.rstrip(".")
    if reason is not None:
        _log.warning("The rows in %s are evaluated again: %s.", session.path, reason)
    return reason is None
