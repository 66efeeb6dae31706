"""The head of a model apart from its passes: what a backend promises that computes logits afterwards, and for which
models it can."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from edgeinfer.bundle.layouts import Layout
from edgeinfer.bundle.manifest import Manifest
from edgeinfer.runtime.arrays import Floats

# Rows that are asked for at once: as many as the native kernel multiplies by one reading of the weights. Where all rows
# of a long draft are read after all, several such passes may take longer than one over all of them: 52.0 ms instead of
# 49.7 for 16 rows of a 0.5B (docs/log/2026-11-27.md).
HEAD_ROWS = 4


@runtime_checkable
class HeadBackend(Protocol):
    """What a backend can do besides that computes the logits of a pass's rows later, a few at a time.

    Attributes:
        head_apart: whether it can for its model.
    """

    head_apart: bool

    def head(self, hidden: Floats) -> Floats:  # (R, D) -> (R, V)
        """The logits of rows by their states after the last layer: the bits that the rows' own pass would give.

        A view that the next pass overwrites, as this overwrites what the pass before gave; the cache stays as it is.
        """


def runs_apart(manifest: Manifest, layout: Layout) -> bool:
    """Whether the head of a model can run without its layers.

    A pass of the head alone overwrites which experts the pass before used, and what a draft module reads of it.
    """
    decoder = manifest.decoder
    if decoder is None or decoder.moe is not None or manifest.taps or manifest.module is not None:
        return False
    return manifest.capabilities_in(layout).paged
