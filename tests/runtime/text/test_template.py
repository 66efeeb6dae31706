"""Templates render as transformers renders them, and hostile ones fail soon with a reason."""

from __future__ import annotations

import itertools
import time
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from edgeinfer.errors import PromptError, TemplateError
from edgeinfer.runtime.text import ChatTemplate, sandbox

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
            ChatTemplate(source, TOKENS).render(messages, generation, tools)
        return
    variables = {"enable_thinking": generation}
    assert ChatTemplate(source, TOKENS).render(messages, generation, tools, variables) == expected


def test_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 7, 26))
    assert template.render(PLAIN) == "26 Jul 2024"


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert template.render([{"role": "user", "content": parts}]) == "ab"
    assert parts == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
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
    ],
    ids=repr,
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


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "line 1"),
        ("{% if x %}", "line 1"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ raise_exception('No system role') }}", "No system role"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
        ("{% include 'x' %}", "loader"),
        ("{{ 'x' | nonsense }}", "nonsense"),
        ("(" * 10 + "{{ " + "(" * 50_000 + " }}", "."),
        ("{% for x in y %}" * 25 + "{% endfor %}" * 25, "cannot be compiled"),
        ("x" * 1_000_001, "too large"),
    ],
    ids=lambda x: x[:30],
)
def test_faults_give_their_reason(source: str, reason: str) -> None:
    fails(source, reason)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ [''] | map(attribute='__class__') | list }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ strftime_now.__closure__ }}",
        "{{ messages[0].update({}) }}",
    ],
)
def test_attacks_on_attributes_fail(source: str) -> None:
    fails(source, "unsafe|undefined")


# Steps that take longer than they cost: the deadline ends this one.
LONG_STEPS = "{% for i in range(99999) if range(99999) | select('eq', 1) | list %}{% endfor %}"
# What works on and on, for some seconds under the real limits.
LOOPS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
]
BOMBS = [
    *LOOPS,
    "{{ range(10 ** 9) }}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "{{ ('a' * 1000).replace('', 'b' * 1000000) }}",
    "{{ ('a' * 10000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).join(range(99999) | map('string')) }}",
    "{{ range(99999) | join('a' * 100000) }}",
    "{{ ('\n' * 99999) | indent('a' * 99999) }}",
    "{{ 'a'.center(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w=1000000000) }}",
    "{{ ('%s' * 10000) % (['x' * 10000] * 10000) }}",
    "{{ [['x' * 100000] * 1000] * 1000 }}",
    "{{ ([['x' * 100000] * 1000] * 1000) | upper }}",
    "{{ ([['x' * 100000] * 1000] * 1000) | tojson }}",
    "{{ [1] | tojson(indent=1000000000) }}",
    "{{ ([range(99999) | list] * 9999) | sum(start=[]) }}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
    "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "{{ 'x' * 100000 }}" * 300,
    "{% autoescape true %}{{ 'x' }}{% endautoescape %}",
    "{{ (5).to_bytes(99999, 'big') }}",
    "{{ lipsum(1000) }}",
]


@pytest.mark.parametrize("source", BOMBS, ids=lambda x: x[:60])
def test_bombs_fail_by_the_work_they_do(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "ALLOWANCE", sandbox.ALLOWANCE // 50)
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: 0.0))
    fails(source, ".")


@pytest.mark.clock
@pytest.mark.parametrize("source", [LONG_STEPS, *LOOPS], ids=lambda x: x[:60])
def test_bombs_fail_soon(source: str) -> None:
    begun = time.perf_counter()
    fails(source, ".")
    assert time.perf_counter() - begun < 1.6 * sandbox.DEADLINE_SECONDS


def test_a_template_that_works_on_and_on_fails_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: float(next(looks))))  # a second per look
    ChatTemplate("{% for i in range(2) %}{% endfor %}", {}).render(PLAIN)
    fails(LONG_STEPS, "too much work")


def test_long_conversations_render() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 100} for i in range(2000)]
    assert len(ChatTemplate(TOOLS, {}).render(messages, tools=[WEATHER])) > 1_000_000
    assert len(ChatTemplate(LLAMA2, TOKENS).render(messages)) > 999_000
