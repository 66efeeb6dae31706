"""llama.cpp as llama-cpp-python brings it: found, checked and silenced once."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from edgeinfer.errors import UsageError

# The structures that are passed to llama.cpp change with most releases: from the first version on, before the second.
SUPPORTED = ("0.3.36", "0.3.37")
_INSTALL = (
    "Install the gguf extra, edgeinfer[gguf]: it compiles llama.cpp for some eight minutes and needs a C++ compiler "
    "and cmake."
)
_PACKAGE = "llama_cpp"
# llama.cpp's threads wait for each other some hundred times in a pass. GNU's OpenMP lets them spin 300,000 times, some
# 12 ms, before they sleep: on a busy machine a thread that spins keeps the processor from the very one it waits for.
# 1,000 turns are enough where nothing else runs: a reply of 64 tokens by a model of 3M takes 0.04 s with 1,000 as with
# 300,000, and 0.38 s where they sleep at once. Beside two busy loops it is 0.3, 4.5 and 0.1 s.
_SPINNING, _POLICY = ("GOMP_SPINCOUNT", "1000"), "OMP_WAIT_POLICY"
_ERROR_LEVEL = 4  # ggml_log_level
_PAUSE_HARD = 2  # omp_pause_resource_t
_PREFIX = re.compile(r"^(?:\w+: )*(?:error loading model: )?(?:\w+: )*")
# What llama.cpp's own defaults are: another layout of the structures would show other numbers here.
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
    """llama-cpp-python's low-level module, which says nothing on stderr from now on."""
    with _lock:
        return _checked()


def logged_error() -> str:
    """The first line that llama.cpp logged as an error since this was asked, without the names of its functions; empty
    where there is none. What follows the first is that each caller failed too."""
    line = _PREFIX.sub("", _log[0].strip()) if _log else ""
    _log.clear()
    return line.rstrip(".")


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Shows a listener every piece of text that llama.cpp logs meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def _soon_asleep() -> Iterator[None]:
    """Tells an OpenMP that is loaded and begins to work meanwhile how long to spin, unless the user told it."""
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
def _checked() -> Any:
    with _soon_asleep():
        return _tried()


def _tried() -> Any:
    """The module, once it is known to work here."""
    lib = _imported()
    _kept.append(lib.llama_log_callback(_remember))
    lib.llama_log_set(_kept[-1], None)
    _check_layout("model", lib.llama_model_default_params(), _MODEL_DEFAULTS)
    _check_layout("context", lib.llama_context_default_params(), _CONTEXT_DEFAULTS)
    lib.llama_backend_init()
    # Without these functions it was compiled in a way that has no such lists.
    with suppress(OSError, AttributeError):
        without_amx(functions(lib._lib._name))
    from edgeinfer.bundle.gguf.smoke import smoke_test

    fault = smoke_test(lib)
    if fault:
        raise _unsuitable(f"llama.cpp does not work here: {fault}")
    _end_threads_before_forks(lib)
    return lib


def _end_threads_before_forks(lib: Any) -> None:
    """Has GNU's OpenMP end its threads before a fork, as the child would wait for them in its first pass.

    In the parent the next pass starts them again. Other OpenMPs see to it themselves.
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
        # A library that lacks a function or cannot be loaded: compiled for another machine, or only in part.
        raise UsageError(f"llama-cpp-python cannot be loaded: {error}.", _INSTALL) from error
    finally:
        # Whoever imports the package later gets all of it.
        sys.modules.pop(_PACKAGE, None)


def is_installed() -> bool:
    """Whether llama-cpp-python is there, which is not loaded to find out."""
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
_RESULTS: dict[str, Any] = {
    "ggml_backend_buft_alloc_buffer": ctypes.c_void_p,
    "ggml_backend_buft_name": ctypes.c_char_p,
    "ggml_backend_dev_backend_reg": ctypes.c_void_p,
    "ggml_backend_dev_by_type": ctypes.c_void_p,
    "ggml_backend_dev_count": ctypes.c_size_t,
    "ggml_backend_dev_description": ctypes.c_char_p,
    "ggml_backend_dev_get": ctypes.c_void_p,
    "ggml_backend_dev_memory": None,
    "ggml_backend_dev_name": ctypes.c_char_p,
    "ggml_backend_dev_supports_op": ctypes.c_bool,
    "ggml_backend_cpu_buffer_type": ctypes.c_void_p,
    "ggml_backend_dev_type": ctypes.c_int,
    "ggml_backend_reg_by_name": ctypes.c_void_p,
    "ggml_backend_reg_dev_count": ctypes.c_size_t,
    "ggml_backend_reg_dev_get": ctypes.c_void_p,
    "ggml_backend_reg_get_proc_address": ctypes.c_void_p,
    "ggml_init": ctypes.c_void_p,
    "ggml_mul_mat": ctypes.c_void_p,
    "ggml_new_tensor_2d": ctypes.c_void_p,
}


@cache
def functions(name: str) -> Any:
    """ggml's functions in the library of this name, whose pointers go in as `c_void_p` and come out as numbers."""
    ggml = ctypes.CDLL(name)
    for function, result in _RESULTS.items():
        getattr(ggml, function).restype = result
    return ggml


def cpu_device(ggml: Any) -> ctypes.c_void_p:
    """The processor."""
    return ctypes.c_void_p(ggml.ggml_backend_dev_by_type(_CPU))


def extra_buffer_types(ggml: Any) -> Any:
    """llama.cpp's own array of what it tries before plain memory, ended by a null pointer; None where there is none."""
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
