"""The search for blocks to skip: finds those that do nothing, weighs them by their costs, and repeats itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from edgeinfer.bundle.manifest import Capabilities
from edgeinfer.bundle.opening import open_bundle
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import CapabilityError, UsageError
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.runtime.backends.contract import Backend
from edgeinfer.runtime.backends.reference.backend import ReferenceBackend
from edgeinfer.runtime.layer_skip.block_costs import BlockCosts
from edgeinfer.runtime.speculation.drafters.self_drafters import SkipDrafter
from edgeinfer.runtime.tuning.drafting_search import Sample, best_exit, best_skip_set
from tests.cache import made
from tests.factories import make_checkpoint
from tests.runtime.speculation.drafters.models import EXPORTS, make_backend, take_in

LAYERS = 5
# Attention of layer 3, MLP of layer 1 and all of layer 2 do nothing.
IDLE = (3, 4, 5, 6)
EVEN = BlockCosts(1.0, (1.0,) * 10, tuple(11.0 + 0.1 * row for row in range(9)))


def plant(*blocks: int) -> Bundle:
    """A model in which these blocks add nothing."""
    return open_bundle(made(_plant, blocks) / "bundle")


def _plant(folder: Path, blocks: tuple[int, ...]) -> None:
    model = make_checkpoint(folder / "checkpoint", "llama", num_hidden_layers=LAYERS, hidden_size=128)
    with torch.no_grad():
        for block in blocks:
            layer = model.model.layers[block // 2]
            (layer.mlp.down_proj if block % 2 else layer.self_attn.o_proj).weight.zero_()
    model.save_pretrained(folder / "checkpoint")
    export_checkpoint(folder / "checkpoint", folder / "bundle", EXPORTS["portable"])


@pytest.fixture(scope="module")
def planted() -> Backend:
    return make_backend("portable", plant(*IDLE), 128)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    rng = np.random.default_rng(4)
    texts = [(tuple(rng.integers(0, 320, 30).tolist()), tuple(rng.integers(0, 320, 40).tolist())) for _ in range(2)]
    return [Sample(*text) for text in texts]


def test_blocks_that_do_nothing_are_found(planted: Backend, samples: list[Sample]) -> None:
    found = best_skip_set(planted, samples, EVEN, evaluations=60)
    assert np.flatnonzero(~found.layer_mask).tolist() == list(IDLE)
    assert found.match_rate == 1.0
    gain = EVEN.gain(found.layer_mask, 1.0)
    assert (found.length, found.speedup) == (gain.length, gain.speedup)
    assert found.speedup > 1
    assert found.evaluations == 60
    assert planted.cache.length == 0
    SkipDrafter(planted, found.layer_mask)


def test_the_same_arguments_find_the_same_set(planted: Backend, samples: list[Sample]) -> None:
    one, same = (best_skip_set(planted, samples, EVEN, evaluations=25, seed=3) for _ in range(2))
    assert one.layer_mask.tolist() == same.layer_mask.tolist()
    assert (one.match_rate, one.speedup, one.evaluations) == (same.match_rate, same.speedup, same.evaluations)


def test_matchness_is_of_a_pass_behind_the_whole_models_cache(planted: Backend, samples: list[Sample]) -> None:
    found = best_skip_set(planted, samples, EVEN, evaluations=1)
    right = 0
    for sample in samples:
        fed = [sample.prompt[-1], *sample.reply[:31]]
        planted.cache.trim(0)
        take_in(planted, sample.prompt[:-1])
        whole = take_in(planted, fed)
        planted.cache.trim(len(sample.prompt) - 1)
        right += int((take_in(planted, fed, layer_mask=found.layer_mask).argmax(1) == whole.argmax(1)).sum())
    assert found.match_rate == right / 64
    assert 0 < found.match_rate < 1
    # The first set that is scored is SWIFT's: the second layer and the fourth.
    assert np.flatnonzero(~found.layer_mask).tolist() == [2, 3, 6, 7]


def test_what_costs_nothing_is_not_worth_a_risk(planted: Backend, samples: list[Sample]) -> None:
    """Only the MLP of layer 1 is worth skipping where it alone costs something."""
    costs = BlockCosts(1.0, tuple(8.0 if block == 3 else 0.0 for block in range(10)), (9.0,) * 9)
    found = best_skip_set(planted, samples, costs, evaluations=60)
    assert not found.layer_mask[3]
    assert found.match_rate == 1.0


def test_groups_of_layers_are_skipped_together(planted: Backend, samples: list[Sample]) -> None:
    calls: list[tuple[int, int]] = []
    found = best_skip_set(
        planted, samples, EVEN, granularity=2, evaluations=200, progress=lambda *done: calls.append(done)
    )
    pairs = found.layer_mask.reshape(LAYERS, 2)
    assert (pairs[0] == pairs[1]).all()
    assert (pairs[2] == pairs[3]).all()
    # Six units have no more than 63 sets, so every one was scored.
    assert calls == [(done, 63) for done in range(1, 64)]
    assert found.evaluations == 63
    everything = best_skip_set(planted, samples, EVEN, granularity=2, evaluations=63, seed=9)
    assert everything.speedup == found.speedup


def test_the_exit_before_idle_layers_is_found(samples: list[Sample]) -> None:
    target = make_backend("portable", plant(6, 7, 8, 9), 128)
    found = best_exit(target, samples, EVEN)
    assert found.layers == 3
    assert found.layer_mask.tolist() == [True] * 6 + [False] * 4
    assert found.match_rate == 1.0
    assert found.evaluations == LAYERS - 1
    assert found.speedup == EVEN.exit_gain(3, 1.0).speedup
    assert target.cache.length == 0
    pairs = best_exit(target, samples, EVEN, granularity=2)
    assert (pairs.layers, pairs.evaluations) == (4, 2)
    for granularity in (0, LAYERS):
        with pytest.raises(UsageError, match=rf"no exit after every {granularity} .* from 1 to 4"):
            best_exit(target, samples, EVEN, granularity=granularity)


def test_a_search_that_cannot_be_made_is_refused(planted: Backend, samples: list[Sample]) -> None:
    for nothing in ([], [Sample((), (1,))], [Sample((1,), ())]):
        with pytest.raises(UsageError, match="no text"):
            best_skip_set(planted, nothing, EVEN)
    with pytest.raises(UsageError, match="granularity"):
        best_skip_set(planted, samples, EVEN, granularity=0)
    backend = ReferenceBackend(plant(), 128)
    backend.capabilities = Capabilities(layer_skip=False, hidden=True, tree=True)
    for search in (best_skip_set, best_exit):
        with pytest.raises(CapabilityError, match="cannot skip layers"):
            search(backend, samples, EVEN)
