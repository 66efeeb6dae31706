"""Glancing of DFlash drafters: what is shown of a block, to which of its rows, and how much."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from edgeinfer.export.training.block_drafter import BlockDrafter, BlockShape
from edgeinfer.export.training.dflash import _runs

BLOCK, ROWS, ANCHOR = 6, 14, 5
SHAPE = BlockShape(
    width=16,
    inner=24,
    heads=2,
    kv_heads=1,
    head_dim=8,
    vocabulary=30,
    layers=1,
    target_layers=3,
    taps=(0, 1),
    block=BLOCK,
    mask=29,
    tied=True,
)


def test_a_run_is_as_long_as_a_share_of_what_is_wrong_and_leaves_the_last_place() -> None:
    torch.manual_seed(0)
    places = BLOCK - 1
    wrong = torch.randint(0, places + 1, (40, 25))
    for share in (0.05, 0.4, 1.0):
        runs = _runs(wrong.float(), share, places)
        wanted = (share * wrong).round().clamp(max=places - 1)  # N = lambda d of the paper
        assert torch.equal(runs.sum(-1), wanted.long())
        assert not runs[..., -1].any()
        for run in runs.flatten(0, 1).tolist():
            assert sum(now and not before for before, now in pairwise([False, *run])) == any(run)  # without a gap
    # Wherever there is room for it.
    assert {run.index(True) for run in _runs(torch.full((99, 1), 2.0), 1.0, places).flatten(0, 1).tolist()} == {0, 1, 2}


def test_a_place_sees_the_states_that_foretold_what_was_shown_before_it() -> None:
    torch.manual_seed(0)
    drafter = BlockDrafter(SHAPE)
    anchors, embedded = torch.tensor([[ANCHOR]]), torch.randn(1, 1, BLOCK, SHAPE.width)
    tapped = torch.randn(1, ROWS, 2 * SHAPE.width)
    glimpsed = torch.tensor([[[False, True, True, False, False]]])  # tokens 2 and 3 behind the first

    def drafted(states: Tensor, shown: Tensor | None) -> Tensor:
        with torch.no_grad():
            made: Tensor = drafter(states, embedded, anchors, shown)[0, 0]
            return made

    plain, seen = drafted(tapped, None), drafted(tapped, glimpsed)
    assert torch.equal(plain, drafted(tapped, torch.zeros_like(glimpsed)))
    for row in range(ROWS):
        changed = tapped.clone()
        changed[:, row] += 1.0
        differs = (drafted(changed, glimpsed) != seen).any(-1).tolist()
        # The state of row r foretells token r + 1 - ANCHOR; the places behind that token see it.
        token = row + 1 - ANCHOR
        wanted = [row < ANCHOR or (token in (2, 3) and place > token) for place in range(1, BLOCK)]
        assert differs == wanted, row
