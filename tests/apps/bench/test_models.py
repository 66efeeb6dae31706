"""Random and cost-expanded checkpoints: sizes, tokenizers, and the small model's function at a large one's sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.core.errors import UsageError
from tests.tables import each_row
from tests.tools.cost_expanded import TrainedCheckpoint, expand_checkpoint, expanded_shape, final_norms
from tests.tools.random_models import (
    SHAPES,
    Shape,
    find_shape,
    pseudo_text,
    synthesize_vocabulary,
    write_random_checkpoint,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from tests.apps.bench.here import read_tensors  # noqa: E402
from tests.factories import make_checkpoint  # noqa: E402 (needs torch)
from tests.recorded import check_recorded, sums  # noqa: E402

# Grown in every way at once: other numbers of KV heads and of heads that share one, and layers in groups of two.
MODEST = Shape("modest", "llama", 288, 6, 12, 3, 16, 160, 1000, 1000, 128, 1e4, 1e-6)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    make_checkpoint(folder, "llama-tied", chat_template="{{ messages }}", **heads)
    return folder


@pytest.fixture(scope="module")
def large(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    expand_checkpoint(small, folder, MODEST)
    return folder


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_the_function_is_that_of_the_small_model(small: Path, large: Path) -> None:
    ids = torch.tensor(np.random.default_rng(0).integers(0, 320, (4, 40)))
    with_few, with_many = load(small), load(large)
    with torch.no_grad():
        few, many = (model(ids, output_hidden_states=True) for model in (with_few, with_many))
    torch.testing.assert_close(many.logits[..., :320], few.logits, atol=1e-4, rtol=0)
    # Added tokens lie far below the real ones.
    assert (many.logits[..., :320].min(-1).values - many.logits[..., 320:].max(-1).values).min().item() >= 30
    # Each real layer is followed by one that adds nothing; the last states are taken after the norm.
    assert json.loads((large / "config.json").read_text())["cost_expanded"]["layers_per_real_layer"] == 2
    for layer in range(1, len(few.hidden_states) - 1):
        states = many.hidden_states[2 * layer][..., :64]
        torch.testing.assert_close(states, few.hidden_states[layer], atol=1e-4, rtol=0)


def test_weights_are_as_large_and_as_random_as_those_of_the_large_model(small: Path, large: Path) -> None:
    tensors = read_tensors(large)
    assert {name: values.shape for name, values in tensors.items()} == MODEST.tensors()
    for name, weights in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        silent = layer % 2 == 1 and name.split(".")[-2] in ("o_proj", "down_proj")
        assert name.endswith("norm.weight") or np.any(weights) != silent, name
    norms = final_norms(TrainedCheckpoint(small), np.arange(0, 320, 64))
    found = {name: (values.shape, *sums(values)) for name, values in sorted(tensors.items())}
    check_recorded("bench-expanded", found | {"norms": norms}, rel=1e-3, least=1e-6)


@each_row(
    ("change", "says"),
    [({"head_dim": 32}, "head_dim"), ({"layers": 7}, "multiple"), ({"ffn": 95}, "ffn is smaller"),
     ({"kv_heads": 12}, "KV head"), ({"hidden": 128}, "128 channels")],
)  # fmt: skip
def test_a_shape_that_is_too_small_is_refused(small: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        expanded_shape(TrainedCheckpoint(small).shape, replace(MODEST, **change))


def test_random_checkpoints_have_published_sizes_and_are_the_same_each_time(tmp_path: Path) -> None:
    assert find_shape("qwen2.5-0.5b").parameters == 494_032_768
    assert find_shape("llama-3.2-1b").parameters == 1_235_814_400
    with pytest.raises(UsageError, match=r"qwen2\.5-0\.5b"):
        find_shape("gpt-5")
    vocabulary, merges = synthesize_vocabulary(400, 2)
    assert sorted(vocabulary.values()) == list(range(400))
    assert all({left, right, left + right} <= vocabulary.keys() for left, right in merges)
    write_random_checkpoint(tmp_path, SHAPES["tiny"], seed=3)
    model = load(tmp_path)
    assert model.num_parameters() == SHAPES["tiny"].parameters
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path)) == SHAPES["tiny"].vocab_entries
    found = {name: (values.shape, *sums(values)) for name, values in sorted(read_tensors(tmp_path).items())}
    check_recorded("bench-shapes", found | {"words": [pseudo_text(12), list(vocabulary)[::25], merges[::25]]}, rel=1e-3)
