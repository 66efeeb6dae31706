"""What the machine at hand can do at best, for callers who compare it with what a model gets; knows no model."""

from __future__ import annotations

from edgeinfer.results import DeviceLimits
from edgeinfer.runtime.native.library import native_kernel
from edgeinfer.runtime.native.probe import measure_limits

__all__ = ["measure_device"]


def measure_device(threads: int = 1) -> DeviceLimits:
    """Measures how fast memory is read and multiply-adds are done, in about 0.2 s.

    No pass can be faster than `Model.pass_work` divided by these figures.

    Args:
        threads: that work together.

    Raises:
        NativeUnavailableError: there is no native kernel here.
        UsageError: no thread.
    """
    return measure_limits(native_kernel(), threads)
