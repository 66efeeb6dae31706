"""Encoders of random weights give the vectors and scores that transformers gives, in both layouts; rerankers too."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer

import edgeinfer
from edgeinfer.core.errors import CapabilityError, ContextLengthError, EdgeInferError, UsageError
from tests.encoders import SIZES, WORDS, checkpoint, embedder, exported
from tests.tables import each_row

TEXTS = ["the cat sat on the mat", "a dog", "the red dog ran fast on the mat a cat sat slow", "red"]


def padded(folder: Path, texts: list[Any], *, typed: bool) -> dict[str, torch.Tensor]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(pad_id=0)
    found = tokenizer.encode_batch(texts)
    batch = {"input_ids": torch.tensor([each.ids for each in found])}
    batch["attention_mask"] = torch.tensor([each.attention_mask for each in found])
    if typed:
        batch["token_type_ids"] = torch.tensor([each.type_ids for each in found])
    return batch


def pooled(folder: Path, model: Any, pooling: str) -> NDArray[np.float32]:
    batch = padded(folder, TEXTS, typed=False)
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    if pooling == "cls":
        found = hidden[:, 0]
    elif pooling == "last":
        found = hidden[torch.arange(len(TEXTS)), batch["attention_mask"].sum(1) - 1]
    else:
        weights = batch["attention_mask"][..., None].float()
        found = (hidden * weights).sum(1) / weights.sum(1)
    return torch.nn.functional.normalize(found, dim=1).numpy()


def gemma() -> Any:
    config = transformers.Gemma3TextConfig(
        **SIZES | {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 4, "query_pre_attn_scalar": 16},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_bidirectional_attention=True,
    )
    return transformers.Gemma3TextModel(config)


def modern(kind: str = "ModernBertModel", **more: Any) -> Any:
    config = transformers.ModernBertConfig(**SIZES | {"local_attention": 6, "pad_token_id": 0}, **more)
    return getattr(transformers, kind)(config)


FAMILIES: list[tuple[str, Callable[[], Any], str]] = [
    ("bert", lambda: transformers.BertModel(transformers.BertConfig(**SIZES)), "mean"),
    ("xlm-r", lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**SIZES, pad_token_id=0)), "cls"),
    ("modernbert", modern, "last"),
    ("embeddinggemma", gemma, "mean"),
]


@each_row("name, make, pooling", FAMILIES)
def test_vectors_are_those_of_transformers(tmp_path: Path, name: str, make: Callable[[], Any], pooling: str) -> None:
    mode = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}[pooling]
    modules = {"1_Pooling": {f"pooling_mode_{mode}": True}, "2_Normalize": {}}
    folder = checkpoint(tmp_path / name, model := make(), modules)
    expected = pooled(folder, model, pooling)
    with edgeinfer.load(exported(folder, 32)) as loaded:
        assert np.abs(loaded.embed(TEXTS).vectors - expected).max() <= 1e-4
    with edgeinfer.load(exported(folder, 8, keep_small=False)) as loaded:
        native = loaded.embed(TEXTS).vectors
        assert (native * expected).sum(axis=1).min() >= 0.99


def test_products_behind_the_pooling_and_prompts_are_used(tmp_path: Path) -> None:
    modules: dict[str, dict[str, Any]] = {
        "1_Pooling": {"pooling_mode_mean_tokens": True},
        "2_Dense": {"out_features": 24, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"},
    }
    folder = checkpoint(tmp_path / "model", gemma(), modules)
    weight = torch.randn(24, 64)
    save_file({"linear.weight": weight}, folder / "2_Dense" / "model.safetensors")
    prompts = {"prompts": {"query": "a fast cat ", "document": ""}, "default_prompt_name": "document"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    model = transformers.Gemma3TextModel.from_pretrained(folder)
    batch = padded(folder, ["a fast cat sat"], typed=False)
    with torch.no_grad():
        expected = (model(**batch).last_hidden_state.mean(1) @ weight.T).numpy()
    with edgeinfer.load(exported(folder, 32)) as loaded:
        found = loaded.embed("sat", prompt="query").vectors
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
        assert not np.allclose(loaded.embed("sat").vectors, found)
        short = loaded.embed("sat", prompt="query", dimensions=8).vectors
        np.testing.assert_allclose(short[0], expected[0, :8] / np.linalg.norm(expected[0, :8]), atol=1e-4)


RERANKERS: list[tuple[str, Callable[[], Any]]] = [
    ("bert", lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES | {"num_labels": 1}))),
    (
        "xlm-r",
        lambda: transformers.XLMRobertaForSequenceClassification(
            transformers.XLMRobertaConfig(**SIZES | {"pad_token_id": 0, "type_vocab_size": 2, "num_labels": 1})
        ),
    ),
    ("modernbert", partial(modern, "ModernBertForSequenceClassification", num_labels=1, classifier_pooling="mean")),
]


@each_row("name, make", RERANKERS)
def test_scores_are_those_of_transformers(tmp_path: Path, name: str, make: Callable[[], Any]) -> None:
    folder = checkpoint(tmp_path / name, model := make())
    batch = padded(folder, [("a cat", text) for text in TEXTS], typed=name != "modernbert")
    with torch.no_grad():
        expected = torch.sigmoid(model(**batch).logits[:, 0]).numpy()
    with edgeinfer.load(exported(folder, 32)) as loaded:
        found = loaded.rerank("a cat", TEXTS)
        assert [each.index for each in found.documents] == np.argsort(-expected).tolist()
        scores = {each.index: each.score for each in found.documents}
        np.testing.assert_allclose([scores[place] for place in range(len(TEXTS))], expected, atol=1e-4)
        assert found.documents[:2] == loaded.rerank("a cat", TEXTS, top_n=2).documents
        with pytest.raises(CapabilityError, match="scores"):
            loaded.embed("a cat")


def test_what_an_embedder_refuses_says_what_to_do(tmp_path: Path) -> None:
    model = embedder(tmp_path / "bert")
    long = "a " * 50
    with edgeinfer.load(model) as loaded:
        assert loaded.embed(["a cat", loaded.tokenize("a cat")]).vectors.shape == (2, 64)
        assert loaded.embed([]).vectors.shape == (0, 64)
        refused: list[tuple[type[EdgeInferError], Callable[[], Any]]] = [
            (ContextLengthError, lambda: loaded.embed(long)),
            (UsageError, lambda: loaded.embed("a", dimensions=65)),
            (UsageError, lambda: loaded.embed("a", prompt="query")),
            (UsageError, lambda: loaded.embed([[64]])),
            (CapabilityError, lambda: loaded.rerank("a", ["cat"])),
            (CapabilityError, lambda: loaded.generate("a")),
            (CapabilityError, lambda: loaded.chat().send("a")),
        ]
        for kind, ask in refused:
            with pytest.raises(kind) as raised:
                ask()
            assert raised.value.hint
        assert loaded.embed(long, truncate=True).tokens == loaded.context == 40
    with pytest.raises(UsageError, match="closed"):
        loaded.embed("a")


def test_texts_in_shared_passes_are_as_if_alone(tmp_path: Path) -> None:
    model = embedder(tmp_path / "bert")
    many = [" ".join(WORDS[4 : 4 + count % 11 + 1]) for count in range(150)]
    with edgeinfer.load(model) as loaded:
        together = loaded.embed(many).vectors
        alone = np.concatenate([loaded.embed(text).vectors for text in many[:11]])
    np.testing.assert_allclose(together[:11], alone, atol=1e-5)
    np.testing.assert_array_equal(together[:11], together[11:22])


def test_a_plan_of_an_encoder_is_kept_or_refused(tmp_path: Path) -> None:
    model = embedder(tmp_path / "bert")
    plan = edgeinfer.plan(model)
    assert plan.terms["activations"] and not plan.terms["kv"] and plan.draft_max == 0
    with edgeinfer.load(model, memory=plan.minimum_bytes + 50_000_000) as loaded:
        assert loaded.plan.fits
    with pytest.raises(edgeinfer.BudgetError):
        edgeinfer.load(model, memory=10_000_000)


def test_a_decoder_pools_the_states_of_its_tokens(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SIZES | {"head_dim": 16, "num_key_value_heads": 2})
    modules: dict[str, dict[str, Any]] = {"1_Pooling": {"pooling_mode_lasttoken": True}, "2_Normalize": {}}
    folder = checkpoint(tmp_path / "qwen3", transformers.Qwen3ForCausalLM(config), modules)
    model = transformers.Qwen3Model.from_pretrained(folder)
    with edgeinfer.load(exported(folder, 32), speculation="off") as loaded:
        assert np.abs(loaded.embed(TEXTS).vectors - pooled(folder, model, "last")).max() <= 1e-4
        text = loaded.generate("a cat", max_tokens=4).token_ids
        assert np.array_equal(loaded.embed(TEXTS[0]).vectors, loaded.embed(TEXTS).vectors[:1])
        assert loaded.generate("a cat", max_tokens=4).token_ids == text
        with pytest.raises(ContextLengthError):
            loaded.embed("a " * 60)
        assert loaded.embed("a " * 60, truncate=True).tokens == loaded.context
