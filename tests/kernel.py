"""The native kernel of this machine; tests that are about it skip with the reason where it was not built."""

from __future__ import annotations

import pytest

from edgeinfer.runtime.native import library
from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel, native_kernel


def require_kernel() -> NativeKernel:
    """The kernel; anything but its absence is a failure."""
    if not library.LIBRARY.is_file():
        pytest.skip("edgeinfer was installed here without a C compiler")
    if Binding(library.LIBRARY).isas() == (library.PORTABLE,):
        pytest.skip("the kernel has no fast path for this processor")
    return native_kernel()
