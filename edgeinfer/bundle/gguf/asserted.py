"""What llama.cpp asserts of a model when it computes, where it ends the process: types of tensors, sizes of heads."""

from __future__ import annotations

import re

from edgeinfer.bundle.gguf.metadata import GgufArray, damaged
from edgeinfer.bundle.gguf.reader import GgufFile

# Types of weights that llama.cpp has no product for, and the tables of integers that some architectures have.
_NOT_MULTIPLIED = frozenset({"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"})
_TABLES = re.compile(r".*tid2eid.*")
# Architectures whose graphs (src/models of the version that llama-cpp-python 0.3.36 brings) take keys and values of
# different widths; and those whose graphs rotate whole heads alone.
_OTHER_WIDTHS = """
arwkv7 bailingmoe bailingmoe3 deepseek2 deepseek2-ocr deepseek32 deepseek4 dots3note falcon-h1 gemma gemma-embedding
gemma2 gemma3 gemma3n gemma4 gemma4-assistant glm-dsa glm5-next granitemoe hrm_text hunyuan-dense hy_v4 jamba
jina-bert-v2 jina-bert-v3 kimi-k3 kimi-linear mamba mamba2 mimo2 minicpm minicpm3 mistral4 nomic-bert nomic-bert-moe
phimoe plamo2 plamo3 plm rwkv6 rwkv6qwen2 rwkv7 step35 t5encoder
"""
_WHOLE_ROTATIONS = """
apertus arcee arctic baichuan chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 dream ernie4_5
ernie4_5-moe exaone exaone-moe exaone4 falcon granite granite_swa graniteswitch grok grovemoe hunyuan-moe hunyuan_vl
hy_v3 internlm2 jais2 llada llada-moe llama llama-embed llama4 maincoder mellum mistral3 olmo olmo2 olmoe orion
paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe rnd1 seed_oss smallthinker
smollm3 starcoder2 talkie xverse
"""
# Those with delta rules, whose heads of values are a multiple of those of keys and as wide.
_DELTA = frozenset({"qwen3next", "qwen35", "qwen35moe"})
# Those that share caches, whose last two layers before are read.
_SHARING = frozenset({"gemma3n", "gemma4"})


# Those whose convolutions are taken to have a bias, and those whose layers may attend without queries.
_BIASED = frozenset({"falcon-h1", "nemotron_h", "nemotron_h_moe", "granitehybrid"})
_WITHOUT_QUERIES = frozenset({"deci"})
# Of a compressed cache: it is one head.
_COMPRESSED = frozenset({"deepseek2", "mistral4"})


def check_layers(gguf: GgufFile, architecture: str) -> None:
    """Raises BundleError where a tensor is missing that the loader does without and the graph does not."""
    names = gguf.by_name.keys()
    for layer in sorted({name.split(".")[1] for name in names if name.startswith("blk.")}):
        needed: list[str] = []
        if f"blk.{layer}.ssm_conv1d.weight" in names:
            needed += ["ssm_conv1d.bias"] if architecture in _BIASED else []
            needed += ["attn_qkv.weight", "attn_gate.weight"] if architecture in _DELTA else []
        if f"blk.{layer}.attn_output.weight" in names and architecture not in _WITHOUT_QUERIES:
            needed += [] if any(name.startswith(f"blk.{layer}.attn_q") for name in names) else ["attn_q.weight"]
        for name in needed:
            if f"blk.{layer}.{name}" not in names:
                raise damaged(gguf.path, f"it has no tensor blk.{layer}.{name}")


def check_types(gguf: GgufFile) -> None:
    """Raises BundleError where a tensor has a type that llama.cpp does not compute with."""
    for tensor in gguf.tensors:
        unknown = tensor.type.name in _NOT_MULTIPLIED and _TABLES.fullmatch(tensor.name) is None
        if unknown or (len(tensor.shape) == 1 and tensor.type.name != "F32"):
            raise damaged(gguf.path, f"tensor {tensor.name!r} has type {tensor.type.name}, which llama.cpp cannot use")


def check_heads(gguf: GgufFile, architecture: str, layers: int, key_size: int, value_size: int) -> None:
    """Raises BundleError where heads, or recurrences, have sizes that the architecture's graph refuses."""

    def number(name: str, usual: int) -> int:
        return gguf.metadata.integer(f"{architecture}.{name}", usual)

    rotated = number("rope.dimension_count", key_size)
    sliding = number("attention.key_length_swa", key_size)
    for count, size in ((rotated, key_size), (number("rope.dimension_count_swa", rotated), sliding)):
        if not 0 < count <= size or count % 2:
            raise damaged(gguf.path, f"{count} channels of heads of {size} are rotated")
    if architecture not in _OTHER_WIDTHS.split() and key_size != value_size:
        raise damaged(gguf.path, f"keys have {key_size} channels and values {value_size}, which {architecture} has not")
    if architecture in _WHOLE_ROTATIONS.split() and rotated != value_size:
        raise damaged(gguf.path, f"{rotated} of {value_size} channels are rotated, of which {architecture} rotates all")
    if 0 < number("attention.key_length_mla", 0) <= rotated:
        raise damaged(gguf.path, f"all channels of its keys are rotated, which {architecture} cannot")
    if architecture in _COMPRESSED and number("attention.key_length_mla", 0):
        rank = number("attention.kv_lora_rank", 0)
        heads = gguf.metadata.get(f"{architecture}.attention.head_count_kv", 0)
        if (key_size, value_size) != (rank + rotated, rank) or (isinstance(heads, int) and heads != 1):
            raise damaged(gguf.path, f"its compressed keys are not one head of {rank} and {rotated} channels")
    groups, shared = number("ssm.group_count", 0), number("ssm.time_step_rank", 0)
    state, inner = number("ssm.state_size", 0), number("ssm.inner_size", 0)
    if architecture in _DELTA and not (groups and shared and shared % groups == 0 and inner == shared * state):
        raise damaged(
            gguf.path, f"its delta rules have {groups} and {shared} heads, and {inner} channels of {state} each"
        )
    pattern = gguf.metadata.get(f"{architecture}.attention.sliding_window_pattern")
    if isinstance(pattern, GgufArray):
        slides = pattern.count == layers and bool(pattern.numbers().any())
    else:
        slides = pattern != 1
    if number("attention.sliding_window", 0) and not slides:
        raise damaged(gguf.path, "it has a sliding window and no layers with it")
    if architecture in _SHARING and layers - number("attention.shared_kv_layers", 0) < 2:
        raise damaged(gguf.path, "fewer than two of its layers have a cache of their own")
