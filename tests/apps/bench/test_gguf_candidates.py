"""Candidates of a benchmark: a checkpoint in llama.cpp's types, with importance data or types of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.factories import make_checkpoint

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from edgeinfer.apps.bench.gguf_candidates import GgufCandidates, tensor_sizes
from edgeinfer.apps.bench.gguf_model import GgufModel
from edgeinfer.errors import BackendError

pytestmark = pytest.mark.gguf
IDS = [0, 17, 45, 301, 8, 8, 120, 77, 200, 3, 19]


def predict(path: Path) -> NDArray[np.float32]:
    with GgufModel(path, 256) as model:
        return np.concatenate([rows.copy() for rows in model.logits(IDS)])


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    """A checkpoint whose rows hold a block of llama.cpp's small types."""
    return make_checkpoint(tmp_path / "model", "llama", intermediate_size=128)


def test_a_long_text_is_read_in_pieces(tmp_path: Path, llama: Any) -> None:
    ids = (IDS * 12)[:128]
    with torch.no_grad():
        wanted = llama(torch.tensor([ids])).logits[0].numpy()
    path = GgufCandidates(tmp_path / "model", tmp_path, [IDS]).make("F32", False)
    with GgufModel(path, 128) as model:
        for _ in range(2):
            found = np.concatenate([rows.copy() for rows in model.logits(ids)])
            np.testing.assert_allclose(found, wanted, atol=2e-3)
        with pytest.raises(BackendError, match="larger context"):
            list(model.logits(IDS * 40))


def test_fewer_bits_are_smaller_and_further_away(tmp_path: Path, llama: Any) -> None:
    with torch.no_grad():
        plain = llama(torch.tensor([IDS])).logits[0].numpy()
    candidates, found = GgufCandidates(tmp_path / "model", tmp_path, [IDS]), []
    for kind in ("Q8_0", "Q4_0"):
        path = candidates.make(kind, False)
        weights, size, kinds = tensor_sizes(path)
        assert kind in kinds and sum(kinds.values()) == weights
        found.append((size, -float(np.abs(predict(path) - plain).mean())))
    assert found[0] > found[1]


def test_types_are_chosen_for_the_bytes_of_a_file_type(tmp_path: Path, llama: Any) -> None:
    candidates = GgufCandidates(tmp_path / "model", tmp_path, [IDS])
    _, size, _ = tensor_sizes(candidates.make("Q5_0", True))
    _, chosen, kinds = tensor_sizes(candidates.make("Q5_0", True, chosen=True))
    assert 0.9 * size < chosen <= size and len(kinds) > 2
