"""Where llama.cpp keeps matrices: which layers lie on a graphics processor, which copies have an order of their own."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import Any

from edgeinfer.bundle.gguf.library import cpu_device, extra_buffer_types, functions
from edgeinfer.bundle.gguf.reader import GgufFile, GgufTensor
from edgeinfer.errors import UsageError
from edgeinfer.records import dataclass

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
    """A model divided between the processor and a graphics processor, which has the last layers.

    Attributes:
        blocks: layers of the model.
        gpu_layers: on the graphics processor; the norm and the matrix that give logits are the last of all.
    """

    blocks: int
    gpu_layers: int

    @classmethod
    def of(cls, gguf: GgufFile, gpu_layers: int) -> Division:
        """That of a file with so many layers on the graphics processor, or with all of them where it has fewer."""
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
    """A list for `tensor_buft_overrides`; None where it is empty.

    Args:
        head: keeps the norm and the matrix that give logits here, whatever lies elsewhere. A server would send as many
            numbers for each row as the vocabulary has tokens.
    """
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
    """What llama.cpp tries before plain memory, in its order."""
    kinds, index = extra_buffer_types(ggml), 0
    while kinds is not None and (kind := kinds[index]):
        yield int(kind)
        index += 1
