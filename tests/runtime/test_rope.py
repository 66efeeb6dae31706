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

NAMES = ["llama", "llama-linear-rope", "llama-llama3-rope", "llama-head-dim", "phi3", "phi3-partial-rotary"]
# Both sides take cosines of angles of up to 100 radians, whose float32 spacing is 8e-6.
TOLERANCE = 1e-5


def largest_difference(family: Family, rows: int) -> float:
    assert family.bundle.manifest.decoder is not None
    ours = rope_tables(family.bundle.manifest.decoder.rope, rows, rows)
    with torch.no_grad():
        theirs = family.model.model.rotary_emb(torch.zeros(1, rows, 1), torch.arange(rows)[None])
    halves = [t[0, :, : t.shape[-1] // 2].numpy() for t in theirs]
    assert all(a.shape == b.shape and a.dtype == np.float32 for a, b in zip(ours, halves, strict=True))
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, halves, strict=True))


@each_row("name", NAMES)
def test_tables_match_transformers(make_family: Callable[..., Family], name: str) -> None:
    assert largest_difference(make_family(name), 100) <= TOLERANCE


@each_row("rows", [1, 31, 32, 33, 100])
def test_longrope_matches_transformers_on_both_sides_of_the_original_context(
    make_family: Callable[..., Family], rows: int
) -> None:
    assert largest_difference(make_family("phi3-longrope"), rows) <= TOLERANCE


def test_rows_do_not_depend_on_how_many_there_are(make_family: Callable[..., Family]) -> None:
    spec = make_family("phi3-longrope").bundle.manifest.decoder
    assert spec is not None
    short, long = rope_tables(spec.rope, 10, 100), rope_tables(spec.rope, 100, 100)
    assert all(np.array_equal(a, b[:10]) for a, b in zip(short, long, strict=True))
