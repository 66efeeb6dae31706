"""What happens in the middle of a pass: after onnxruntime was asked to run, and before it looks whether to go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import onnxruntime as ort
import pytest

from tests.waiting import TIME_LIMIT


def elsewhere(act: Callable[[], object]) -> None:
    """Does something on a thread of its own, and waits for its end."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(TIME_LIMIT)
    assert not thread.is_alive(), "the other thread did not come back"


@contextmanager
def within_runs(act: Callable[[], object]) -> Iterator[None]:
    """Calls `act` on another thread within each run of onnxruntime's sessions."""
    run = ort.InferenceSession.run_with_iobinding

    def interrupted(session: ort.InferenceSession, *arguments: Any) -> None:
        elsewhere(act)
        run(session, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort.InferenceSession, "run_with_iobinding", interrupted)
        yield
