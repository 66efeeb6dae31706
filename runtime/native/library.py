"""Finds the kernel library next to this file and checks whether it can be trusted.

`EDGEINFER_NATIVE=0` switches the kernel off, `EDGEINFER_NATIVE_ISA` names the instruction set to use.
"""

from __future__ import annotations

import functools
import logging
import os
import struct
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from edgeinfer.core.errors import NativeUnavailableError, UsageError
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.native.binding import VERSION, Binding
from edgeinfer.runtime.native.selftest import agrees_with_portable, portable_is_right

_SUFFIXES = {"win32": ".dll", "darwin": ".dylib"}
PORTABLE = "portable"
LIBRARY = Path(__file__).with_name("edgeinfer_native" + _SUFFIXES.get(sys.platform, ".so"))
_BUILD = (
    "Install edgeinfer where there is a C compiler, or continue without the kernel, which is slower "
    "but gives the same text."
)
# How glibc's loader says that the system refused the addresses.
_NO_ROOM = "failed to map segment"
_SLOW = "Nothing needs to be done: onnxruntime's own operators run instead."
_REBUILD = (
    "Install edgeinfer again on this machine, or continue without the kernel, which is slower but gives the same text."
)

_log = logging.getLogger("edgeinfer")


@dataclass(frozen=True)
class NativeKernel:
    """A kernel library that passed its self-test, and the instruction set it runs on."""

    path: Path
    isa: str


def switched_off() -> bool:
    """Whether the environment says that the kernel is not to be used."""
    return os.environ.get("EDGEINFER_NATIVE") == "0"


def native_kernel() -> NativeKernel:
    """The kernel of this machine, found and tested once."""
    if switched_off():
        hint = "Remove the variable to use the kernel."
        raise NativeUnavailableError("EDGEINFER_NATIVE=0 switches the native kernel off.", hint)
    return load_kernel(LIBRARY, os.environ.get("EDGEINFER_NATIVE_ISA"))


def is_usable() -> bool:
    """Whether this machine can run the kernel."""
    try:
        native_kernel()
    except NativeUnavailableError:
        return False
    return True


def load_kernel(path: Path, isa: str | None = None) -> NativeKernel:
    """Loads and tests a kernel library, and selects the instruction set for sessions that are made from now on.

    Args:
        isa: the instruction set to use; None takes the best that passes. "portable" only runs when it is named: it is
            slower than onnxruntime's own operators.
    """
    binding = _open(path)
    names = binding.isas()
    if isa is not None and isa not in names:
        message = f"EDGEINFER_NATIVE_ISA={isa} is not an instruction set of this machine."
        raise UsageError(message, f"Choose one of {', '.join(names)}, or remove the variable.")
    chosen = _first_right(path, (isa,) if isa is not None else tuple(name for name in names if name != PORTABLE))
    binding.select(chosen)
    return NativeKernel(path, chosen)


def library() -> Binding:
    """The library as it lies here, for what no instruction set can get wrong: no path is chosen and nothing tested."""
    return _open(LIBRARY)


def dropping_behind(spans: Sequence[tuple[int, int]]) -> AbstractContextManager[None]:
    """Let operators drop pages that they have read; see `Binding.dropping_behind`. The kernel must be loaded."""
    return _open(LIBRARY).dropping_behind(spans)


@functools.cache
def _open(path: Path) -> Binding:
    if not path.is_file():
        raise NativeUnavailableError("The native kernel was not built.", _BUILD)
    _check_format(path)
    try:
        binding = Binding(path)
    except OSError as error:
        if _NO_ROOM in str(error):
            raise MemoryError(str(error)) from error
        raise NativeUnavailableError(f"The native kernel cannot be loaded: {error}.", _REBUILD) from error
    if binding.version != VERSION:
        message = f"The native kernel has version {binding.version}, this edgeinfer needs {VERSION}."
        raise NativeUnavailableError(message, _REBUILD)
    return binding


@functools.cache
def _first_right(path: Path, isas: tuple[str, ...]) -> str:
    binding = _open(path)
    if not portable_is_right(binding):
        message = "The native kernel fails its self-test: its portable path is wrong."
        raise NativeUnavailableError(message, _REBUILD)
    for isa in isas:
        if isa == PORTABLE or agrees_with_portable(binding, isa):
            return isa
        _log.warning("The native kernel fails its self-test on %s; the next instruction set is used.", isa)
    reason = f"fails its self-test on {', '.join(isas)}" if isas else "has no fast path for this processor"
    raise NativeUnavailableError(f"The native kernel {reason}.", _REBUILD if isas else _SLOW)


def _check_format(path: Path) -> None:
    """Refuse a truncated library: Linux maps it without checking its length, and crashes later."""
    if sys.platform != "linux":
        return
    data = path.read_bytes()
    # /proc/self/exe is a program that this machine runs: class, byte order and processor must be the same.
    with Path("/proc/self/exe").open("rb") as file:
        own = file.read(20)
    if data[:4] != b"\x7fELF" or len(data) < 64:
        raise NativeUnavailableError(f"{path} is not a library.", _REBUILD)
    if (data[4:6], data[18:20]) != (own[4:6], own[18:20]):
        raise NativeUnavailableError("The native kernel was built for another processor.", _REBUILD)
    # Elf64_Ehdr: e_phoff at 32, e_phentsize and e_phnum at 54; Elf64_Phdr: p_offset at 8, p_filesz at 32.
    (table,), (size, count) = struct.unpack_from("=Q", data, 32), struct.unpack_from("=HH", data, 54)
    ends = [table + size * count]
    if ends[0] <= len(data):
        parts = (struct.unpack_from("=Q16xQ", data, table + i * size + 8) for i in range(count))
        ends += [offset + length for offset, length in parts]
    if max(ends) > len(data):
        raise NativeUnavailableError("The native kernel's file is incomplete.", _REBUILD)
