"""Hostile templates fail in the sandbox and in its process, or give something short."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.errors import TemplateError
from edgeinfer.runtime.text import render_process, rendering
from edgeinfer.runtime.text.rendering import RenderError, Rendering
from edgeinfer.runtime.text.template import ChatTemplate
from tests.runtime.text.hostile_templates import ESCAPES, EXAMPLES, HOSTILE, LOOPS, TOO_LARGE
from tests.tables import each_row

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def outcome(source: str) -> str:
    """The text that a template gives in this process, or why there is none."""
    try:
        (only,) = Rendering(source).render([{"messages": MESSAGES}], {"Y": "2026"})
    except RenderError as error:
        return f"refused: {error.reason}"
    assert "\n" not in only.failure[1] and len(only.failure[1]) <= 500
    return f"refused: {only.failure[1]}" if only.text is None else only.text


@each_row("source", ESCAPES)
def test_templates_do_not_reach_python(source: str) -> None:
    text = outcome(source)
    assert text.startswith("refused") or text in ("", "[]", "[Undefined]"), text
    assert MESSAGES == [{"role": "user", "content": "Hello"}]


@each_row("source", TOO_LARGE)
def test_operators_build_nothing_huge(source: str) -> None:
    assert "too large" in outcome(source)


def test_long_output_is_refused() -> None:
    assert "more than 8000000 characters" in outcome("{% for i in range(99) %}{{ 'x' * 100000 }}{% endfor %}")


def test_a_template_that_works_on_and_on_fails_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    # A second per look.
    monkeypatch.setattr(rendering, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))
    assert outcome("x") == "x"
    for source in LOOPS:
        assert outcome(source).startswith("refused"), source
    assert "more than 5 seconds" in outcome("{% for i in range(9999) %}{% endfor %}")


def render_in_its_process(source: str) -> None:
    try:
        template = ChatTemplate(source, {})
        text = template.render(MESSAGES)
    except TemplateError:
        return
    assert len(text) < 2000, source
    template.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A render takes a fifth of a second, its process a second at most."""
    change = "import edgeinfer.runtime.text.rendering as r; r.CPU_SECONDS = 1; r.DEADLINE_SECONDS = 0.2\nmain()"
    monkeypatch.setattr(render_process, "_BOOT", render_process._BOOT.replace("main()", change))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")
@pytest.mark.usefixtures("impatient")
def test_what_an_attack_found_fails() -> None:
    for source in EXAMPLES[::3]:
        render_in_its_process(source)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")
@pytest.mark.usefixtures("impatient")
def test_hostile_templates_fail_or_give_something_short() -> None:
    for source in HOSTILE:
        render_in_its_process(source)
