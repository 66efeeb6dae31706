"""Every model of the catalog is of a family that is converted, with as many parameters as its makers name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

import edgeinfer
from edgeinfer.export.architectures import find_architecture
from edgeinfer.export.source.hf_config import HFConfig
from tests.tables import each_row

_DELTA = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_DELTA |= {"linear_conv_kernel_dim": 4, "linear_num_value_heads": 16}
_WIDE_DELTA = _DELTA | {"linear_num_value_heads": 32}
_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_MANY_EXPERTS = {"num_experts": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
_CONVOLVED: dict[str, Any] = {"block_auto_adjust_ff_dim": False, "norm_eps": 1e-5, "conv_L_cache": 3}
_CONVOLVED |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}
_BY_KIND = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
    }
}
_GEMMA3: dict[str, Any] = {
    "sliding_window": 512,
    "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA4 = _GEMMA3 | {"global_head_dim": 512, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144}
_BERT = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2}
_M3 = _BERT | {"max_position_embeddings": 8194, "type_vocab_size": 1, "pad_token_id": 1, "num_labels": 1}
# By the start of names, the class and what config.json says besides the sizes.
CLASSES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "smollm2": ("LlamaForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "lfm2.5": ("Lfm2ForCausalLM", _CONVOLVED),
    "qwen3.5-0.8b": ("Qwen3_5ForConditionalGeneration", _DELTA),
    "qwen3.5-2b": ("Qwen3_5ForConditionalGeneration", _DELTA),
    "qwen3.5": ("Qwen3_5ForConditionalGeneration", _WIDE_DELTA),
    "qwen3.6-27b": ("Qwen3_5ForConditionalGeneration", _DELTA | {"linear_num_value_heads": 48}),
    "qwen3.6": ("Qwen3_5MoeForConditionalGeneration", _WIDE_DELTA | _EXPERTS | _MANY_EXPERTS),
    "all-minilm": ("BertModel", _BERT),
    "multilingual-e5": ("BertModel", _BERT),
    "bge-reranker": ("XLMRobertaForSequenceClassification", _M3),
    "qwen3-30b": ("Qwen3MoeForCausalLM", _EXPERTS),
    "qwen3-coder": ("Qwen3MoeForCausalLM", _EXPERTS),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen2.5": ("Qwen2ForCausalLM", {}),
    "gemma-3": ("Gemma3ForCausalLM", _GEMMA3),
    "gemma-4-e2b": (
        "Gemma4ForConditionalGeneration",
        _GEMMA4
        | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
        | {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7},
    ),
    "gemma-4": ("Gemma4ForConditionalGeneration", _GEMMA4 | {"num_kv_shared_layers": 18}),
    "ministral": ("Mistral3ForConditionalGeneration", {}),
    "granite": ("GraniteForCausalLM", {}),
    "phi": ("Phi3ForCausalLM", {}),
    "olmo": ("Olmo3ForCausalLM", {"sliding_window": 4096}),
}


@each_row("name", [model.name for model in edgeinfer.catalog()])
def test_a_model_is_of_a_family_with_its_parameters(name: str) -> None:
    model = next(model for model in edgeinfer.catalog() if model.name == name)
    architecture, more = next(said for start, said in CLASSES.items() if name.startswith(start))
    sizes = {
        field: value for field, value in asdict(model.sizes).items() if field not in ("experts", "shared", "total")
    }
    values = {"architectures": [architecture], "max_position_embeddings": model.context, "rms_norm_eps": 1e-6}
    values |= {"hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = HFConfig({**values, **(_BY_KIND if name.startswith("gemma") else {}), **sizes, **more})
    family = find_architecture(config)
    spec = family.read(config, model.sizes.tie_word_embeddings)
    tensors = family.tensors(config, spec)
    assert sum(math.prod(source.shape) for plan in tensors for source in plan.sources) == pytest.approx(
        model.parameters, rel=0.005
    )
    assert model.kind == "text" or spec.encoder is not None or name.startswith("qwen3-embedding")
    if spec.encoder is not None:
        return
    cached = sum(spec.attends(layer) and spec.heads(layer).owns for layer in range(spec.num_layers))
    assert cached == (model.sizes.cached_layers or model.sizes.num_hidden_layers)
