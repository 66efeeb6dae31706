"""What onnxruntime says while a session is made: steps of the loading, and others' messages, which are passed on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import onnxruntime as ort
import pytest

from edgeinfer.runtime.backends.onnx import opening
from edgeinfer.runtime.backends.onnx.check_models import ordinary_model
from edgeinfer.runtime.backends.onnx.opening import SILENT, hearing
from edgeinfer.runtime.backends.onnx.session import OrtSession

INFO, WARNING = 1, 2
Heard = Callable[[int, str, str, str, str], None]


@pytest.fixture
def callbacks(monkeypatch: pytest.MonkeyPatch) -> list[Heard | None]:
    """What onnxruntime is told to call, in order."""
    told: list[Heard | None] = []
    name = "set_default_logger_callback"
    monkeypatch.setattr(ort, name, lambda callback, severity=WARNING: told.append(callback), raising=False)
    return told


def test_messages_about_the_session_are_steps(callbacks: list[Heard | None], caplog: pytest.LogCaptureFixture) -> None:
    steps: list[str] = []
    options = ort.SessionOptions()
    with hearing(options, lambda: steps.append("step")):
        (heard,) = callbacks
        assert heard is not None
        heard(INFO, "onnxruntime", options.logid, "place", "Initializing session.")
        heard(WARNING, "onnxruntime", options.logid, "place", "what our sessions never say")
    assert steps == ["step", "step"]
    assert callbacks == [heard, None]
    assert not caplog.records


def test_messages_about_others_sessions_are_passed_on(
    callbacks: list[Heard | None], caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[str] = []
    with hearing(ort.SessionOptions(), lambda: steps.append("step")):
        heard = callbacks[0]
        assert heard is not None
        heard(INFO, "onnxruntime", "theirs", "place", "nothing new")
        heard(SILENT, "onnxruntime", "theirs", "place", "it broke")
    assert not steps
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.CRITICAL, "place: it broke")
    ]


def test_a_session_that_cannot_be_made_leaves_no_callback(callbacks: list[Heard | None]) -> None:
    with pytest.raises(KeyError), hearing(ort.SessionOptions(), lambda: None):
        raise KeyError
    assert callbacks[-1] is None


def test_nothing_is_heard_where_nothing_is_to_be_done(callbacks: list[Heard | None]) -> None:
    options = ort.SessionOptions()
    severity = options.log_severity_level
    with hearing(options, None):
        assert options.log_severity_level == severity
    assert callbacks == []


@pytest.mark.skipif(not hasattr(ort, "set_default_logger_callback"), reason="messages cannot be heard")
def test_what_is_heard_is_not_printed(capfd: pytest.CaptureFixture[str]) -> None:
    steps: list[str] = []
    session = OrtSession(ordinary_model(), 2, step=lambda: steps.append("step"))
    assert steps
    assert not opening._lock.locked
    # Without its inputs a run fails, of which onnxruntime writes an error to its log.
    with pytest.raises(Exception, match="onnxruntime failed"):
        session.run(session.binding())
    del session
    assert capfd.readouterr() == ("", "")
