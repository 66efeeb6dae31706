"""Keeps the bars of the library that loads and saves checkpoints off the screen, where ours are drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging

__all__ = ["no_bars"]


@contextlib.contextmanager
def no_bars() -> Iterator[None]:
    """While it is open; what the caller had switched before holds again afterwards."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # the library has no types here
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
