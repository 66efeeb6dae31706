"""llama.cpp as llama-cpp-python brings it: found, silenced, and checked by a small model made in memory."""

from __future__ import annotations

import ctypes
import math
import os
import re
import struct
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgeinfer.core.errors import UsageError

# The first supported version and the first one after: llama.cpp's structures change with most releases.
SUPPORTED = ("0.3.36", "0.3.37")
_INSTALL = (
    "Install the gguf extra, edgeinfer[gguf]: it compiles llama.cpp for some eight minutes and needs a C++ compiler "
    "and cmake."
)
_PACKAGE = "llama_cpp"
# llama.cpp's threads wait for each other some hundred times in a pass. GNU's OpenMP lets them spin 300,000 times, some
# 12 ms, before they sleep: on a busy machine a spinning thread may occupy the processor that the other thread needs.
# 1,000 turns are enough on an idle machine: a reply of 64 tokens by a model of 3M takes 0.04 s with 1,000 as with
# 300,000, and 0.38 s where they sleep at once. With two busy loops it is 0.3, 4.5 and 0.1 s.
_SPINNING, _POLICY = ("GOMP_SPINCOUNT", "1000"), "OMP_WAIT_POLICY"
_ERROR_LEVEL = 4  # ggml_log_level
_PAUSE_HARD = 2  # omp_pause_resource_t
_PREFIX = re.compile(r"^(?:\w+: )*(?:error loading model: )?(?:\w+: )*")
# llama.cpp's own defaults: another layout of the structures would show other numbers here.
_MODEL_DEFAULTS = {
    "n_gpu_layers": -1,
    "split_mode": 1,
    "main_gpu": 0,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max": 0,
    "flash_attn_type": -1,
    "yarn_orig_ctx": 0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
}
_lock = Lock()
_log: list[str] = []
_listeners: list[Callable[[str], None]] = []
_kept: list[Any] = []  # callbacks, as long as the library may call them


def llama_library() -> Any:
    """llama-cpp-python's low-level module, silenced on stderr."""
    with _lock:
        return _checked()


def logged_error() -> str:
    """The first error that llama.cpp logged since the last call, without its functions' names; empty without one."""
    line = _PREFIX.sub("", _log[0].strip()) if _log else ""
    _log.clear()
    return line.rstrip(".")


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Shows a listener every text that llama.cpp logs in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def _soon_asleep() -> Iterator[None]:
    """Shortens the spinning of an OpenMP that is loaded in the block, unless the user has set it."""
    name, value = _SPINNING
    if name in os.environ or _POLICY in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@cache
@_soon_asleep()
def _checked() -> Any:
    lib = _imported()
    _kept.append(lib.llama_log_callback(_remember))
    lib.llama_log_set(_kept[-1], None)
    _check_layout("model", lib.llama_model_default_params(), _MODEL_DEFAULTS)
    _check_layout("context", lib.llama_context_default_params(), _CONTEXT_DEFAULTS)
    lib.llama_backend_init()
    # A library without these functions has no such lists.
    with suppress(OSError, AttributeError):
        without_amx(functions(lib._lib._name))
    fault = smoke_test(lib)
    if fault:
        raise _unsuitable(f"llama.cpp does not work here: {fault}")
    _end_threads_before_forks(lib)
    return lib


def _end_threads_before_forks(lib: Any) -> None:
    """Has GNU's OpenMP end its threads before a fork, as the child would wait for them in its first pass.

    In the parent the next pass starts them again. Other OpenMPs need no help.
    """
    pause = getattr(lib._lib, "omp_pause_resource_all", None)
    if pause is not None and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lambda: pause(_PAUSE_HARD))


def _imported() -> Any:
    """The module of the bindings, without the rest of the package, whose templates and caches take 10 MB."""
    folder = _folder()
    version = installed_version()
    first, end = map(_numbers, SUPPORTED)
    if not first <= _numbers(version) < end:
        raise _unsuitable(f"llama-cpp-python {version} is installed, which edgeinfer does not support.")
    if _PACKAGE in sys.modules:
        return import_module(f"{_PACKAGE}.{_PACKAGE}")
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    try:
        return import_module(f"{_PACKAGE}.{_PACKAGE}")
    except (OSError, RuntimeError, AttributeError) as error:
        # The library lacks a function or cannot be loaded: compiled for another machine, or only in part.
        raise UsageError(f"llama-cpp-python cannot be loaded: {error}.", _INSTALL) from error
    finally:
        # Later imports get the whole package.
        sys.modules.pop(_PACKAGE, None)


def is_installed() -> bool:
    """Whether llama-cpp-python is there; does not load it."""
    return find_spec(_PACKAGE) is not None


def installed_version() -> str:
    """The version of llama-cpp-python, "unknown" where it does not say."""
    try:
        found = re.search(r'__version__ = "([^"]+)"', (_folder() / "__init__.py").read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"llama-cpp-python cannot be read: {error}.", _INSTALL) from error
    return found[1] if found else "unknown"


def _folder() -> Path:
    spec = find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("llama-cpp-python is not installed.", _INSTALL)
    return Path(spec.submodule_search_locations[0])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _check_layout(what: str, params: Any, defaults: dict[str, Any]) -> None:
    wrong = [name for name, value in defaults.items() if getattr(params, name, None) != value]
    if wrong:
        raise _unsuitable(f"llama.cpp's {what} parameters are laid out differently ({', '.join(wrong)}).")


def _unsuitable(message: str) -> UsageError:
    first, end = SUPPORTED
    return UsageError(message, f'Install a version that fits: pip install "llama-cpp-python>={first},<{end}".')


def _remember(level: int, text: bytes | None, _: Any) -> None:
    """Keeps the first line of the first error; called by llama.cpp for whatever it logs."""
    line = (text or b"").decode("utf-8", "replace")
    for listener in _listeners:
        listener(line)
    if level == _ERROR_LEVEL and line.strip() and not _log:
        _log.append(line)


_CPU = 0  # ggml_backend_dev_type
_AMX = b"AMX"
# Return types of ggml's functions, and the functions that return a pointer.
_RESULTS: dict[str, Any] = {
    "ggml_backend_buft_name": ctypes.c_char_p,
    "ggml_backend_dev_description": ctypes.c_char_p,
    "ggml_backend_dev_name": ctypes.c_char_p,
    "ggml_backend_dev_count": ctypes.c_size_t,
    "ggml_backend_reg_dev_count": ctypes.c_size_t,
    "ggml_backend_dev_memory": None,
    "ggml_backend_dev_supports_op": ctypes.c_bool,
    "ggml_backend_dev_type": ctypes.c_int,
}
_POINTERS = (
    *("ggml_backend_buft_alloc_buffer", "ggml_backend_dev_backend_reg", "ggml_backend_dev_by_type"),
    *("ggml_backend_dev_get", "ggml_backend_cpu_buffer_type", "ggml_backend_reg_by_name", "ggml_backend_reg_dev_get"),
    *("ggml_backend_reg_get_proc_address", "ggml_init", "ggml_mul_mat", "ggml_new_tensor_2d"),
)


@cache
def functions(name: str) -> Any:
    """ggml's functions in a library, whose pointers go in as `c_void_p` and come out as numbers."""
    ggml = ctypes.CDLL(name)
    for function, result in {**dict.fromkeys(_POINTERS, ctypes.c_void_p), **_RESULTS}.items():
        getattr(ggml, function).restype = result
    return ggml


def cpu_device(ggml: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(ggml.ggml_backend_dev_by_type(_CPU))


def extra_buffer_types(ggml: Any) -> Any:
    """llama.cpp's own array of buffers that it tries before plain memory, ended by a null pointer; None without one."""
    registry = ctypes.c_void_p(ggml.ggml_backend_dev_backend_reg(cpu_device(ggml)))
    address = ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return None
    ask = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)
    return ask(cpu_device(ggml)) or None


def without_amx(ggml: Any) -> bool:
    """Takes AMX's order off the list, for all models that this process loads from now on; whether it was there."""
    kinds = extra_buffer_types(ggml)
    source = target = 0
    while kinds is not None and kinds[source]:
        if ggml.ggml_backend_buft_name(ctypes.c_void_p(kinds[source])) != _AMX:
            kinds[target] = kinds[source]
            target += 1
        source += 1
    for index in range(target, source):
        kinds[index] = None
    return target != source


_WIDTH, _VOCABULARY, _ALIGNMENT = 32, 16, 32
_LAYERS = 2  # with the head, as llama.cpp counts them
_TOKENS = (3, 7, 1)
# Tolerance for logits near 1 between passes of different sizes: float32 sums in another order.
_NEAR = 1e-4
# Tolerance between a graphics processor, which may multiply in half precision, and the CPU.
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
    """A step that the library fails."""


def smoke_test(lib: Any) -> str:
    """What is wrong with the library, empty where nothing is.

    Tokens fed at once must give the logits of tokens fed one by one, and a cache that was copied out and back must give
    the same next token.
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
    """A context of the model on a device, by default the CPU, and what gives the logits behind some of the tokens."""
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
