"""Layers that a drafter lacks: the ones whose absence moves predictions least, and models that can lack none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgeinfer.bundle.gguf.reader import read_gguf
from edgeinfer.errors import UsageError
from edgeinfer.export.architectures.planned_tensors import PlannedTensors
from edgeinfer.export.gguf.pruning import check_layers, check_prunable, choose_layers, prune_tokens, renumbered
from edgeinfer.export.gguf.writer import open_gguf_source
from edgeinfer.export.source.checkpoint import Checkpoint
from tests.factories import make_checkpoint
from tests.gguf_builder import ARRAY, INT32, small_model
from tests.tables import each_row

TEXTS = [np.array([0, 17, 45, 301, 8, 8, 120, 77, 200, 3, 19]), np.array([301, 8, 8, 120])]


def choose(folder: Path, count: int, told: Any = None) -> tuple[int, ...]:
    with Checkpoint(folder) as checkpoint:
        described = open_gguf_source(checkpoint)
        return choose_layers(described.spec, PlannedTensors(checkpoint, described.computing), TEXTS, count, told)


def loss(model: Any, pruned: tuple[int, ...]) -> float:
    """Divergence of transformers' model without some layers."""
    layers = model.model.layers
    total = []
    for ids in TEXTS:
        found = []
        for left in (list(layers), [layer for i, layer in enumerate(layers) if i not in pruned]):
            model.model.layers = torch.nn.ModuleList(left)
            with torch.no_grad():
                logits = model(torch.tensor([ids.tolist()]), use_cache=False).logits[0].double()
            found.append(torch.log_softmax(logits, -1))
            model.model.layers = layers
        total.append((found[0].exp() * (found[0] - found[1])).sum(-1))
    return float(torch.cat(total).mean())


@each_row("arch", ["llama", "qwen3", "granite-moe"])
def test_the_layer_that_is_missed_least_is_left_out_first(tmp_path: Path, arch: str) -> None:
    model = make_checkpoint(tmp_path, arch, num_hidden_layers=4)
    told: list[tuple[str, int, int]] = []
    pruned: tuple[int, ...] = ()
    for count in (1, 2):
        losses = {layer: loss(model, (*pruned, layer)) for layer in range(4) if layer not in pruned}
        pruned = tuple(sorted((*pruned, min(losses, key=losses.__getitem__))))
        told.clear()
        assert choose(tmp_path, count, lambda *step: told.append(step)) == pruned
    assert told[-1] == ("choosing layers", 8, 8)


@each_row("count", [0, 3, -1])
def test_some_layers_must_stay(tmp_path: Path, count: int) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(UsageError, match="cannot be left out"):
        choose(tmp_path, count)


def test_tokens_are_fewer_for_large_models(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with Checkpoint(tmp_path) as checkpoint:
        spec = open_gguf_source(checkpoint).spec
    assert prune_tokens(spec, 100_000, 1) == 2048 and prune_tokens(spec, 10**11, 1) == 64


def test_names_move_up() -> None:
    assert renumbered("blk.7.attn_q.weight", (2, 3, 9)) == "blk.5.attn_q.weight"
    assert renumbered("token_embd.weight", (2,)) == "token_embd.weight"


def test_models_whose_layers_differ_lack_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gemma3"):
        check_layers("gemma3", 4, (1,))
    with pytest.raises(UsageError, match="no layer 4"):
        check_layers("llama", 4, (4,))
    with pytest.raises(UsageError, match="all 4"):
        check_layers("llama", 4, (0, 1, 2, 3))
    check_layers("llama", 4, (0, 3))


def test_files_that_say_something_of_each_layer_lack_none(tmp_path: Path) -> None:
    """llama.cpp keeps such an array as long as it was."""
    plain = read_gguf(small_model().write(tmp_path / "plain.gguf"))
    check_prunable(plain, (0,))
    each = read_gguf(
        small_model(llama__attention__head_count_kv=(ARRAY, (INT32, [1, 1]))).write(tmp_path / "each.gguf")
    )
    check_prunable(each, ())
    with pytest.raises(UsageError, match="head_count_kv has a value for every layer"):
        check_prunable(each, (0,))
