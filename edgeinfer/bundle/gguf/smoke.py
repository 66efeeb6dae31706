"""A model of one layer, made in memory, that shows whether llama.cpp and its devices compute what they should."""

from __future__ import annotations

import ctypes
import math
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_WIDTH, _VOCABULARY, _ALIGNMENT = 32, 16, 32
_LAYERS = 2  # with the head, as llama.cpp counts them
_TOKENS = (3, 7, 1)
# Of logits near 1, between passes of different sizes: float32 sums in another order.
_NEAR = 1e-4
# Between a graphics processor, which may multiply in half precision, and the CPU.
_NEAR_ELSEWHERE = 0.02


def tiny_gguf() -> bytes:
    """A Llama of one layer and one head, float32, without a vocabulary."""
    square, row = (_WIDTH, _WIDTH), (_WIDTH,)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (_VOCABULARY, _WIDTH), "output_norm.weight": row}
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}.weight"] = row
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}.weight"] = square
    strings = {"general.architecture": "llama", "tokenizer.ggml.model": "no_vocab"}
    numbers = {
        "vocab_size": _VOCABULARY,
        "block_count": 1,
        "context_length": 64,
        "embedding_length": _WIDTH,
        "feed_forward_length": _WIDTH,
        "attention.head_count": 1,
    }
    header = [b"GGUF", struct.pack("<IQQ", 3, len(shapes), len(strings) + len(numbers) + 1)]
    header += [_text(key) + struct.pack("<I", 8) + _text(value) for key, value in strings.items()]
    header += [_text(f"llama.{key}") + struct.pack("<II", 4, value) for key, value in numbers.items()]
    header.append(_text("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5))
    data, offset = b"", 0
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        header.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, offset))
        values = random.normal(0.0, 0.5, shape) if len(shape) == 2 else np.ones(shape)
        data += values.astype("<f4").tobytes()
        offset += 4 * math.prod(shape)  # every size is a multiple of the alignment
    written = b"".join(header)
    return written + bytes(-len(written) % _ALIGNMENT) + data


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


_Feed = Callable[[int, int], "NDArray[np.float32] | None"]


class _FaultError(Exception):
    """What the library cannot do."""


def smoke_test(lib: Any) -> str:
    """What is wrong with the library, empty where nothing is.

    Tokens fed at once must give what they give one after the other, and a cache that was copied out and back must
    give the same next token.
    """
    try:
        with _model(lib, None) as (context, feed):
            return _compare(lib, context, feed)
    except _FaultError as fault:
        return str(fault)


def device_fault(lib: Any, device: int) -> str:
    """What is wrong with one of llama.cpp's devices, empty where nothing is: it must give the CPU's logits."""
    try:
        with _model(lib, None) as (_, feed):
            wanted = feed(0, len(_TOKENS))
        with _model(lib, device) as (_, feed):
            found = feed(0, len(_TOKENS))
    except _FaultError as fault:
        return str(fault)
    return "" if _near(found, wanted, _NEAR_ELSEWHERE) else "it computes something else than the CPU"


@contextmanager
def _model(lib: Any, device: int | None) -> Iterator[tuple[Any, _Feed]]:
    """A context of the model, and what gives the logits behind some of the tokens.

    Args:
        device: that has all layers; None is the CPU.
    """
    with tempfile.TemporaryDirectory(prefix="edgeinfer-") as folder, ExitStack() as stack:
        path = Path(folder) / "smoke.gguf"
        path.write_bytes(tiny_gguf())
        params = lib.llama_model_default_params()
        # Without a list llama.cpp takes all graphics processors.
        devices = (ctypes.c_void_p * 2)(device)
        params.devices = ctypes.addressof(devices)
        params.n_gpu_layers = 0 if device is None else _LAYERS
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise _FaultError("it cannot load a model of one layer")
        stack.callback(lib.llama_model_free, model)
        options = lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = 64
        options.n_threads = options.n_threads_batch = 1
        context = lib.llama_init_from_model(model, options)
        if not context:
            raise _FaultError("it cannot make a context")
        stack.callback(lib.llama_free, context)
        batch = lib.llama_batch_init(len(_TOKENS), 0, 1)
        stack.callback(lib.llama_batch_free, batch)
        yield context, lambda start, stop: _feed(lib, context, batch, start, stop)


def _compare(lib: Any, context: Any, feed: _Feed) -> str:
    memory = lib.llama_get_memory(context)
    last = len(_TOKENS) - 1
    single = [feed(place, place + 1) for place in range(last)]
    size = lib.llama_state_seq_get_size(context, 0)
    state = (ctypes.c_uint8 * size)()
    written = lib.llama_state_seq_get_data(context, state, size, 0)
    single.append(feed(last, last + 1))
    lib.llama_memory_clear(memory, True)
    together = feed(0, last)
    if not _near(together, single[last - 1], _NEAR):
        return "tokens fed at once give other logits than one after the other"
    lib.llama_memory_clear(memory, True)
    if written != size or lib.llama_state_seq_set_data(context, state, size, 0) != size:
        return "its cache cannot be copied"
    if not _near(feed(last, last + 1), single[last], _NEAR):
        return "a cache that was copied gives other logits"
    if not lib.llama_memory_seq_rm(memory, 0, last, -1) or lib.llama_memory_seq_pos_max(memory, 0) != last - 1:
        return "its cache cannot be cut"
    return ""


def _near(one: NDArray[np.float32] | None, other: NDArray[np.float32] | None, tolerance: float) -> bool:
    return one is not None and other is not None and np.allclose(one, other, atol=tolerance)


def _feed(lib: Any, context: Any, batch: Any, start: int, stop: int) -> NDArray[np.float32] | None:  # (1, V)
    """The logits after the last of some of the tokens."""
    batch.n_tokens = stop - start
    for row, place in enumerate(range(start, stop)):
        batch.token[row], batch.pos[row] = _TOKENS[place], place
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
        batch.logits[row] = place == stop - 1
    if lib.llama_decode(context, batch) != 0:
        return None
    logits: NDArray[np.float32] = np.ctypeslib.as_array(lib.llama_get_logits(context), (1, _VOCABULARY)).copy()
    return logits
