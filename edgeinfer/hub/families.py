"""Which families of models run, and what to say of those that do not, before anything is fetched or converted."""

from __future__ import annotations

__all__ = ["CONVERTED", "GGUF_REFUSED"]

# Model classes that edgeinfer.export builds; a test holds the two equal.
CONVERTED = (
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "LlamaForCausalLM",
    "MiniCPMForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
# Architectures of GGUF files whose caches cannot be cut back, as those of recurrent layers.
GGUF_REFUSED = frozenset(
    (
        *("falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "mamba", "mamba2", "nemotron_h"),
        *("nemotron_h_moe", "plamo2", "qwen35", "qwen35moe", "qwen3next", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),
    )
)
