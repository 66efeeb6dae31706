"""A bundle's weights as a Hugging Face checkpoint, so that other engines can be given the same function.

Knows nothing of engines.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.apps.bench.safetensors_file import write_header
from edgeinfer.bundle import Bundle, DecoderSpec
from edgeinfer.errors import UsageError

__all__ = ["write_bundle_checkpoint"]

_KEPT = ("tokenizer.json", "chat_template.jinja", "generation_config.json")
Floats = npt.NDArray[np.float32]


def write_bundle_checkpoint(bundle: Bundle, target: Path) -> None:
    """Writes a checkpoint in float32 whose weights are the bundle's, multiplied out.

    Raises:
        UsageError: it is neither Llama nor Qwen2 of the plain kind.
    """
    spec = _plain_spec(bundle)
    target.mkdir(parents=True, exist_ok=True)
    for name in _KEPT:
        if bundle.has(name):
            shutil.copyfile(bundle.path / name, target / name)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **bundle.read_object("special_tokens.json")}
    generation = bundle.read_object("generation_config.json")
    ends = generation.get("eos_token_id")
    ids = {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": ends[0] if isinstance(ends, list) else ends}
    for name, data in (("config.json", _config(spec) | ids), ("tokenizer_config.json", tokenizer)):
        (target / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    tensors = dict(_tensors(bundle, spec))
    with (target / "model.safetensors").open("wb") as file:
        write_header(file, {name: values.shape for name, values in tensors.items()}, "float32")
        for values in tensors.values():
            file.write(np.ascontiguousarray(values, "<f4").data)


def _plain_spec(bundle: Bundle) -> DecoderSpec:
    spec = bundle.manifest.decoder
    odd = spec is None or spec.moe or spec.qk_norm or spec.window_size or spec.mlp_bias or spec.rope.type != "default"
    if spec is None or odd:
        message = f"{bundle.path} cannot be made a checkpoint again: its architecture is not a plain Llama or Qwen2."
        raise UsageError(message, "Give the checkpoint itself.")
    return spec


def _config(spec: DecoderSpec) -> dict[str, Any]:
    qwen = spec.qkv_bias and not spec.output_bias
    return {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": "qwen2" if qwen else "llama",
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


def _tensors(bundle: Bundle, spec: DecoderSpec) -> Iterator[tuple[str, Floats]]:
    """Every tensor under Hugging Face's name; what a bundle joins is parted again."""
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
        if spec.output_bias:
            yield f"{theirs}self_attn.o_proj.bias", bundle.tensor(f"{ours}attn.out_bias")
        gate, up = np.split(bundle.tensor(f"{ours}mlp.gate_up"), 2)
        yield from ((f"{theirs}mlp.gate_proj.weight", gate), (f"{theirs}mlp.up_proj.weight", up))
        yield f"{theirs}mlp.down_proj.weight", bundle.tensor(f"{ours}mlp.down")
    yield "model.norm.weight", bundle.tensor("final_norm")
    if not spec.tied:
        yield "lm_head.weight", bundle.tensor("head")
