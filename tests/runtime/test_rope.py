"""Rotary tables against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgeinfer.bundle.arithmetic import rope_tables
from tests.tables import each_row

if TYPE_CHECKING:
    from tests.runtime.conftest import Family

# Both sides take cosines of angles of up to 100 radians, whose float32 spacing is 8e-6.
TOLERANCE = 1e-5


@each_row(
    ("name", "rows"),
    [
        *((f"llama{kind}", 100) for kind in ("", "-linear-rope", "-llama3-rope", "-head-dim")),
        *((name, 100) for name in ("phi3", "phi3-partial-rotary")),
        # On both sides of the original context.
        *(("phi3-longrope", rows) for rows in (1, 31, 32, 33, 100)),
    ],
)
def test_tables_match_transformers(make_family: Callable[..., Family], name: str, rows: int) -> None:
    family = make_family(name)
    assert family.bundle.manifest.decoder is not None
    ours = rope_tables(family.bundle.manifest.decoder.rope, rows, rows)
    with torch.no_grad():
        theirs = family.model.model.rotary_emb(torch.zeros(1, rows, 1), torch.arange(rows)[None])
    for mine, whole in zip(ours, theirs, strict=True):
        half = whole[0, :, : whole.shape[-1] // 2].numpy()
        assert mine.shape == half.shape and mine.dtype == np.float32
        assert np.abs(mine - half).max() <= TOLERANCE
