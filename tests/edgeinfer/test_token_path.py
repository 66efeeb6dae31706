"""A token passes few files on its way; tests.tools.trace_token lists them."""

from __future__ import annotations

import pytest

from tests.speculation import needs_builtin
from tests.tools.trace_token import trace_reply


@pytest.mark.slow
@needs_builtin
@pytest.mark.parametrize(("speculation", "files"), [("off", 14), ("ngram", 21)])
def test_a_token_passes_few_files(speculation: str, files: int) -> None:
    trace = trace_reply(speculation)
    assert len(trace.usual(trace.files)) <= files, trace.usual(trace.files)
