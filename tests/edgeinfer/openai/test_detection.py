"""Forms of calls that templates use, also of those that no one listed: derived from what they render."""

from __future__ import annotations

from typing import Any

from edgeinfer.openai.detection import detect
from edgeinfer.openai.dialects import FORMATS
from edgeinfer.runtime.text.template import ChatTemplate
from tests.conformance.random_calls import case, read
from tests.tables import each_row

_HEAD = (
    "{% if tools %}[functions]{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}"
)
_TAIL = "{% endif %}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
# What a template writes of calls, and the style, the texts before and behind each that follow from it.
UNKNOWN: list[tuple[str, str, str]] = [
    (
        _EACH + '<act>{"tool": "{{ f.name }}", "input": {{ f.arguments | tojson }}}</act>{% endfor %}',
        "json",
        '<act>{"tool": "{name}", "input": {arguments}}</act>',
    ),
    (
        "<acts>[" + _EACH + '{"do": "{{ f.name }}", "with": {{ f.arguments | tojson }}}'
        "{% if not loop.last %}, {% endif %}{% endfor %}]</acts>",
        "json",
        '{"do": "{name}", "with": {arguments}}',
    ),
    (
        _EACH + "<do:{{ f.name }}>\n{% for k, v in f.arguments.items() %}<arg n={{ k }}>{{ v }}</arg>\n{% endfor %}"
        "</do>\n{% endfor %}",
        "tagged",
        "<do:{name}>\n{arguments}</do>",
    ),
    (
        "<py>[" + _EACH + '{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}="{{ v }}"'
        "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]</py>",
        "python",
        "{name}({arguments})",
    ),
]


def rendering(calls: str) -> ChatTemplate:
    return ChatTemplate(_HEAD + calls + _TAIL, {})


@each_row(("calls", "style", "call"), UNKNOWN)
def test_a_form_that_is_not_listed_is_derived(calls: str, style: str, call: str) -> None:
    template = rendering(calls)
    try:
        dialect = detect(template.source, template.render)
    finally:
        template.close()
    form = dialect.format
    assert dialect.native and (form.name, form.style, form.call) == ("derived", style, call)
    assert form.several and form.anywhere
    for number in range(20):
        given: dict[str, Any] = case(form, number)
        assert read(form, given) == {"text": given["text"], "calls": given["calls"]}


def test_a_template_that_leaves_calls_out_is_given_messages() -> None:
    template = ChatTemplate("{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {})
    try:
        dialect = detect(template.source, template.render)
    finally:
        template.close()
    assert not dialect.native and dialect.format is FORMATS["hermes"]
