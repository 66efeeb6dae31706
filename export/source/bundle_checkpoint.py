"""A bundle's dequantized weights as a Hugging Face checkpoint, for training and for other engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.bundle.layouts import WEIGHTS
from edgeinfer.bundle.spec import DecoderSpec, later_fields
from edgeinfer.bundle.store import Bundle
from edgeinfer.errors import UsageError

Floats = npt.NDArray[np.float32]


def checkpoint_config(bundle: Bundle) -> dict[str, Any]:
    """Makes the config.json of a checkpoint that computes what the bundle does."""
    generation = bundle.read_object("generation_config.json")
    ends = generation.get("eos_token_id")
    end = (ends[0] if ends else None) if isinstance(ends, list) else ends
    return _config(_plain_spec(bundle)) | {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": end}


def _plain_spec(bundle: Bundle) -> DecoderSpec:
    spec = bundle.manifest.decoder
    odd = spec is None or spec.moe or spec.whole_norm or spec.window_size or spec.mlp_bias or spec.activation != "silu"
    if (
        spec is None
        or odd
        or later_fields(spec)
        or later_fields(spec.rope)
        or spec.rope.type != "default"
        or spec.rope.dim != spec.head_dim
    ):
        message = f"{bundle.path} cannot be turned back into a checkpoint, as it is not a plain Llama, Qwen2 or Qwen3."
        raise UsageError(message, "Use the checkpoint itself.")
    return spec


def _config(spec: DecoderSpec) -> dict[str, Any]:
    family = "Qwen3" if spec.qk_norm else "Qwen2" if spec.qkv_bias and not spec.output_bias else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope.theta,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias,
        "tie_word_embeddings": spec.tied,
        "torch_dtype": "float32",
    }


def checkpoint_tensors(bundle: Bundle) -> Iterator[tuple[str, Floats]]:
    """Yields every tensor under Hugging Face's name; packed tensors of the bundle are split again."""
    spec = _plain_spec(bundle)
    bundle.check(WEIGHTS)
    yield "model.embed_tokens.weight", bundle.tensor("embed")
    sizes = {"q": spec.q_size, "k": spec.kv_size, "v": spec.kv_size}
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        yield f"{theirs}input_layernorm.weight", bundle.tensor(f"{ours}attn_norm")
        yield f"{theirs}post_attention_layernorm.weight", bundle.tensor(f"{ours}mlp_norm")
        yield f"{theirs}self_attn.o_proj.weight", bundle.tensor(f"{ours}attn.out")
        for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
            joined = bundle.tensor(f"{ours}attn.qkv" + ("_bias" if kind == "bias" else ""))
            parts = np.split(joined, np.cumsum(list(sizes.values()))[:-1])
            yield from ((f"{theirs}self_attn.{name}_proj.{kind}", p) for name, p in zip(sizes, parts, strict=True))
        if spec.qk_norm:
            yield f"{theirs}self_attn.q_norm.weight", bundle.tensor(f"{ours}attn.q_norm")
            yield f"{theirs}self_attn.k_norm.weight", bundle.tensor(f"{ours}attn.k_norm")
        if spec.output_bias:
            yield f"{theirs}self_attn.o_proj.bias", bundle.tensor(f"{ours}attn.out_bias")
        gate, up = np.split(bundle.tensor(f"{ours}mlp.gate_up"), 2)
        yield from ((f"{theirs}mlp.gate_proj.weight", gate), (f"{theirs}mlp.up_proj.weight", up))
        yield f"{theirs}mlp.down_proj.weight", bundle.tensor(f"{ours}mlp.down")
    yield "model.norm.weight", bundle.tensor("final_norm")
    if not spec.tied:
        yield "lm_head.weight", bundle.tensor("head")
