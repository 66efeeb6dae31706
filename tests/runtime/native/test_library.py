"""Finding the kernel library: each fault has its own error, and onnxruntime is checked before it is used."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgeinfer.core.errors import NativeUnavailableError, UsageError
from edgeinfer.runtime.backends.onnx.session import OrtSession
from edgeinfer.runtime.native import library, selftest
from edgeinfer.runtime.native.binding import VERSION, Binding, PackedMatrix
from edgeinfer.runtime.native.library import NativeKernel, load_kernel, native_kernel
from edgeinfer.runtime.weights.layouts import runs_native
from tests.cli import TIME_LIMIT
from tests.tables import each_row

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux loads a damaged library until it crashes")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """A test's findings do not reach the next; afterwards the best instruction set is selected again."""
    for cached in (library._open, library._first_right):
        cached.cache_clear()
    yield
    for cached in (library._open, library._first_right):
        cached.cache_clear()
    if library.LIBRARY.is_file():
        load_kernel(library.LIBRARY)


def test_the_kernel_is_found_and_runs_on_the_best_instruction_set(kernel: NativeKernel, binding: Binding) -> None:
    assert kernel.path.is_file()
    assert kernel.isa == binding.isas()[0]
    assert binding.isas()[-1] == "portable"
    assert binding.version == VERSION


def test_the_environment_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_NATIVE", "0")
    with pytest.raises(NativeUnavailableError, match="EDGEINFER_NATIVE=0 switches the native kernel off"):
        native_kernel()


def test_the_environment_chooses_the_instruction_set(kernel: NativeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_NATIVE_ISA", "portable")
    assert native_kernel() == NativeKernel(kernel.path, "portable")
    monkeypatch.delenv("EDGEINFER_NATIVE_ISA")
    assert native_kernel() == kernel


def test_an_unknown_instruction_set_is_refused(kernel: NativeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_NATIVE_ISA", "mmx")
    with pytest.raises(UsageError, match=r"EDGEINFER_NATIVE_ISA=mmx .* Choose one of .*portable"):
        native_kernel()


def test_a_library_that_was_not_built_is_no_surprise(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"was not built\. Install edgeinfer where there is a C compiler"):
        load_kernel(tmp_path / library.LIBRARY.name)


@linux
def test_a_shortened_library_is_refused(kernel: NativeKernel, tmp_path: Path) -> None:
    data, copy = kernel.path.read_bytes(), tmp_path / "short.so"
    for length in (0, 3, 63, 64, 200, 5000, len(data) // 2, len(data) * 3 // 4):
        copy.write_bytes(data[:length])
        library._open.cache_clear()
        says = "is not a library" if length < 64 else "file is incomplete"
        with pytest.raises(NativeUnavailableError, match=says):
            load_kernel(copy)


@linux
def test_a_library_of_another_processor_is_refused(kernel: NativeKernel, tmp_path: Path) -> None:
    copy = tmp_path / "foreign.so"
    compiler = shutil.which("aarch64-linux-gnu-gcc") if os.uname().machine == "x86_64" else None
    if compiler is not None:
        (tmp_path / "empty.c").write_text("int nothing;\n")
        command = [compiler, "-shared", str(tmp_path / "empty.c"), "-o", str(copy)]
        subprocess.run(command, check=True, timeout=TIME_LIMIT)
    else:
        header = bytearray(kernel.path.read_bytes())
        header[18:20] = struct.pack("<H", 0xF3 if os.uname().machine != "riscv64" else 0x3E)
        copy.write_bytes(header)
    with pytest.raises(NativeUnavailableError, match="was built for another processor"):
        load_kernel(copy)


def compile_library(folder: Path, source: str) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "other.c").write_text(source)
    command = [compiler, "-shared", "-fPIC", str(folder / "other.c"), "-o", str(folder / "other.so")]
    subprocess.run(command, check=True, timeout=TIME_LIMIT)
    return folder / "other.so"


@linux
def test_a_library_of_another_program_is_refused(tmp_path: Path) -> None:
    path = compile_library(tmp_path, "int nothing(void) { return 0; }\n")
    with pytest.raises(NativeUnavailableError, match=r"cannot be loaded: .* is not a library of edgeinfer"):
        load_kernel(path)


@linux
def test_a_library_of_another_version_is_refused_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = compile_library(tmp_path, f"int edgeinfer_version(void) {{ return {VERSION + 1}; }}\n")
    says = f"has version {VERSION + 1}, this edgeinfer needs {VERSION}"
    with pytest.raises(NativeUnavailableError, match=says):
        load_kernel(path)
    monkeypatch.setattr(library, "LIBRARY", path)
    assert not runs_native() and not runs_native()  # as a model and its drafter ask
    (told,) = caplog.messages
    assert f"{says}. Install edgeinfer again on this machine" in told


def test_a_session_that_cannot_take_the_kernel_says_so(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailableError, match=r"onnxruntime refuses the native kernel: .*missing"):
        OrtSession("model.onnx", 1, NativeKernel(tmp_path / "missing.so", "best"))


class Wrong:
    """A binding whose results are a little off, but for the instruction sets that are said to be right.

    Args:
        function: whose results: "multiply", "attend" or "activate".
    """

    def __init__(self, binding: Binding, right: set[str], function: str) -> None:
        self._binding = binding
        self._right = right
        self._function = function
        self.version, self.isas, self.select = binding.version, binding.isas, binding.select

    def multiply(self, isa: str, matrix: PackedMatrix, x: object, **options: object) -> object:
        return self._off("multiply", isa, self._binding.multiply(isa, matrix, x, **options))  # type: ignore[arg-type]

    def attend(self, isa: str, *given: Any, jobs: int) -> object:
        return self._off("attend", isa, self._binding.attend(isa, *given, jobs=jobs))

    def activate(self, isa: str, *given: Any) -> object:
        return self._off("activate", isa, self._binding.activate(isa, *given))

    def _off(self, function: str, isa: str, y: NDArray[np.float32]) -> object:
        right = isa in self._right or function != self._function
        return y if right else np.nextafter(y, np.float32(np.inf)) * np.float32(1.001)


Broken = Callable[..., None]


@pytest.fixture
def only_right(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> Broken:
    """Breaks all instruction sets but some."""

    def apply(right: set[str], function: str = "multiply") -> None:
        library._first_right.cache_clear()
        monkeypatch.setattr(library, "_open", lambda path: Wrong(binding, right, function))

    return apply


def test_a_wrong_instruction_set_gives_way_to_the_next(
    kernel: NativeKernel, binding: Binding, only_right: Broken, caplog: pytest.LogCaptureFixture
) -> None:
    best, second, *_ = binding.isas()
    if second == "portable":
        pytest.skip("this machine has only one fast path")
    for function in ("multiply", "attend", "activate"):
        caplog.clear()
        only_right({second, "portable"}, function)
        assert load_kernel(kernel.path).isa == second
        assert f"fails its self-test on {best}" in caplog.text


def test_the_slow_portable_path_never_takes_the_place_of_a_fast_one(kernel: NativeKernel, only_right: Broken) -> None:
    only_right({"portable"})
    with pytest.raises(NativeUnavailableError, match=f"fails its self-test on {kernel.isa}"):
        load_kernel(kernel.path)
    assert load_kernel(kernel.path, "portable").isa == "portable"


def test_a_processor_without_a_fast_path_goes_without_the_kernel(
    kernel: NativeKernel, binding: Binding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(binding), "isas", lambda self: ("portable",))
    with pytest.raises(NativeUnavailableError, match=r"no fast path for this processor\. Nothing needs to be done"):
        load_kernel(kernel.path)


def test_a_wrong_portable_path_rules_the_library_out(kernel: NativeKernel, only_right: Broken) -> None:
    for function in ("multiply", "attend", "activate"):
        only_right(set(), function)
        with pytest.raises(NativeUnavailableError, match="fails its self-test: its portable path is wrong"):
            load_kernel(kernel.path)


def test_a_wrong_instruction_set_that_was_asked_for_is_an_error(kernel: NativeKernel, only_right: Broken) -> None:
    only_right({"portable"})
    with pytest.raises(NativeUnavailableError, match=f"fails its self-test on {kernel.isa}"):
        load_kernel(kernel.path, kernel.isa)


def test_every_usable_instruction_set_passes(binding: Binding) -> None:
    assert [isa for isa in binding.isas() if not selftest.agrees_with_portable(binding, isa)] == []
    assert selftest.portable_is_right(binding)


SLOTS = 276
Pointer = ctypes.c_void_p
Status = ctypes.CFUNCTYPE(Pointer, ctypes.c_int, ctypes.c_char_p)
Code = ctypes.CFUNCTYPE(ctypes.c_int, Pointer)
Release = ctypes.CFUNCTYPE(None, Pointer)
GetApi = ctypes.CFUNCTYPE(Pointer, ctypes.c_uint32)
GetVersion = ctypes.CFUNCTYPE(Pointer)


class Runtime:
    """A table of functions as onnxruntime hands it out, with only those that our library tries first."""

    def __init__(self, version: bytes, oldest: int = 1, newest: int = 17, code: int | None = None) -> None:
        self.errors: list[str] = []
        self.asked: list[int] = []
        self._last = 0

        def create(error: int, message: bytes) -> int:
            self._last = error
            self.errors.append(message.decode())
            return 1

        def get_api(number: int) -> int | None:
            self.asked.append(number)
            return ctypes.addressof(self._table) if oldest <= number <= newest else None

        self._table = (Pointer * SLOTS)()
        kept = {
            0: Status(create),
            1: Code(lambda status: self._last if code is None else code),
            93: Release(lambda status: None),
        }
        for slot, function in kept.items():
            self._table[slot] = ctypes.cast(function, Pointer)
        text = ctypes.create_string_buffer(version)
        base = (GetApi(get_api), GetVersion(lambda: ctypes.addressof(text)))
        self._kept = (kept, base, text)
        self.base = (Pointer * 2)(*(ctypes.cast(function, Pointer) for function in base))


def register(kernel: NativeKernel, runtime: Runtime) -> int | None:
    function = ctypes.CDLL(str(kernel.path)).RegisterCustomOps
    function.restype = Pointer
    status: int | None = function(None, ctypes.byref(runtime.base))
    return status


@each_row("version", [b"1.16.3", b"0.99.0", b"2.0.0", b"17", b"", b"one.two", b"1.x", b"-1.20"])
def test_an_onnxruntime_of_another_version_is_refused_unasked(kernel: NativeKernel, version: bytes) -> None:
    runtime = Runtime(version)
    assert register(kernel, runtime) == 1
    assert runtime.errors == [
        f"onnxruntime {version.decode()} is not a version that edgeinfer's kernel works with: 1.17 to 1.x"
    ]
    # An older runtime writes a complaint to stderr when it is asked for a table that it does not have.
    assert runtime.asked == [1]


@each_row("version", [b"1.17.0", b"1.31.1"])
def test_an_onnxruntime_without_the_table_is_refused(kernel: NativeKernel, version: bytes) -> None:
    runtime = Runtime(version, newest=16)
    assert register(kernel, runtime) == 1
    assert runtime.asked == [17, 1]


def test_a_wrong_table_is_refused(kernel: NativeKernel) -> None:
    runtime = Runtime(b"1.31.1", code=7)
    assert register(kernel, runtime) == 1
    assert "is not a version that edgeinfer's kernel works with" in runtime.errors[-1]


def test_a_runtime_that_cannot_even_make_errors_is_left_alone(kernel: NativeKernel) -> None:
    assert register(kernel, Runtime(b"9.0", oldest=5)) is None
