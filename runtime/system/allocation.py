"""Turns failures to allocate, whoever reports them, into budget errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from edgeinfer.config import format_size
from edgeinfer.errors import BudgetError, EdgeInferError, Setting
from edgeinfer.runtime.system.memory import has_room, release_freed

_HINT = "Free memory, or load the model with a smaller " + Setting("context") + " or " + Setting("memory") + " budget."
# How onnxruntime, the C++ library under it and the native kernel put it.
_REPORTS = re.compile(r"bad[ _]alloc|failed to allocate memory|out of memory|cannot allocate memory", re.IGNORECASE)
_REQUESTED = re.compile(r"of size:? (\d+)")


def is_refusal(error: BaseException) -> bool:
    """Whether an exception, of any library, says that memory was refused."""
    return isinstance(error, MemoryError) or bool(_REPORTS.search(str(error)))


def refused(what: str, error: BaseException) -> BudgetError:
    """The error to raise from one for which `is_refusal` holds."""
    return _refused(what, _requested_bytes(error))


@contextmanager
def allocating(what: str) -> Iterator[None]:
    """Names what a block, or as a decorator a function, needs memory for."""
    try:
        yield
    except Exception as error:
        name_refusal(what, error)
        raise


def name_refusal(what: str, error: Exception) -> None:
    """Raises a budget error for one that says that memory was refused; else nothing happens."""
    if not isinstance(error, EdgeInferError) and is_refusal(error):
        release_freed()
        raise refused(what, error) from error


def require_room(what: str, nbytes: int) -> None:
    """Refuses work for which there is no memory, before native code begins it that would end the process then."""
    if not has_room(nbytes):
        raise _refused(what, nbytes)


def _refused(what: str, nbytes: int | None) -> BudgetError:
    size = "memory" if nbytes is None else format_size(nbytes)
    return BudgetError(f"{what} needs {size} that the system does not grant.", _HINT)


def _requested_bytes(error: BaseException) -> int | None:
    """The bytes that were asked for, where the error tells: numpy by shape and type, onnxruntime in its text."""
    shape, dtype = getattr(error, "shape", None), getattr(error, "dtype", None)
    if shape is not None and dtype is not None:
        nbytes: int = math.prod(shape) * np.dtype(dtype).itemsize
        return nbytes
    found = _REQUESTED.search(str(error))
    return int(found.group(1)) if found else None
