"""What a plan asks of whoever knows how one backend uses memory; knows no backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from edgeinfer.runtime.planning.configuration import Configuration, Keeping
from edgeinfer.runtime.planning.footprint import Footprint

__all__ = ["ModelMemory"]


class ModelMemory(Protocol):
    """What one model takes where it runs on its backend; all figures are upper bounds."""

    def import_libraries(self) -> None:
        """Imports what loading will import, so that a process can be measured with it."""

    def weights(self, configuration: Configuration) -> Footprint:
        """Copies of the weights, and pages of their file."""

    def running(self, configuration: Configuration) -> Footprint:
        """Session, cache and the largest pass; "code" is of files that a second model on the backend shares."""

    def tokenizer(self, keeping: Keeping, *, used: bool) -> Footprint:
        """What stays of the tokenizer: all, or what decoding needs.

        Args:
            used: with what it keeps of texts it has seen.
        """

    def phases(self, outside: Footprint, running: Footprint, configuration: Configuration) -> Iterator[Footprint]:
        """What the process is at times beyond what stays: while a tokenizer is parsed, while the session is made.

        Args:
            outside: the process without a model, while one is loaded.
            running: the process while the model runs.
        """
