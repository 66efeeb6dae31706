"""Small random checkpoints made by transformers' own classes, the reference every parity test compares with."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgeinfer.bundle import concat_graph
from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.layouts import MODEL
from edgeinfer.bundle.manifest import Capabilities, Manifest
from edgeinfer.bundle.writing import seal

_VOCABULARY = 320
_SENTENCES = ["Once upon a time there was a little dog.", "She said: the cat is not here, is it?"]
COMMON: dict[str, Any] = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Qwen2": {},
    "Qwen3": {"head_dim": 32},
    "Phi3": {},
}
_HALF_HEAD = 8
# Configurations whose class is not named after the model's.
_CONFIGS = {"Gemma3": "Gemma3TextConfig", "Gemma3n": "Gemma3nTextConfig", "Gemma4": "Gemma4TextConfig"}
_CONFIGS |= {
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
# What the families differ in among themselves: (architecture, configuration).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name.lower(): (name, {}) for name in ARCHITECTURES},
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama-llama3-rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-mha-odd-sizes": ("Llama", {"num_key_value_heads": 4, "intermediate_size": 172, "hidden_size": 72}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3-tied-biases": ("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "phi3-window": ("Phi3", {"sliding_window": 5}),
    "phi3-partial-rotary": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 1.0,
                "short_factor": [1.0 + 0.05 * i for i in range(_HALF_HEAD)],
                "long_factor": [2.0 + 0.5 * i for i in range(_HALF_HEAD)],
                "original_max_position_embeddings": 32,
            },
        },
    ),
}
_QWEN_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_GRANITE: dict[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.5,
}
# The same of models with a mixture of experts, whose numbers are mostly no powers of two.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 6}),
    "mixtral-window": ("Mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "qwen2-moe": ("Qwen2Moe", _QWEN_MOE | {"shared_expert_intermediate_size": 64}),
    "qwen2-moe-dense-layers": (
        "Qwen2Moe",
        _QWEN_MOE | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3-moe": ("Qwen3Moe", _QWEN_MOE | {"norm_topk_prob": True, "head_dim": 32}),
    "qwen3-moe-plain": ("Qwen3Moe", _QWEN_MOE | {"num_experts_per_tok": 2, "decoder_sparse_step": 2}),
    "qwen3-moe-tied-odd": (
        "Qwen3Moe",
        _QWEN_MOE | {"norm_topk_prob": True, "moe_intermediate_size": 40, "tie_word_embeddings": True},
    ),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "granite-moe": ("GraniteMoe", _GRANITE),
    "granite-moe-shared-tied": (
        "GraniteMoeShared",
        _GRANITE | {"shared_intermediate_size": 64, "tie_word_embeddings": True},
    ),
}


def make_config(arch: str, **overrides: Any) -> Any:
    """The configuration of a checkpoint, whose arguments are as `make_checkpoint`'s."""
    name, settings = (VARIANTS | MIXTURES).get(arch, (arch, {}))
    config_class = getattr(transformers, _CONFIGS.get(name, f"{name}Config"))
    # Some classes change the lists that they are given.
    config = config_class(**copy.deepcopy(COMMON | ARCHITECTURES.get(name, {}) | settings | overrides))
    config.architectures = [f"{name}ForCausalLM"]
    return config


def make_checkpoint(
    folder: Path,
    arch: str,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    chat_template: str | None = None,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """Saves a random checkpoint with a byte-level tokenizer and returns the float32 model that it holds, its values
    rounded to `dtype`, in which they are stored. `arch` is a key of ARCHITECTURES, VARIANTS or MIXTURES, and overrides
    are fields of the model's configuration."""
    config = make_config(arch, **overrides)
    model = getattr(transformers, config.architectures[0])(config).eval()
    randomise(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    make_tokenizer(folder, chat_template)
    return model.to(torch.float32)


class _BlockMLP(torch.nn.Module):
    """BlockFFN's layer as its authors define it, over all experts at once."""

    def __init__(self, hidden: int, experts: int, size: int, *, joined: bool) -> None:
        super().__init__()
        self.router_proj = torch.nn.Linear(hidden, experts, bias=False)
        self.router_norm = torch.nn.RMSNorm(experts, eps=1e-6)
        up, down = (
            ((experts * size, hidden), (hidden, experts * size))
            if joined
            else ((experts, size, hidden), (experts, hidden, size))
        )
        self.up_proj = torch.nn.Parameter(torch.empty(up))
        self.down_proj = torch.nn.Parameter(torch.empty(down))
        self.sizes = (experts, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (1, S, D) -> (1, S, D)
        experts, size = self.sizes
        shares = self.router_norm(torch.relu(self.router_proj(x)))  # (1, S, E)
        inner = torch.nn.functional.silu(x @ self.up_proj.reshape(experts * size, -1).T)
        weighted = (inner.reshape(*x.shape[:2], experts, size) * shares[..., None]).flatten(2)
        columns = self.down_proj if self.down_proj.ndim == 2 else self.down_proj.transpose(0, 1).flatten(1)
        mixed: torch.Tensor = weighted @ columns.T
        return mixed


_LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


def make_block_ffn_checkpoint(
    folder: Path, *, joined: bool, latent: bool = False, experts: int = 6, size: int = 32, seed: int = 0
) -> Any:
    """Saves a random BlockFFN, a Llama or MiniCPM3 (for `latent` attention) whose MLPs are replaced, and returns the
    model. If `joined`, experts follow one another in one matrix, and are not stacked."""
    if latent:
        plain = {"scale_emb": 1, "scale_depth": None, "dim_model_base": None, "num_key_value_heads": 4}
        config: Any = transformers.MiniCPM3Config(**(COMMON | _LATENT | plain), rms_norm_eps=1e-6)
        model: Any = transformers.MiniCPM3ForCausalLM(config)
    else:
        config = transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-6)
        model = transformers.LlamaForCausalLM(config)
    model.eval()
    for layer in model.model.layers:
        layer.mlp = _BlockMLP(config.hidden_size, experts, size, joined=joined)
    randomise(model, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "model.safetensors")
    make_tokenizer(folder)
    # Multipliers that the file of the weights does not contain; the model returned has them in its weights.
    scales = {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 32}
    described = config.to_dict() | scales | {"model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"]}
    described |= {"ffn_type": "block_linear" if joined else "block", "num_experts": experts, "expert_size": size}
    described |= {"router_act": "relu", "norm_after_router": "rms", "attention_type": "mla" if latent else "vanilla"}
    (folder / "config.json").write_text(json.dumps(described), "utf-8")
    depth = scales["scale_depth"] / config.num_hidden_layers**0.5
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(scales["scale_emb"])
        model.lm_head.weight.mul_(scales["dim_model_base"] / config.hidden_size)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(depth)
            layer.mlp.down_proj.mul_(depth)
    return model


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draws weights wide enough that every part of the model moves the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.12 * noise)
        for module in model.modules():
            if getattr(module, "scaling", 0) == 1 and hasattr(module, "q_norm"):
                # Scores that nothing scales are scaled by that norm in trained models.
                attention: Any = module
                attention.q_norm.weight *= attention.head_dim**-0.5
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.1 * torch.randn(buffer.shape, generator=generator))


def make_tokenizer(
    folder: Path, chat_template: str | None = None, *, sentences: Sequence[str] = _SENTENCES, size: int = _VOCABULARY
) -> None:
    """Saves a byte-level BPE tokenizer of `size` tokens with `<s>` as token 0 and `</s>` as token 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<s>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def make_bigram_bundle(folder: Path, capacity: int = 128) -> Path:
    """A bundle of the kind that Optimum exports: its logits depend on the last token alone, and its cache on nothing.
    Its backend verifies chains, and can neither skip layers nor verify trees."""
    chance = np.random.default_rng(0)
    table = chance.normal(size=(_VOCABULARY, _VOCABULARY)).astype(np.float32)
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["logits"])]  # (1, S, V)
    nodes.append(helper.make_node("Gather", ["embed", "input_ids"], ["rows"]))  # (1, S, 2)
    nodes.append(helper.make_node("Unsqueeze", ["rows", "one"], ["new"]))  # (1, 1, S, 2)
    past, present = concat_graph.past_names(1), concat_graph.present_names(1)
    for before, after in zip(past, present, strict=True):
        nodes.append(helper.make_node("Concat", [before, "new"], [after], axis=2))
    arrays = {"table": table, "embed": table[:, :2].copy(), "one": np.array([1])}
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "S"])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, "P", 2]) for name in past]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, "S", _VOCABULARY])]
    outputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, "T", 2]) for name in present]
    weights = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "bigrams", inputs, outputs, weights)
    folder.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), folder / MODEL)
    make_tokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": [1]}')
    geometry, chains = Geometry(_VOCABULARY, 2, 1, 1, 2, capacity), Capabilities(False, False, False)
    seal(folder, Manifest("bigrams", "Bigrams", "onnx-optimum", geometry, table.size, chains))
    return folder
