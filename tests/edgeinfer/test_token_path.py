"""A token passes few files on its way, and few threads serve many clients; tests.tools.trace_token lists them."""

from __future__ import annotations

import pytest

from tests.speculation import needs_builtin
from tests.tools.trace_token import trace_reply, trace_request

pytestmark = [pytest.mark.slow, needs_builtin]


@pytest.mark.parametrize(("speculation", "files", "classes"), [("off", 10, 15), ("ngram", 17, 25)])
def test_a_token_passes_few_files(speculation: str, files: int, classes: int) -> None:
    trace = trace_reply(speculation, 150)
    assert len(trace.usual(trace.files)) <= files, trace.usual(trace.files)
    assert len(trace.usual(trace.classes)) <= classes, trace.usual(trace.classes)


def test_four_threads_serve_eight_clients() -> None:
    pytest.importorskip("uvicorn", reason="the server extra is not installed")
    assert len(trace_request().threads) <= 4
