"""Calls in every dialect are read as they were written, however they are cut: none is lost, leaks or is invented."""

from __future__ import annotations

from typing import Any

import pytest

from edgeinfer.openai.dialects import FORMATS, ToolFormat
from tests.conformance.random_calls import case, read
from tests.tables import each_row


def check(form: ToolFormat, numbers: range) -> None:
    for number in numbers:
        given: dict[str, Any] = case(form, number)
        assert read(form, given) == {"text": given["text"], "calls": given["calls"]}, given


@each_row("form", FORMATS.values())
def test_random_calls(form: ToolFormat) -> None:
    check(form, range(6))


@pytest.mark.slow
@each_row("form", FORMATS.values())
def test_many_random_calls(form: ToolFormat) -> None:
    """A thousand of each: `python -m tests.conformance.random_calls`."""
    check(form, range(6, 106))
