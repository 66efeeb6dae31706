"""Cost-expanded checkpoints: the function of the small model at the sizes of the large one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer.apps.bench.cost_expanded import (
    TrainedCheckpoint,
    expand_checkpoint,
    expanded_shape,
    final_norms,
    grown,
)
from edgeinfer.apps.bench.model_files import TrainedArtifacts, write_q4_0
from edgeinfer.apps.bench.synthetic import SHAPES, Shape
from edgeinfer.errors import CheckpointError, UsageError
from tests.tables import each_row

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
from tests.apps.bench.here import read_tensors  # noqa: E402
from tests.factories import make_checkpoint  # noqa: E402 (needs torch)
from tests.recorded import check_recorded, sums  # noqa: E402

# Grown in every way at once: other numbers of KV heads and of heads that share one, and layers in groups of two.
MODEST = Shape("modest", "llama", 288, 6, 12, 3, 16, 160, 1000, 1000, 128, 1e4, 1e-6)
SMALL_HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint(folder, "llama-tied", chat_template="{{ messages }}", **SMALL_HEADS)
    return folder


@pytest.fixture(scope="module")
def large(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    expand_checkpoint(small, folder, MODEST)
    return folder


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any, ids: list[list[int]]) -> Any:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits


def check_same_function(small: Path, large: Path, ids: list[list[int]], new_tokens: int) -> None:
    """The same logits over the real vocabulary and far lower ones beyond it; the same greedy continuation."""
    with_few, with_many = load(small), load(large)
    few, many = logits(with_few, ids), logits(with_many, ids)
    real = few.shape[-1]
    torch.testing.assert_close(many[..., :real], few, atol=1e-4, rtol=0)
    if many.shape[-1] > real:
        gap = many[..., :real].min(-1).values - many[..., real:].max(-1).values
        assert gap.min().item() >= 30
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    prompt = torch.tensor(ids[:1])
    assert torch.equal(with_many.generate(prompt, **options), with_few.generate(prompt, **options))


def test_the_function_is_that_of_the_small_model(small: Path, large: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 320, (4, 40)).tolist()
    check_same_function(small, large, ids, new_tokens=40)


def test_the_shape_is_that_of_the_large_model(large: Path) -> None:
    tensors = read_tensors(large)
    assert {name: values.shape for name, values in tensors.items()} == MODEST.tensors()
    assert sum(parameter.numel() for parameter in load(large).parameters()) == MODEST.parameters


def test_a_vocabulary_of_the_same_size_is_left_alone(small: Path, tmp_path: Path) -> None:
    same = replace(MODEST, vocab_size=320, hidden=96)
    expand_checkpoint(small, tmp_path, same)
    ids = np.random.default_rng(1).integers(0, 320, (2, 30)).tolist()
    check_same_function(small, tmp_path, ids, new_tokens=10)


def test_leaving_after_a_group_of_layers_is_leaving_after_a_real_layer(small: Path, large: Path) -> None:
    config = json.loads((large / "config.json").read_text())
    group = config["cost_expanded"]["layers_per_real_layer"]
    assert config["cost_expanded"] == {"source": small.name, "shape": "modest", "layers_per_real_layer": 2}
    ids = torch.arange(20)[None]
    with torch.no_grad():
        few = load(small)(ids, output_hidden_states=True).hidden_states
        many = load(large)(ids, output_hidden_states=True).hidden_states
    for layer in range(1, len(few) - 1):  # the last states are taken after the norm
        torch.testing.assert_close(many[group * layer][..., :64], few[layer], atol=1e-4, rtol=0)


def test_weights_that_do_not_matter_are_not_all_zero(large: Path) -> None:
    tensors = read_tensors(large)
    for name in tensors:
        if name.endswith("norm.weight"):
            continue
        weights = tensors[name]
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        silent = layer % 2 == 1 and name.split(".")[-2] in ("o_proj", "down_proj")
        assert np.any(weights) != silent, name
        if not silent and "o_proj" not in name and "down_proj" not in name and "embed" not in name:
            assert np.all(np.any(weights, axis=0)) and np.all(np.any(weights, axis=1)), name


def test_norms_within_the_layers_do_not_hear_the_added_vocabulary(large: Path) -> None:
    tensors = read_tensors(large)
    norms = [name for name in tensors if name.endswith("layernorm.weight")]
    assert len(norms) == 12
    assert all(tensors[name][-1] == 0 for name in norms)
    embedding = tensors["model.embed_tokens.weight"]
    lengths = np.linalg.norm(embedding[:320, :64], axis=1)
    assert np.ptp(embedding[:320, -1]) == 0
    assert 0 < embedding[0, -1] ** 2 / (2 * lengths.min() ** 2) < 1e-6
    assert not np.any(embedding[320:, :64])


def test_tokenizer_and_template_are_kept(small: Path, large: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (large / name).read_bytes() == (small / name).read_bytes()


def test_an_expansion_is_what_it_was(small: Path, large: Path) -> None:
    """Where each weight of the small model lies, and what the added ones are drawn as."""
    found = {name: (values.shape, *sums(values)) for name, values in read_tensors(large).items()}
    norms = final_norms(TrainedCheckpoint(small), np.arange(0, 320, 64))
    shapes = [grown(MODEST, factor) for factor in (2, 3)]
    check_recorded("bench-expanded", found | {"norms": norms, "shapes": shapes}, rel=1e-3, least=1e-6)


def test_expansion_is_deterministic(small: Path, large: Path, tmp_path: Path) -> None:
    expand_checkpoint(small, tmp_path, MODEST)
    assert (tmp_path / "model.safetensors").read_bytes() == (large / "model.safetensors").read_bytes()


def test_final_norms_are_those_of_transformers(small: Path) -> None:
    model, seen = load(small), []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].norm(dim=-1)))
    ids = [3, 50, 319]
    logits(model, [[id] for id in ids])
    got = final_norms(TrainedCheckpoint(small), np.array(ids))
    np.testing.assert_allclose(got, seen[0].ravel().numpy(), rtol=1e-5)


@each_row(
    ("change", "says"),
    [
        ({"head_dim": 32}, "head_dim"),
        ({"layers": 7}, "multiple"),
        ({"hidden": 32}, "hidden is smaller"),
        ({"ffn": 95}, "ffn is smaller"),
        ({"vocab_size": 300}, "vocab_size is smaller"),
        ({"kv_heads": 12}, "KV head"),
        ({"hidden": 128}, "128 channels"),
    ],
)
def test_a_shape_that_is_too_small_is_refused(small: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        expanded_shape(TrainedCheckpoint(small).shape, replace(MODEST, **change))


@each_row("arch", ["llama", "llama-biases", "qwen2-tied"])
def test_checkpoints_of_another_kind_are_refused(tmp_path: Path, arch: str) -> None:
    make_checkpoint(tmp_path, arch)
    with pytest.raises(CheckpointError, match=r"tie_word_embeddings|attention_bias|model_type"):
        TrainedCheckpoint(tmp_path)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        expand_checkpoint(tmp_path / "absent", tmp_path / "out", MODEST)


def test_states_that_differ_too_much_are_refused(small: Path, tmp_path: Path) -> None:
    """One token whose state is a million times as long as the others leaves no constant that suits all."""
    for path in small.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][0] *= 1e6
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="differ too much"):
        expand_checkpoint(tmp_path, tmp_path / "out", MODEST)


def test_half_precision_checkpoints_are_read(tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        folder = tmp_path / str(dtype)
        model = make_checkpoint(folder, "llama-tied", dtype=dtype)
        got = TrainedCheckpoint(folder).tensor("model.norm.weight")
        np.testing.assert_array_equal(got, model.model.norm.weight.detach().numpy())


@pytest.mark.gguf
def test_gguf_holds_the_function_too(small: Path, tmp_path: Path) -> None:
    """llama.cpp's greedy choices on the file are those of transformers with the same rounded weights."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from edgeinfer.apps.bench.engines.stepped import LlamaCppEngine

    expand_checkpoint(small, tmp_path, replace(MODEST, kv_heads=2, heads=8, head_dim=16))
    write_q4_0(tmp_path, tmp_path / "model.gguf")
    rounded = load(tmp_path)
    with torch.no_grad():
        for parameter in rounded.parameters():
            if parameter.ndim == 2:
                stored = gguf.quantize(parameter.numpy(), gguf.GGMLQuantizationType.Q4_0)
                parameter.copy_(torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.Q4_0)))
    prompt = list(range(5, 25)) * 2
    engine = LlamaCppEngine(str(tmp_path / "model.gguf"), threads=1, context=256)
    for lookup in (0, 4):
        reply = engine.generate(prompt, tokens=60, stop_ids=[], lookup=lookup)
        assert len(reply["token_ids"]) == 60
        assert (reply["rounds"] == 59) == (lookup == 0)
        best = logits(rounded, [prompt + reply["token_ids"]])[0, len(prompt) - 1 : -1].topk(2)
        sure = (best.values[:, 0] - best.values[:, 1] > 0.5).tolist()  # llama.cpp rounds activations, too
        chosen = [(best.indices[row, 0].item(), token) for row, token in enumerate(reply["token_ids"]) if sure[row]]
        assert len(chosen) >= 6
        assert all(expected == token for expected, token in chosen)
    first = engine.generate(prompt, tokens=60, stop_ids=[], lookup=0)["token_ids"]
    stop = first[30]
    for lookup in (0, 4):
        ended = engine.generate(prompt, tokens=60, stop_ids=[stop], lookup=lookup)["token_ids"]
        assert ended.index(stop) == len(ended) - 1


# Half a billion weights take long to make; the function of small shapes is compared above.
@pytest.mark.exhaustive
def test_the_story_model_keeps_its_function_at_the_shape_of_a_half_billion(shared: Path, tmp_path: Path) -> None:
    source = shared / "models" / "tales"
    artifacts = TrainedArtifacts(tmp_path, source, SHAPES["qwen2.5-0.5b"])
    folder = artifacts.checkpoint()
    assert artifacts.checkpoint() == folder
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    story = tokenizer("Once upon a time, there was a little dog named Max. Max liked to dig in the mud.")["input_ids"]
    check_same_function(source, folder, [story], new_tokens=24)
