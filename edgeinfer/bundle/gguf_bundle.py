"""A plain GGUF file as a bundle: its sizes, small texts and memory, read from the metadata; runs nothing.

The backend finds out whether llama.cpp knows the architecture. Everything read here must be there whatever the
architecture, and fit the tensors. llama.cpp ends the whole process where some numbers, types of tensors or sizes of
heads do not fit: such files are refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from edgeinfer.bundle.geometry import Geometry
from edgeinfer.bundle.gguf.metadata import GgufArray, damaged, ggml_type
from edgeinfer.bundle.gguf.reader import GgufFile, read_gguf
from edgeinfer.bundle.gguf.vocabulary import GgufVocabulary, read_vocabulary
from edgeinfer.bundle.manifest import Capabilities, FileEntry, Manifest
from edgeinfer.bundle.names import file_name
from edgeinfer.bundle.store import Bundle
from edgeinfer.core.errors import BundleError

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
# Architectures with delta rules: the number of value heads is a multiple of that of key heads, and they are as wide.
_DELTA = frozenset({"qwen3next", "qwen35", "qwen35moe"})
# Architectures that share caches: the last two layers with a cache are read by the others.
_SHARING = frozenset({"gemma3n", "gemma4"})


# Architectures whose convolutions must have a bias, and those whose layers may attend without queries.
_BIASED = frozenset({"falcon-h1", "nemotron_h", "nemotron_h_moe", "granitehybrid"})
_WITHOUT_QUERIES = frozenset({"deci"})
# Architectures with a compressed cache, which is one head.
_COMPRESSED = frozenset({"deepseek2", "mistral4"})


def check_layers(gguf: GgufFile, architecture: str) -> None:
    """Refuses models without a tensor that the graph needs and the loader does not."""
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
    """Refuses tensors of types that llama.cpp cannot compute with."""
    for tensor in gguf.tensors:
        unknown = tensor.type.name in _NOT_MULTIPLIED and _TABLES.fullmatch(tensor.name) is None
        if unknown or (len(tensor.shape) == 1 and tensor.type.name != "F32"):
            raise damaged(gguf.path, f"tensor {tensor.name!r} has type {tensor.type.name}, which llama.cpp cannot use")


def check_heads(gguf: GgufFile, architecture: str, layers: int, key_size: int, value_size: int) -> None:
    """Refuses heads, or recurrences, of sizes that the architecture's graph refuses."""

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


BACKEND = "llamacpp"
# llama.cpp's types of cache, by edgeinfer's names.
KV_TYPES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}

_EMBEDDING = "token_embd.weight"
_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_LAYER = re.compile(r"blk\.(\d{1,9})\.")
# llama.cpp ends the whole process at more layers or experts than these, and at what `_check_survivable` refuses.
_MOST = {"block_count": 512, "embedding_length": 1 << 20, "context_length": 1 << 30}
_MOST_EXPERTS = 1024
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_MOST_HEADS, _MOST_CHANNELS = 65_536, 65_536
_FINITE = ("rope.freq_base", "rope.scaling.factor", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
_SPECIAL_TOKENS = ("bos", "eos", "unk", "pad", "sep", "mask")
# Recommended sampling: llama.cpp's names, and the names in generation_config.json.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def open_gguf(path: Path) -> Bundle:
    """Opens a plain GGUF file as a bundle, whose manifest and small files are made from the metadata."""
    gguf = read_gguf(path)
    texts = texts_of(gguf, read_vocabulary(gguf))
    return Bundle(path.parent, manifest_of(gguf), texts=texts, header=gguf, digests=False)


def check_model(gguf: GgufFile, manifest: Manifest) -> None:
    """Refuses a bundle's model file that is malformed or not the one its manifest describes."""
    read_vocabulary(gguf)
    geometry = geometry_of(gguf)
    if geometry != manifest.geometry:
        differing = [name for name, value in vars(geometry).items() if value != getattr(manifest.geometry, name)]
        raise damaged(gguf.path, f"its {', '.join(differing)} are not what the manifest says")


def manifest_of(gguf: GgufFile) -> Manifest:
    """The manifest of a plain file; its digests are the fingerprint."""
    return Manifest(
        name=_name(gguf),
        architecture=_architecture(gguf),
        backend=BACKEND,
        geometry=geometry_of(gguf),
        parameters=sum(tensor.size for tensor in gguf.tensors),
        capabilities=Capabilities(layer_skip=False, hidden=False, tree=True, exact=False),
        files={split.path.name: FileEntry(split.size, gguf.fingerprint) for split in gguf.splits},
        export={"type": _prevalent_type(gguf), "tensors": len(gguf.tensors)},
    )


def geometry_of(gguf: GgufFile) -> Geometry:
    architecture = _architecture(gguf)
    layers, hidden, context = (_positive(gguf, f"{architecture}.{name}", most) for name, most in _MOST.items())
    for name in _FINITE:
        if f"{architecture}.{name}" in gguf.metadata and gguf.metadata.number(f"{architecture}.{name}") < 0:
            raise damaged(gguf.path, f"{architecture}.{name} is negative")
    _check_survivable(gguf, architecture, layers)
    check_types(gguf)
    check_layers(gguf, architecture)
    embedding = gguf.by_name.get(_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        found = "missing" if embedding is None else f"of shape {embedding.shape}"
        raise damaged(gguf.path, f"{_EMBEDDING} is {found}, and the embedding length is {hidden}")
    vocabulary = embedding.shape[0]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray) and tokens.count != vocabulary:
        raise damaged(gguf.path, f"it has {tokens.count} tokens and embeddings of {vocabulary}")
    if gguf.metadata.integer(f"{architecture}.vocab_size", vocabulary) < vocabulary:
        raise damaged(gguf.path, f"{architecture}.vocab_size is less than its {vocabulary} embeddings")
    beyond = [tensor.name for tensor in gguf.tensors if (n := _LAYER.match(tensor.name)) and int(n[1]) >= layers]
    if beyond:
        raise damaged(gguf.path, f"it has {layers} layers and a tensor {beyond[0]}")
    _, kv_heads = _heads(gguf)
    sizes = head_sizes(gguf)
    check_heads(gguf, architecture, layers, *sizes)
    return Geometry(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        num_kv_heads=max(kv_heads),
        head_dim=max(sizes),
        max_positions=context,
    )


def key_heads(gguf: GgufFile) -> list[int]:
    """Heads of keys in each layer; 0 where it has no attention."""
    return _heads(gguf)[1]


def kv_bytes_per_token(gguf: GgufFile, kv: str) -> int | None:
    """Bytes of one token's keys and values over all layers; None where heads are no whole blocks of the type.

    Counts as if every layer saw the whole context: llama.cpp takes less for sliding windows and compressed keys.
    """
    kind = ggml_type(KV_TYPES[kv])
    _, kv_heads = _heads(gguf)
    sizes = head_sizes(gguf)
    if any(size % kind.block_values for size in sizes):
        return None
    return sum(kv_heads) * sum(map(kind.row_bytes, sizes))


def _check_survivable(gguf: GgufFile, architecture: str, layers: int) -> None:
    """Refuses other numbers that llama.cpp asserts."""
    data = gguf.metadata
    experts = data.integer(f"{architecture}.expert_count", 0)
    used = max(_per_layer(gguf, f"{architecture}.expert_used_count", layers, default=0))
    groups = data.integer(f"{architecture}.expert_group_count", 0)
    chosen = data.integer(f"{architecture}.expert_group_used_count", 0)
    if experts > _MOST_EXPERTS or used > experts or (used == 0) != (experts == 0):
        raise damaged(gguf.path, f"it uses {used} of {experts} experts")
    uneven = groups > 1 and (experts % groups > 0 or not 0 < chosen < groups)
    if uneven or 0 < groups >= experts:
        raise damaged(gguf.path, f"it uses {chosen} of {groups} groups of {experts} experts")
    if data.integer(f"{architecture}.nextn_predict_layers", 0) > layers:
        raise damaged(gguf.path, f"more than all of its {layers} layers predict further tokens")
    scaling = f"{architecture}.rope.scaling.type"
    if scaling in data and data.text(scaling) not in _ROPE_SCALINGS:
        raise damaged(gguf.path, f"{scaling} is none of {', '.join(_ROPE_SCALINGS)}")


def _architecture(gguf: GgufFile) -> str:
    name = gguf.metadata.text("general.architecture")
    if _ARCHITECTURE.fullmatch(name) is None:
        raise damaged(gguf.path, "general.architecture is not a name")
    return name


def _ranged(gguf: GgufFile, key: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise damaged(gguf.path, f"{key} is {value}, not {least} to {most}")
    return value


def _positive(gguf: GgufFile, key: str, most: int) -> int:
    return _ranged(gguf, key, gguf.metadata.integer(key), 1, most)


def _heads(gguf: GgufFile) -> tuple[list[int], list[int]]:
    """Query heads and key heads of every layer; 0 where it has no attention."""
    architecture = _architecture(gguf)
    layers = _positive(gguf, f"{architecture}.block_count", _MOST["block_count"])
    heads = _per_layer(gguf, f"{architecture}.attention.head_count", layers)
    key = f"{architecture}.attention.head_count_kv"
    kv_heads = _per_layer(gguf, key, layers) if key in gguf.metadata else heads
    if not max(heads) and f"{architecture}.ssm.inner_size" in gguf.metadata:
        # Only recurrences, which have no keys.
        return [1] * layers, [1] * layers
    if not max(heads) or not max(kv_heads):
        hint = "edgeinfer runs decoders with attention or recurrences."
        raise BundleError(f"{gguf.path} contains a model without attention heads.", hint)
    pairs = zip(heads, kv_heads, strict=True)
    if any(of_keys and (of_queries < of_keys or of_queries % of_keys) for of_queries, of_keys in pairs):
        raise damaged(gguf.path, "the number of query heads is not a multiple of that of key heads")
    return heads, kv_heads


def _per_layer(gguf: GgufFile, key: str, layers: int, default: int | None = None) -> list[int]:
    """A number of heads or experts, given for all layers or for each."""
    value = gguf.metadata.get(key)
    if not isinstance(value, GgufArray):
        return [_ranged(gguf, key, gguf.metadata.integer(key, default), 0, _MOST_HEADS)] * layers
    items = gguf.metadata.array(key, *_INTEGERS)
    if items.count != layers:
        raise damaged(gguf.path, f"{key} has {items.count} items for {layers} layers")
    return [_ranged(gguf, key, int(item), 0, _MOST_HEADS) for item in items.numbers()]


def head_sizes(gguf: GgufFile) -> tuple[int, int]:
    """Channels of a head's key and of its value."""
    architecture = _architecture(gguf)
    heads, _ = _heads(gguf)
    usual = gguf.metadata.integer(f"{architecture}.embedding_length") // max(heads)
    keys, values = (f"{architecture}.attention.{name}" for name in ("key_length", "value_length"))
    key_size, value_size = (gguf.metadata.integer(key, usual) for key in (keys, values))
    return _ranged(gguf, keys, key_size, 1, _MOST_CHANNELS), _ranged(gguf, values, value_size, 1, _MOST_CHANNELS)


def _name(gguf: GgufFile) -> str:
    """The model's name, printable."""
    said = gguf.metadata.get("general.name")
    name = file_name(gguf.path, said.strip() if isinstance(said, str) else "")
    return "".join(c if c.isprintable() else " " for c in name).strip()[:100]


def _prevalent_type(gguf: GgufFile) -> str:
    sizes: Counter[str] = Counter()
    for tensor in gguf.tensors:
        sizes[tensor.type.name] += tensor.nbytes
    return sizes.most_common(1)[0][0]


def texts_of(gguf: GgufFile, vocabulary: GgufVocabulary) -> Mapping[str, str]:
    """The small files of a bundle, from the metadata, but for the tokenizer."""
    generation: dict[str, object] = {"eos_token_id": list(vocabulary.ends)}
    for key, name in _SAMPLING.items():
        value = gguf.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            generation[name] = round(value, 6)  # 0.7 is stored as float32
    if vocabulary.bos is not None:
        generation["bos_token_id"] = vocabulary.bos
    spelled = vocabulary.special_texts
    tokens = {f"{name}_token": spelled[name] for name in _SPECIAL_TOKENS if name in spelled}
    texts = {"generation_config.json": json.dumps(generation), "special_tokens.json": json.dumps(tokens)}
    if vocabulary.chat_template is not None:
        texts["chat_template.jinja"] = vocabulary.chat_template
    if vocabulary.tool_template is not None:
        texts["chat_template.tool_use.jinja"] = vocabulary.tool_template
    return texts
