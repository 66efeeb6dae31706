"""The kernel library as it was built with this installation."""

from __future__ import annotations

import pytest

from edgeinfer.runtime.native.binding import Binding
from edgeinfer.runtime.native.library import NativeKernel
from tests.kernel import require_kernel


@pytest.fixture(scope="session")
def kernel() -> NativeKernel:
    """The kernel of this machine."""
    return require_kernel()


@pytest.fixture(scope="session")
def binding(kernel: NativeKernel) -> Binding:
    """Its functions."""
    return Binding(kernel.path)
