"""Memory of a GGUF file in llama.cpp, from its header alone, and where its matrices lie: upper bounds for a plan.
Measured on 0.3.36; where llama.cpp says what it allocated, the bounds are checked against that by the tests."""

from __future__ import annotations

import ctypes
import math
import platform
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.bundle.geometry import LLAMA_KV
from edgeinfer.bundle.gguf.library import cpu_device, extra_buffer_types, functions
from edgeinfer.bundle.gguf.metadata import GgufArray
from edgeinfer.bundle.gguf.reader import GgufFile, GgufTensor
from edgeinfer.bundle.gguf_bundle import geometry_of
from edgeinfer.core.errors import UsageError
from edgeinfer.core.records import dataclass

# Matrices that only a product with activations reads; the embedding, whose rows are looked up, is none of them.
_PRODUCTS = re.compile(
    r"blk\.(\d+)\.((?:attn_(?:q|k|v|qkv|output)|ffn_(?:gate|up|down)|ffn_(?:gate|up|down)_shexp)\.weight)"
)
# Matrices of a layer's experts, all in one tensor.
EXPERTS = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down|gate_up)_exps\.weight")
_IN_LAYER = re.compile(r"blk\.(\d+)\.")
_TYPE_AND_BUFFER = 16  # bytes of a ggml_tensor before its dimensions; the buffer is the second half
_ROOM = 1 << 14  # of the few tensors' descriptions


@dataclass(frozen=True)
class Division:
    """A model divided between the processor and a graphics processor, which has the last layers."""

    blocks: int
    gpu_layers: int  # on the graphics processor; the norm and the matrix that give logits are the last of all

    @classmethod
    def of(cls, gguf: GgufFile, gpu_layers: int) -> Division:
        """Divide a file that has so many layers on the graphics processor, or all of them if it has fewer."""
        blocks = gguf.metadata.integer(f"{gguf.metadata.text('general.architecture')}.block_count", 0)
        return cls(blocks, min(gpu_layers, blocks + 1))

    def on_device(self, name: str) -> bool:
        """Whether a tensor lies on the graphics processor; the embedding never does."""
        if found := _IN_LAYER.match(name):
            return int(found[1]) > self.blocks - self.gpu_layers
        return self.gpu_layers > 0 and name.startswith("output")


class _Override(ctypes.Structure):
    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def packed_overrides(lib: Any, gguf: GgufFile, *, head: bool, rest: bool) -> Any:
    """A list for `tensor_buft_overrides`; None where it is empty. `head` keeps the norm and the matrix that give logits
    here: a server would send as many numbers for each row as the vocabulary has tokens."""
    if not (head or rest):
        return None
    ggml = _ggml(lib)
    chosen: dict[tuple[str, int], list[str]] = {}
    answers: dict[tuple[int, tuple[int, ...]], int | None] = {}
    for tensor in gguf.tensors if rest else ():
        match = _PRODUCTS.fullmatch(tensor.name)
        if match is None and tensor.name != "output.weight":
            continue
        key = (tensor.type.number, tensor.shape)
        if key not in answers:
            answers[key] = _buffer_type(ggml, tensor)
        answer = answers[key]
        if answer is not None:
            layer, name = match.groups() if match else ("", tensor.name)
            chosen.setdefault((name, answer), []).append(layer)
    entries = (_Override * (len(chosen) + 2))()
    if head:
        # Of the processor's types llama.cpp then takes the best.
        entries[len(chosen)] = _Override(b"^(output|token_embd)", ggml.ggml_backend_cpu_buffer_type())
    for entry, ((name, answer), layers) in zip(entries, chosen.items(), strict=False):
        inner = rf"blk\.({'|'.join(layers)})\." if layers[0] else ""
        entry.pattern = f"^{inner}{re.escape(name)}$".encode()
        entry.buffer_type = answer
    return entries


def _ggml(lib: Any) -> Any:
    try:
        ggml = functions(lib._lib._name)
        ggml.ggml_init.argtypes = [_InitParams]
    except (AttributeError, OSError) as error:
        message = f"llama.cpp does not report how it keeps weights: {error}."
        raise UsageError(message, "Keep all weights packed, or all mapped.") from error
    return ggml


def _buffer_type(ggml: Any, tensor: GgufTensor) -> int | None:
    """The buffer type that llama.cpp would choose first for a matrix; None where it stays in the file."""
    context = ctypes.c_void_p(ggml.ggml_init(_InitParams(_ROOM, None, True)))
    try:
        columns, rows = tensor.shape[-1], tensor.shape[0]
        weight = ggml.ggml_new_tensor_2d(context, tensor.type.number, ctypes.c_int64(columns), ctypes.c_int64(rows))
        sizes = (ctypes.c_int64 * 2).from_address(weight + _TYPE_AND_BUFFER)
        if tuple(sizes) != (columns, rows):
            raise UsageError("llama.cpp lays out its tensors differently.", "Keep all weights packed, or all mapped.")
        inputs = ggml.ggml_new_tensor_2d(context, 0, ctypes.c_int64(columns), ctypes.c_int64(1))
        product = ctypes.c_void_p(ggml.ggml_mul_mat(context, ctypes.c_void_p(weight), ctypes.c_void_p(inputs)))
        slot = ctypes.c_void_p.from_address(weight + _TYPE_AND_BUFFER // 2)
        for kind in _kinds(ggml):
            buffer = ctypes.c_void_p(ggml.ggml_backend_buft_alloc_buffer(ctypes.c_void_p(kind), ctypes.c_size_t(0)))
            slot.value = buffer.value
            fits = ggml.ggml_backend_dev_supports_op(cpu_device(ggml), product)
            slot.value = None
            ggml.ggml_backend_buffer_free(buffer)
            if fits:
                return kind
        return None
    finally:
        ggml.ggml_free(context)


def _kinds(ggml: Any) -> Iterator[int]:
    """Buffer types that llama.cpp tries before plain memory, in its order."""
    kinds, index = extra_buffer_types(ggml), 0
    while kinds is not None and (kind := kinds[index]):
        yield int(kind)
        index += 1


# Pages of the libraries that importing, loading and decoding touch.
CODE_BYTES = 10 * 1024**2
# Paths of a draft tree, for each of which llama.cpp reserves a row of logits.
SEQUENCES = 8
# Rows that a pass may be filled up by.
PADDING = 3
_CELLS = 256  # the cache is rounded up to a multiple of this
_BLOCK = 32
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
# What is read of the file and not let go of yet while weights are copied.
_READ_BYTES = 64 * 1024**2
# Pages that looking rows of the embedding up leaves behind, 64 KB around each, until they are let go of.
_LOOKED_UP_BYTES = 9 * 1024**2
# Of the context itself: graphs, the cache's cells and the scheduler; each tensor of the model is in several tables.
_CONTEXT_BYTES, _TENSOR_BYTES = 5 * 1024**2, 16 * 1024
# Of a token: its spelling three times, score and type, and what leads from a spelling to it; of a merge: its halves.
_TOKEN_BYTES, _MERGE_BYTES = 290, 160
# By the types of matrices, the numbers their rows must be a multiple of to be packed; `ggml-cpu/repack.cpp`.
_X86 = {"Q4_0": 8, "Q4_K": 8, "IQ4_NL": 8, "MXFP4": 8}
_X86_512 = {"Q2_K": 8}
_ARM = {"Q4_0": 4, "IQ4_NL": 4, "MXFP4": 4, "Q8_0": 4, "Q1_0": 4, "Q4_K": 8, "Q5_K": 8, "Q6_K": 8}


# Of architectures with recurrent layers, those whose layers can go back to the states behind the last rows of a pass;
# `llm_arch_supports_rs_rollback` of llama-arch.cpp.
_GOES_BACK = frozenset({"lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe"})
# Of the states behind drafted rows, at most.
_DRAFTED_BYTES = 128 * 1024**2
_RECURRENT = re.compile(r"blk\.\d+\.(ssm_conv1d|shortconv\.conv)\.weight")
# What a recurrent layer reads of the hidden state.
_MIXES = re.compile(r"(ssm_in|shortconv\.in_proj|attn_qkv)\.weight$")
_ATTENDS = re.compile(r"blk\.(\d+)\.(attn_k|attn_kv_a_mqa)\.weight")


def is_recurrent(gguf: GgufFile) -> bool:
    """Whether some layers keep a state instead of keys and values."""
    return any(_RECURRENT.fullmatch(tensor.name) for tensor in gguf.tensors)


def drafted_at_once(gguf: GgufFile, most: int) -> int:
    """Number of drafted rows of a pass that can be taken back, up to `most`: all without recurrent layers."""
    if not is_recurrent(gguf):
        return most
    if gguf.metadata.text("general.architecture") not in _GOES_BACK:
        return 0
    return min(most, _DRAFTED_BYTES // max(1, _state_bytes(gguf)))


def state_bytes(gguf: GgufFile, draft_max: int) -> int:
    """Bytes of the states of recurrent layers, including those behind drafted rows."""
    return _state_bytes(gguf) * (1 + drafted_at_once(gguf, draft_max))


def copied_bytes(gguf: GgufFile, kv: str, capacity: int, *, keeps: bool) -> int:
    """Bytes of copies of a cache with recurrent layers: two of the states, and the whole cache if parts are kept."""
    if not is_recurrent(gguf):
        return 0
    return 2 * _state_bytes(gguf) + (kv_bytes(gguf, kv, capacity) if keeps else 0)


def _state_bytes(gguf: GgufFile) -> int:
    """State of a sequence in all recurrent layers, in float32: the last inputs of a convolution, and a matrix."""
    data, arch = gguf.metadata, gguf.metadata.text("general.architecture")
    names = ("conv_kernel", "inner_size", "state_size", "group_count")
    width, inner, state, groups = (data.integer(f"{arch}.ssm.{name}", 0) for name in names)
    read = max(0, width - 1) * (inner + 2 * groups * state)
    read += max(0, data.integer(f"{arch}.shortconv.l_cache", 0) - 1) * geometry_of(gguf).hidden_size
    layers = sum(_RECURRENT.fullmatch(tensor.name) is not None for tensor in gguf.tensors)
    return 4 * layers * (read + state * inner)


def fits_blocks(gguf: GgufFile) -> bool:
    """Whether the model's heads are whole blocks, which caches of q8_0 and q4_0 need."""
    return geometry_of(gguf).head_dim % _BLOCK == 0


def cells(capacity: int) -> int:
    """Tokens that a cache for so many has room for."""
    return -(-capacity // _CELLS) * _CELLS


def kv_bytes(gguf: GgufFile, kv: str, capacity: int) -> int:
    """Bytes of the cache, all of which llama.cpp takes and clears at once."""
    geometry = geometry_of(gguf)
    whole = cells(capacity) * geometry.kv_bytes_per_token(LLAMA_KV[kv].name)
    if not is_recurrent(gguf):
        return whole
    attending = sum(_ATTENDS.fullmatch(tensor.name) is not None for tensor in gguf.tensors)
    return whole * attending // geometry.num_layers


def packed_bytes(gguf: GgufFile, weights: str, gpu_layers: int = 0) -> int:
    """Copies of matrices in the order the kernels like best, where weights are kept this way."""
    return sum(tensor.nbytes for tensor in _packed(gguf, weights, gpu_layers))


def mapped_bytes(gguf: GgufFile, weights: str, gpu_layers: int = 0) -> int:
    """Bytes of weights read as they are, mostly in place; of an embedding, the pages that looking rows up touches."""
    division = Division.of(gguf, gpu_layers)
    here = [tensor for tensor in gguf.tensors if not division.on_device(tensor.name)]
    if weights == "mapped":
        return sum(tensor.nbytes for tensor in here)
    packed = {tensor.name for tensor in _packed(gguf, weights, gpu_layers)}
    read = sum(tensor.nbytes for tensor in here if tensor.name not in packed and tensor.name != _EMBEDDING)
    embedding = gguf.by_name[_EMBEDDING].nbytes
    return read + (min(embedding, _LOOKED_UP_BYTES) if looks_up(gguf, weights, gpu_layers) else embedding)


def device_bytes(gguf: GgufFile, gpu_layers: int) -> int:
    """Bytes of the weights on a graphics processor; a head that is the embedding lies there too."""
    division = Division.of(gguf, gpu_layers)
    there = sum(tensor.nbytes for tensor in gguf.tensors if division.on_device(tensor.name))
    return there + (gguf.by_name[_EMBEDDING].nbytes if gpu_layers and _HEAD not in gguf.by_name else 0)


def device_cache_bytes(gguf: GgufFile, kv: str, capacity: int, draft_max: int, gpu_layers: int) -> int:
    """Bytes of cache and recurrent states of the layers on a graphics processor."""
    division = Division.of(gguf, gpu_layers)
    rows = kv_bytes(gguf, kv, capacity) * _share(gguf, _ATTENDS, division)
    return math.ceil(rows + state_bytes(gguf, draft_max) * _share(gguf, _RECURRENT, division))


def _share(gguf: GgufFile, layers: re.Pattern[str], division: Division) -> float:
    """The share of the layers with such a tensor, or of all if none has one, that lies on a graphics processor."""
    names = [tensor.name for tensor in gguf.tensors if layers.fullmatch(tensor.name)]
    names = names or [f"blk.{layer}." for layer in range(division.blocks)]
    return sum(map(division.on_device, names)) / len(names)


def looks_up(gguf: GgufFile, weights: str, gpu_layers: int = 0) -> bool:
    """Whether single rows of the embedding are all that is read of it in place, and its pages may go."""
    if weights == "mapped" or not gguf.mappable:
        return False
    if gpu_layers or _HEAD in gguf.by_name:
        return True
    return any(tensor.name == _EMBEDDING for tensor in _packed(gguf, weights, gpu_layers))


def loading_bytes(gguf: GgufFile, weights: str) -> int:
    """Bytes of pages of the file that are in memory while the copies are made."""
    return gguf.tensor_bytes if weights == "mapped" else min(gguf.tensor_bytes, _READ_BYTES)


def compute_bytes(gguf: GgufFile, kv: str, capacity: int, batch: int, outputs: int) -> int:
    """Activations of a pass and its logits, which llama.cpp has twice."""
    geometry = geometry_of(gguf)
    batch, rows = min(batch, capacity), max(outputs + PADDING, SEQUENCES + 1)
    hidden, seen, heads = geometry.hidden_size, cells(capacity), _largest(gguf, "attention.head_count")
    wide = max(hidden, heads * geometry.head_dim)
    scores = 0 if LLAMA_KV[kv].blocks else heads * seen
    phases = (
        rows * geometry.vocab_size + hidden * (batch + 2 * rows),
        batch * (_inner(gguf) + 4 * hidden),
        batch * (scores + 6 * wide),
    )
    numbers = max(phases) + batch * (seen + 256) + rows * geometry.vocab_size
    return 4 * numbers + _CELLS * 1024


def vocabulary_bytes(gguf: GgufFile) -> int:
    """The tokens and merges as llama.cpp keeps them."""
    merges = gguf.metadata.get("tokenizer.ggml.merges")
    count = merges.count if isinstance(merges, GgufArray) else 0
    return geometry_of(gguf).vocab_size * _TOKEN_BYTES + count * _MERGE_BYTES


def session_bytes(gguf: GgufFile) -> int:
    return _CONTEXT_BYTES + len(gguf.tensors) * _TENSOR_BYTES


def is_head_packed(gguf: GgufFile, weights: str) -> bool:
    """Whether the matrix that gives the logits is copied."""
    head = _HEAD if _HEAD in gguf.by_name else _EMBEDDING
    return any(tensor.name == head for tensor in _packed(gguf, weights, 0))


def _packed(gguf: GgufFile, weights: str, gpu_layers: int) -> list[GgufTensor]:
    if weights == "mapped":
        return []
    division = Division.of(gguf, gpu_layers)
    # A head on a graphics processor is a copy of the embedding.
    tied = _HEAD not in gguf.by_name and weights == "packed" and not gpu_layers
    head = _EMBEDDING if tied else _HEAD
    here = (tensor for tensor in gguf.tensors if not division.on_device(tensor.name))
    return [tensor for tensor in here if _is_packed(tensor, head, weights)]


def _is_packed(tensor: GgufTensor, head: str, weights: str) -> bool:
    product = tensor.name == head or (tensor.name.startswith("blk.") and len(tensor.shape) >= 2)
    if not product or (weights == "experts" and EXPERTS.fullmatch(tensor.name)):
        return False
    multiple = _packable().get(tensor.type.name, 0)
    return multiple > 0 and tensor.shape[-2] % multiple == 0


@cache
def _packable() -> dict[str, int]:
    if platform.machine().lower() in ("arm64", "aarch64"):
        return _ARM
    try:
        wide = "avx512f" in Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        wide = False
    return _X86 | _X86_512 if wide else _X86


def _largest(gguf: GgufFile, name: str) -> int:
    """A number of the model's; where layers differ, the largest."""
    value = gguf.metadata.get(f"{gguf.metadata.text('general.architecture')}.{name}", 0)
    if isinstance(value, GgufArray):
        return int(np.max(value.numbers(), initial=0))
    assert isinstance(value, int), f"{name} was checked to be a number"
    return value


def _inner(gguf: GgufFile) -> int:
    """Numbers that the widest MLP computes for each token, without its input and output."""
    hidden, used = geometry_of(gguf).hidden_size, _largest(gguf, "expert_used_count")
    # An MLP's matrix is (inner, D), one of experts is (E, inner, D).
    dense = [
        t.shape[0] for t in gguf.tensors if t.name.startswith("blk.") and ".ffn_up" in t.name and len(t.shape) == 2
    ]
    experts = [t.shape[-2] for t in gguf.tensors if EXPERTS.fullmatch(t.name) and "ffn_down" not in t.name]
    dense += [t.shape[0] for t in gguf.tensors if _MIXES.search(t.name)]
    return 3 * max(dense, default=0) + used * (3 * max(experts, default=0) + 3 * hidden)
