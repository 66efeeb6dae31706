"""Templates render as transformers renders them, and hostile ones fail soon with a reason."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.core.errors import PromptError, TemplateError
from edgeinfer.runtime.text.template import ChatTemplate
from tests.tables import each_row

CHATML = """\
{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1, thinking=enable_thinking is not defined or enable_thinking) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages if message.role != 'system' or not tools %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' ~ ('\\n' ~ message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.name }}{{- '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson(indent=2) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' ~ message.content.split('</think>')[-1].lstrip('\\n') ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- else %}{%- continue %}{%- endif %}
    {%- else %}
        {{- '<|im_start|>%s\\n' % message.role }}{{- message.content }}{{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if not ns.thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
MACROS = """\
{%- macro wrap(text, mark='*') -%}{{ mark }}{{ text | replace('a', 'b') | upper }}{{ mark }}{%- endmacro -%}
{%- macro block() -%}<{{ caller() }}>{%- endmacro -%}
{%- set parts -%}{% for m in messages %}{{ wrap(m.content, mark=loop.cycle('-', '+')) }}{% endfor %}{%- endset -%}
{%- generation -%}{{ parts | indent(2) }}{%- endgeneration -%}
{%- call block() -%}{{ messages | map(attribute='role') | join(', ') }}{%- endcall -%}
{%- filter upper -%}end {{ ', '.join(['x', 'y']) }}{%- endfilter -%}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ {'b': 1, 'a': "é<"} | tojson }}
{{ '{}: {:>4}'.format('n', 3) }} {{ [1, 2, 3] | sum }} {{ 'ab' * 3 }} {{ missing }} {{ 'x'|safe }}{{ tools is none }}
{{ messages[0].content[:3] ~ messages | last | string | length ~ [true, none, 1.5] }}{{ documents is defined }}
{%- for k, v in {'z': 1}.items() recursive %}{{ k }}{{ v }}{{ loop.length }}{% break %}{% endfor %}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter <heute> 'é'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
PLAIN: list[dict[str, Any]] = [
    {"role": "user", "content": " What is a\ncat? "},
    {"role": "assistant", "content": "A small tiger."},
    {"role": "user", "content": "漢字 <|im_end|> & 'quotes'"},
]
WITH_SYSTEM = [{"role": "system", "content": "You are a pirate."}, *PLAIN]
CALLS: list[dict[str, Any]] = [
    *WITH_SYSTEM,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
            {"type": "function", "function": {"name": "weather", "arguments": '{"city": "x"}'}},
        ],
    },
    {"role": "tool", "content": "rain"},
    {"role": "tool", "content": "sun"},
    {"role": "user", "content": "So?"},
]
KNOWN = (Path(edgeinfer.__file__).parent / "builtin" / "tales" / "chat_template.jinja").read_text("utf-8")
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("messages", [PLAIN, WITH_SYSTEM, PLAIN[:1], CALLS], ids=["plain", "system", "one", "calls"])
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["", "tools"])
@pytest.mark.parametrize("source", [CHATML, LLAMA2, TOOLS, MACROS], ids=["chatml", "llama2", "tools", "macros"])
def test_renders_as_transformers_does(
    source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generation: bool
) -> None:
    reference = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template
    keywords = {"tools": tools, "add_generation_prompt": generation, "enable_thinking": generation, **TOKENS}
    try:
        expected = reference([messages], chat_template=source, **keywords)[0][0]
    except Exception:
        # The calls do not alternate, or have no content: the template must refuse them here too.
        with pytest.raises(TemplateError):
            ChatTemplate(source, TOKENS).rendered(messages, generation, tools)
        return
    variables = {"enable_thinking": generation}
    assert ChatTemplate(source, TOKENS).rendered(messages, generation, tools, variables) == expected


@each_row(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "x"},
        None,
        ["hello"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "extra": ...}],
        [{"role": "user", "content": "x", "extra": 1 << 5000}],
        [{"role": "user", "content": "x" * 9_000_000}],
    ],
)
def test_malformed_messages_are_a_prompt_error(messages: Any) -> None:
    with pytest.raises(PromptError) as caught:
        ChatTemplate("{{ messages }}", {}).render(messages)
    assert caught.value.hint


def test_messages_that_nest_without_end() -> None:
    loop: dict[str, Any] = {"role": "user", "content": "x"}
    loop["self"] = loop
    with pytest.raises(PromptError, match="nest"):
        ChatTemplate("x", {}).render([loop])


def fails(source: str, reason: str) -> None:
    with pytest.raises(TemplateError, match=reason) as caught:
        ChatTemplate(source, {}).render(PLAIN)
    assert "\n" not in caught.value.message and caught.value.hint


@each_row(
    ("source", "reason"),
    [
        ("{% for %}", "line 1"),
        ("{% if x %}", "line 1"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ raise_exception('No system role') }}", "No system role"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
        ("{% include 'x' %}", "no loader"),
        ("{{ 'x' | nonsense }}", "nonsense"),
        ("(" * 10 + "{{ " + "(" * 50_000 + " }}", "."),
        ("{% for x in y %}" * 25 + "{% endfor %}" * 25, "cannot be compiled"),
        ("x" * 100_001, "too large"),
    ],
)
def test_faults_give_their_reason(source: str, reason: str) -> None:
    fails(source, reason)


def test_long_conversations_render() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(2000)]
    assert len(ChatTemplate(TOOLS, {}).render(messages, tools=[WEATHER])) > 1_000_000
    assert len(ChatTemplate(LLAMA2, TOKENS).render(messages)) > 999_000


def test_any_text_passes_unchanged() -> None:
    text = "é \ue000\uf8ff \ud800 \udfff \U0001f600 \U000f0000 \0 \r\n\x85\u2028"
    for source in ("{% for m in messages %}{{ m.content }}{% endfor %}", KNOWN):
        template = ChatTemplate(source, {})
        assert text in template.render([{"role": "user", "content": text}])


def test_known_templates_render_in_this_process(shared: Path) -> None:
    for source in (KNOWN, (shared / "models" / "tales" / "chat_template.jinja").read_text("utf-8")):
        assert ChatTemplate(source, {}).process is None
        assert ChatTemplate(source + "\n \n", {}).process is None
    assert ChatTemplate(KNOWN + "{{ 'x' }}", {}).process is not None


def test_frozen_applications_render_in_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    template = ChatTemplate(CHATML, TOKENS)
    assert template.process is None
    assert "A small tiger." in template.render(PLAIN)


def test_dates_are_the_clocks() -> None:
    moment = datetime(2024, 2, 3, 4, 5, 6, tzinfo=timezone(timedelta(hours=1), "XYZ"))
    for format in ("%d %b %Y", "%-d.%-m.%y %H:%M:%S", "%A, %B %d", "%Z %z %p %I %j", "100%%", "plain"):
        template = ChatTemplate("{{ strftime_now(messages[0].content) }}", {}, now=lambda: moment)
        assert template.render([{"role": "user", "content": format}]) == moment.strftime(format)
    fails("{{ strftime_now('%5Y') }}", "directive")
