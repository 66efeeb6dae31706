"""Limits of the machine, measured with the selected instruction set on the wanted number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import edgeinfer
from edgeinfer.core.errors import NativeUnavailableError, UsageError
from edgeinfer.core.results import DeviceLimits, PassWork
from edgeinfer.runtime.native import probe
from edgeinfer.runtime.native.library import NativeKernel, load_kernel, native_kernel


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeKernel]:
    try:
        found = native_kernel()
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(probe, "_READ_BYTES", 8 << 20)
    yield found
    load_kernel(found.path, found.isa)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_limits_follow_kernel_and_threads(kernel: NativeKernel, threads: int) -> None:
    limits = edgeinfer.tools.measure_device(threads)
    assert (limits.kernel, limits.threads) == (kernel.isa, threads)
    assert limits.read_bytes_per_s > 0
    assert (limits.multiply_adds_per_s is None) == (kernel.isa == "portable")


@pytest.mark.clock
def test_limits_are_plausible_for_a_machine(kernel: NativeKernel) -> None:
    limits = edgeinfer.tools.measure_device(1)
    # Any machine reads more than it could from a disk, and less than from its registers.
    assert 1e8 < limits.read_bytes_per_s < 1e13
    if kernel.isa != "portable":
        assert limits.multiply_adds_per_s is not None and 1e8 < limits.multiply_adds_per_s < 1e14


def test_a_path_without_an_instruction_for_multiply_adds_has_no_rate(kernel: NativeKernel) -> None:
    limits = probe.measure_limits(load_kernel(kernel.path, "portable"), 1)
    assert limits.kernel == "portable" and limits.multiply_adds_per_s is None


def test_no_thread_cannot_be_measured(kernel: NativeKernel) -> None:
    with pytest.raises(UsageError, match="0 threads"):
        edgeinfer.tools.measure_device(0)


def test_without_the_kernel_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEINFER_NATIVE", "0")
    with pytest.raises(NativeUnavailableError, match="EDGEINFER_NATIVE=0"):
        edgeinfer.tools.measure_device()


def test_work_over_limits_is_time() -> None:
    work = PassWork(weight_bytes=2_000_000, multiply_adds=30_000_000) + PassWork(1_000_000, 0)
    assert DeviceLimits("avx2", 1, 1e9, 1e10).floor_ms(work) == (3.0, 3.0)
    assert DeviceLimits("portable", 1, 1e9, None).floor_ms(work) == (3.0, None)
