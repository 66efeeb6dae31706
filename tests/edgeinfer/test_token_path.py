"""A token passes few files on its way; tests.tools.trace_token lists them."""

from __future__ import annotations

import pytest

from tests.speculation import needs_builtin
from tests.tools.trace_token import trace_reply


@pytest.mark.slow
@needs_builtin
def test_a_plain_token_passes_few_files() -> None:
    trace = trace_reply("off")
    assert len(trace.usual(trace.files)) <= 17, trace.usual(trace.files)
