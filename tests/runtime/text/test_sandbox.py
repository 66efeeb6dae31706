"""Hostile templates fail inside their limits, by the work and memory they would take; knows nothing of processes."""

from __future__ import annotations

import itertools
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.runtime.text import allowance
from edgeinfer.runtime.text.rendering import RenderError, Rendering
from edgeinfer.runtime.text.template_values import MAX_WIDTH
from tests.runtime.text.hostile_templates import ESCAPES, EXAMPLES, FAST_LOOPS, HOSTILE

NAMES: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
MOMENT = {"Y": "2026"}
# A render that is given little builds at most a unit a byte, in texts of four bytes a character at worst; compiling the
# longest of these templates takes about 44 MB.
MOST_BYTES = 64_000_000


def rendered(source: str, names: dict[str, Any], given: int, moment: dict[str, str] = {}) -> str:  # noqa: B006
    """The text."""
    (only,) = Rendering(source).render([names], given, moment)
    if only.text is None:
        raise RenderError(*only.failure)
    return only.text


def outcome(source: str) -> tuple[str, int]:
    """The text or why there is none, and the most bytes that Python's own allocator held on the way."""
    tracemalloc.start()
    try:
        result = rendered(source, NAMES, 200, MOMENT)
    except RenderError as error:
        assert "\n" not in error.reason and len(error.reason) <= 500
        result = f"refused: {error.reason}"
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return result, peak


def overstepping(sources: list[str]) -> list[tuple[str, str, int]]:
    """Templates that took too much, or gave something long."""
    outcomes = [(source[:80], *outcome(source)) for source in sources]
    return [(source, text, peak) for source, text, peak in outcomes if peak > MOST_BYTES or len(text) > 600]


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only work ends a render."""
    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.usefixtures("no_clock")
def test_what_an_attack_found_fails() -> None:
    for source in EXAMPLES:
        assert outcome(source)[0].startswith("refused"), source
    assert overstepping(EXAMPLES) == []


@pytest.mark.usefixtures("no_clock")
def test_templates_do_not_reach_python() -> None:
    for source in ESCAPES:
        assert outcome(source)[0].startswith("refused"), source


@pytest.mark.usefixtures("no_clock")
def test_short_hostile_templates_stay_inside_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allowance, "BASE_UNITS", allowance.BASE_UNITS // 50)
    assert overstepping([source for source in HOSTILE if len(source) < 1000]) == []
    assert overstepping(FAST_LOOPS) == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_clock")
def test_hostile_templates_stay_inside_their_limits() -> None:
    assert len(set(HOSTILE)) > 200
    assert overstepping(HOSTILE) == []


def test_a_template_that_works_on_and_on_fails_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    monkeypatch.setattr(allowance, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))  # a second per look
    assert outcome("x")[0] == "x"
    assert "more than 5 seconds" in outcome("{% for i in range(9999) %}{% endfor %}")[0]


def test_the_allowance_grows_with_what_is_given() -> None:
    source = "{% for i in range(60000) %}{% endfor %}done"
    with pytest.raises(RenderError, match="too much work"):
        rendered(source, NAMES, 200)
    assert rendered(source, NAMES, 200_000) == "done"


def test_what_is_not_listed_is_refused_by_name() -> None:
    refused = {
        "{{ 1 | round }}": "round",
        "{{ [1] | map('round') | list }}": "round",
        "{{ [1] | select('callable') | list }}": "callable",
        "{{ 'a'.center(3) }}": "center",
        "{{ [1].append(2) }}": "append",
        "{% for i in [1] %}{{ loop.changed(1) }}{% endfor %}": "changed",
        "{% import 'x' as x %}": "Import",
        "{{ dict(**{}) }}": r"\*\*",
        "{{ 'a'(1) }}": "call",
    }
    for source, name in refused.items():
        with pytest.raises(RenderError, match=name):
            rendered(source, NAMES, 0)


def test_fields_are_as_wide_as_allowed_and_no_wider() -> None:
    for field in ("'{:%d}'.format(1)", "'%%%dd' %% 1", "'a\nb' | indent(%d, true)", "'{:.%df}'.format(1.5)"):
        rendered("{{ " + field % MAX_WIDTH + " }}", NAMES, 4000)
        for width in (MAX_WIDTH + 1, 10 * MAX_WIDTH, 10_000 * MAX_WIDTH):
            with pytest.raises(RenderError, match=str(MAX_WIDTH)):
                rendered("{{ " + field % width + " }}", NAMES, 4000)


def test_what_is_listed_gives_what_jinja2_gives() -> None:
    sandbox = pytest.importorskip("jinja2.sandbox")
    plain = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    for expression in EXPRESSIONS:
        source = "{{ (" + expression + ") }}"
        assert rendered(source, VALUES, 1000) == plain.from_string(source).render(VALUES), expression


VALUES: dict[str, Any] = {
    "text": "  Straße & <b>\n\tzwei  Worte\r\n\u2028 ende ",
    "numbers": [3, 1.5, -2, 0, True],
    "words": ["b", "A", "a", "C", "b"],
    "rows": [{"n": 2, "k": {"v": "x"}}, {"n": 1, "k": {"v": "Y"}}, {"n": 2}],
    "table": {"b": 1, "A": [2], "c": None},
}
EXPRESSIONS = [
    "text.strip() ~ text.lstrip(' ') ~ text.rstrip() ~ text.split() ~ text.split(' ', 2) ~ text.rsplit('e', 1)",
    "text.upper() ~ text.lower() ~ text.title() ~ text.capitalize() ~ text.splitlines() ~ text.find('z')",
    "text.replace('e', 'EE') ~ text.replace('e', '', 1) ~ text.startswith('  S') ~ text.endswith(('x', ' '))",
    "text | trim | title | replace('e', 'x', 1)",
    "(text | indent(2)) ~ (text | indent('> ', first=true, blank=true)) ~ (text | indent(3, true))",
    "text | upper | lower | capitalize",
    "('<' | safe) + '<' + text",
    "(text | safe | trim) + '\"' + \"'\"",
    "'%s %5.2f %-4d|%%|%r' % ('a', 1.5, 3, 'q')",
    "'%(a)s' % {'a': words}",
    "'{} {1} {a:>4} {b!r}'.replace('{}', '{0}').format(1, 2, a='x', b='y')",
    "numbers | sum ~ numbers | min ~ numbers | max ~ numbers | sort ~ (numbers | sort(reverse=true))",
    "words | sort ~ words | unique | list ~ words | sort(case_sensitive=true) ~ words | max ~ words | min",
    "rows | sort(attribute='n') ~ rows | map(attribute='n') | list",
    "rows | map(attribute='k.v', default='-') | list ~ rows | map(attribute='q', default='-') | list",
    "rows | selectattr('k') | list ~ rows | rejectattr('n', 'equalto', 2) | list ~ rows | sum(attribute='n')",
    "words | map('upper') | join('-') ~ words | select('in', ['a', 'b']) | list",
    "words | reject('eq', 'a') | first",
    "table | dictsort ~ (table | dictsort(reverse=true)) ~ table | items | list",
    "table.items() | list ~ table | length",
    "table.get('b') ~ table['A'][0] ~ table.c ~ table.missing ~ table.keys() | list ~ table.values() | list",
    "words[1:] ~ words[::-1] ~ text[3:7] ~ words[-1] ~ words[9] ~ (words | first) ~ (words | last)",
    "words | reverse | list",
    "(1 < 2 < 3) ~ (3 > 2 >= 2 != 1) ~ ('a' in 'abc') ~ (1 not in [2]) ~ ('b' in table)",
    "([1, 2] == [1, 2]) ~ (1 == 'x') ~ ((1, 2) < (1, 3)) ~ ({'a': 1} == {'a': 1}) ~ (1 == 1.0 == true)",
    "7 // 2 ~ 7 % 3 ~ 2 ** 10 ~ 7 / 2 ~ -3 ~ +3 ~ 3 * 'ab' ~ [1] * 2 ~ ([1] + [2]) ~ ((1,) + (2,)) ~ (7.5 - 2)",
    "numbers is sequence ~ text is string ~ table is mapping",
    "(none is none) ~ (x is defined) ~ (3 is odd) ~ (4 is divisibleby 2) ~ (1 is in [1])",
    "'12' | int ~ 'x' | int(7) ~ '1.5' | float ~ '3.7' | int ~ -3 | abs ~ x | default('d') ~ '' | default('e', true)",
    "range(3) | list ~ range(5)[2] ~ dict(a=1) ~ namespace(a=1).a ~ (1, 'é', {'k': none}) ~ true ~ 1.0",
    "rows | map(attribute='n') | join(', ') ~ words | join ~ [1, 2] | join('/') ~ [] | first ~ [] | join",
]
