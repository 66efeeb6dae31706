"""What a caller sent is in the prompt, or refused by name, whatever the dialect of the chat template."""

from __future__ import annotations

import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from edgeinfer.core.errors import EdgeInferError, TemplateError
from edgeinfer.openai.detection import detect
from edgeinfer.openai.messages import read_messages
from edgeinfer.openai.tools import ToolUse, read_choice, read_functions
from edgeinfer.runtime.text.template import ChatTemplate
from tests.runtime.text.test_template import CHATML, KNOWN, LLAMA2, TOOLS
from tests.tables import each_row

pytest.importorskip("transformers")


def _joined(text: str) -> str:
    """A template that stands in several lines, of which the text has nothing."""
    return "".join(line.strip() for line in text.splitlines())


DIALECTS = {
    "chatml": CHATML,
    "llama2": LLAMA2,
    "tools": TOOLS,
    "tales": KNOWN,
    "turns": _joined("""
        {% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
    """),
    # No system role, strict turns: Gemma 1 and 2.
    "gemma": _joined(r"""
        {{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
        {% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
        {% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
        {{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
        {% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
    """),
    # A system message goes into the first user's by itself, content is text or parts: Gemma 3.
    "gemma3": _joined(r"""
        {% set first = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}
        {% set first = messages[0].content if messages[0].content is string else messages[0].content[0].text %}
        {% set turns = messages[1:] %}{% endif %}{% for m in turns %}
        {% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
        {{ '<|' + m.role + '|>' }}{{ first + '\n\n' if loop.first and first }}{% if m.content is string %}
        {{ m.content | trim }}{% elif m.content is iterable %}{% for c in m.content %}{{ c.text | trim }}
        {% endfor %}{% else %}{{ raise_exception('Invalid content type') }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
    """),
    # Users and assistants by turns, nothing else, and nothing empty: early Mistral, Ministral.
    "mistral": _joined("""
        {{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}
        {% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}{% elif m.role == 'assistant' %}
        {% if not m.content %}{{ raise_exception('Assistant message must have content') }}{% endif %}
        {{ m.content + eos_token }}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}
        {% endif %}{% endfor %}
    """),
    # Tools before the last user message, ids of nine letters, a message with calls says nothing else: Mistral v3.
    "mistral tools": _joined(r"""
        {% set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}
        {% set ns = namespace(turn=0) %}
        {% for m in loop_messages if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {% if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
        {% set ns.turn = ns.turn + 1 %}{% endfor %}{{ bos_token }}
        {% set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}{% for m in loop_messages %}
        {% if m.role == 'user' %}{% if tools and m == users[-1] %}
        {{ '[AVAILABLE_TOOLS] ' ~ tools | tojson ~ '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' }}
        {% if loop.first and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
        {{ m.content + '[/INST]' }}{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for call in m.tool_calls %}
        {% if call.id | length != 9 %}
        {{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
        {{ call.function | tojson ~ (', ' if not loop.last else '') }}{% endfor %}{{ ']' + eos_token }}
        {% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% elif m.role == 'tool' %}
        {{ '[TOOL_RESULTS]' ~ {'content': m.content, 'call_id': m.tool_call_id} | tojson ~ '[/TOOL_RESULTS]' }}
        {% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}
    """),
    # Tools in the first user message, one call a message: Llama 3.1.
    "llama3": _joined("""
        {% set system = '' %}{% set rest = messages %}{% if messages[0].role == 'system' %}
        {% set system = messages[0].content | trim %}{% set rest = messages[1:] %}{% endif %}
        {{ '<|system|>' + system + '<|eot_id|>' }}{% if tools is not none %}{% if rest | length == 0 %}
        {{ raise_exception('Cannot put tools in the first user message') }}{% endif %}
        {{ '<|user|>Respond as {"name": function name, "parameters": dictionary of argument name and value}.' }}
        {% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{{ rest[0].content | trim + '<|eot_id|>' }}
        {% set rest = rest[1:] %}{% endif %}{% for m in rest %}
        {% if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
        {{ '<|' + m.role + '|>' + m.content | trim + '<|eot_id|>' }}{% elif 'tool_calls' in m %}
        {% if m.tool_calls | length != 1 %}
        {{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
        {% set f = m.tool_calls[0].function %}{{ '<|assistant|>{"name": "' + f.name + '", "parameters": ' }}
        {{ f.arguments | tojson }}{{ '}<|eot_id|>' }}{% else %}{{ '<|ipython|>' }}
        {{ m.content | tojson if m.content is mapping else m.content }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}
        {% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
    """),
    # Users and assistants; whatever else there is vanishes: Phi 3, Zephyr's relatives.
    "phi3": _joined(r"""
        {% for m in messages %}{% if m.role in ('user', 'assistant') %}
        {{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}
        {{ '<|assistant|>' }}{% endif %}
    """),
    # One system message, at the beginning: Qwen 3.5.
    "system first": _joined("""
        {% for m in messages %}{% if m.role == 'system' and not loop.first %}
        {{ raise_exception('System message must be at the beginning.') }}{% endif %}
        {{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}
        {% endif %}
    """),
    # Content is a list of parts, the first of which is looked at: SmolVLM.
    "smolvlm": _joined(r"""
        <|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}{% if m['content'][0]['type'] == 'image' %}
        {{ ':' }}{% else %}{{ ': ' }}{% endif %}{% for c in m['content'] %}{% if c['type'] == 'text' %}
        {{ c['text'] }}{% elif c['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}
        {{ '<end_of_utterance>\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
    """),
    # Parts, filtered; a system message says nothing: LLaVA.
    "llava": _joined("""
        {% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}
        {% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] + ' ' }}{% endfor %}
        {% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
    """),
    # A user's content is a list of parts, all others' is text, and turns are strict.
    "mixed": _joined("""
        {% for m in messages %}{% if m.role == 'user' %}{% for c in m.content %}{{ '<|user|>' + c.text }}
        {% endfor %}{% elif m.role == 'system' %}{{ '<|system|>' + m.content.strip() }}
        {% elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content.strip() }}{% else %}
        {{ raise_exception('Unknown role: ' + m.role) }}{% endif %}{% endfor %}{% if add_generation_prompt %}
        {{ '<|assistant|>' }}{% endif %}
    """),
    # Content is printed, text or not.
    "printed": _joined(r"""
        {% for m in messages %}{{ m.role ~ ': ' }}{{ m.content ~ '\n' }}{% endfor %}{% if add_generation_prompt %}
        {{ '<|assistant|>' }}{% endif %}
    """),
    # Calls are recognized by content that is none, their arguments are text: DeepSeek R1.
    "deepseek": _joined(r"""
        {% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}
        {% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}
        {% elif m.role == 'assistant' and m.content is none %}{% for call in m.tool_calls %}
        {{ '<|call|>' + call.function.name + '\n' + call.function.arguments + '<|/call|>' }}{% endfor %}
        {% elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content + eos_token }}{% elif m.role == 'tool' %}
        {{ '<|output|>' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>' }}
        {% endif %}
    """),
    # Arguments are taken apart: Qwen3-Coder, GLM.
    "elements": _joined("""
        {% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}
        {{ '<|' + m.role + '|>' }}{{ m.content if m.content }}{% for call in m.tool_calls or [] %}
        {{ '<function=' + call.function.name + '>' }}{% for key, value in call.function.arguments | items %}
        {{ '<parameter=' + key + '>' }}{{ value if value is string else value | tojson }}{% endfor %}
        {{ '</function>' }}{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
    """),
    # A list of tools must be given: Hermes' tool_use, Command R+.
    "tool use": _joined("""
        {% for t in tools %}{{ t | tojson }}{% endfor %}{% for m in messages %}
        {{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}
        {{ '<|assistant|>' }}{% endif %}
    """),
    # Parts say more than their text: TranslateGemma.
    "language": _joined("""
        {% for m in messages %}{% if m.content is not string and m.content[0].to in ('de', 'fr') %}
        {{ m.content[0].to + ': ' + m.content[0].text }}{% else %}{{ raise_exception('To which language?') }}{% endif %}
        {% endfor %}
    """),
    # Text may be left out, with or without a word.
    "last only": "{{ messages[-1].content }}",
    "nothing": "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% endfor %}",
}
TOKENS: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# s, d, u, a: messages of system, developer, user, assistant; c: a call, C: two calls, b: a call with text; t: an
# answer of a tool.
_PLAIN = "u su suau uau suauau s ssu du usu uasu uu suu uuau uaau au sau aau sua"
_CALLING = "uct suct uctau uctu uCtt uCttau sucta ubtu uctctu ut sutu ucu"
ORDERS = (*_PLAIN.split(), *_CALLING.split())
_CONTENTS = ("text", "part", "parts", "empty")
_ARGUMENTS = ("object", "json", "{", "null", "[]", "{'mark': 1}")
_TEXT = re.compile(r"vk\d+kv")
_PRINTED_NOTHING = re.compile(r"\b(None|null)\b")
_PRINTED_PARTS = re.compile(r"""["']text["']: ?["']vk\d+kv""")


@dataclass(frozen=True)
class Shape:
    """A conversation, all texts of which are marks."""

    order: str  # of roles, a letter each
    content: str = "text"  # how contents are given; "empty" is the assistant's content, null where there are calls
    arguments: str = "object"  # how those of calls are given
    tools: bool = False  # whether functions are offered

    @property
    def name(self) -> str:
        """All of it."""
        return f"{self.order} {self.content} {self.arguments}{' tools' if self.tools else ''}"

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As clients send them."""
        numbers = itertools.count()
        return [message for place, kind in enumerate(self.order) for message in self._messages(kind, place, numbers)]

    @property
    def functions(self) -> list[dict[str, Any]] | None:
        """As clients send them."""
        if not self.tools:
            return None
        parameters = {
            "type": "object",
            "properties": {"vk92kv": {"type": "string", "description": "of it"}},
            "required": ["vk92kv"],
        }
        function = {"name": "vk90kv", "description": "vk91kv", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def _messages(self, kind: str, place: int, numbers: Iterator[int]) -> Iterator[dict[str, Any]]:
        role = {"s": "system", "d": "developer", "u": "user", "t": "tool"}.get(kind, "assistant")
        message: dict[str, Any] = {"role": role, "content": self._content(role, numbers)}
        if kind in "cCb":
            calls = [self._call(f"call{place}000{at}", numbers) for at in range(2 if kind == "C" else 1)]
            message["tool_calls"] = calls
            if kind != "b":
                message["content"] = "" if self.content == "empty" else None
        if kind == "t":
            # That of the call before, or of its second call.
            called = max(self.order.rfind(each, 0, place) for each in "cCb")
            message["tool_call_id"] = f"call{called}000{place - called - 1}" if called >= 0 else "call00000"
        yield message

    def _content(self, role: str, numbers: Iterator[int]) -> Any:
        if self.content == "empty" and role == "assistant":
            return ""
        if self.content == "parts":
            return [{"type": "text", "text": f"vk{next(numbers)}kv"} for _ in range(2)]
        text = f"vk{next(numbers)}kv"
        return [{"type": "text", "text": text}] if self.content == "part" else text

    def _call(self, id_: str, numbers: Iterator[int]) -> dict[str, Any]:
        name, key, value = (f"vk{next(numbers)}kv" for _ in range(3))
        arguments: Any = {key: value}
        if self.arguments == "json":
            arguments = f'{{"{key}": "{value}"}}'
        elif self.arguments != "object":
            arguments = self.arguments.replace("mark", key)
        return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _shapes() -> Iterator[Shape]:
    for order in ORDERS:
        calls = any(kind in "cCb" for kind in order)
        for tools in (False, True):
            for content in _CONTENTS:
                if content != "empty" or "a" in order or calls:
                    yield Shape(order, content, "object", tools)
            if calls:
                for arguments in _ARGUMENTS[1:]:
                    yield Shape(order, "text", arguments, tools)


SHAPES = tuple(_shapes())


@dataclass(frozen=True)
class Verdict:
    """What came of a shape."""

    # "as transformers", "another form" (which transformers refuses, or leaves something out of), "refused" by name;
    # "differs" from transformers, "incomplete", or refused "unnamed".
    kind: str
    detail: str = ""  # of what should not be


def judged(source: str, shape: Shape, template: ChatTemplate | None = None) -> Iterator[Verdict]:
    """What a template makes of a shape, by Python's way in and by that of requests."""
    template = template or ChatTemplate(source, TOKENS)
    messages, tools = shape.messages, shape.functions
    yield _judged(source, template, messages, tools, messages, tools)
    read = read_messages(messages)
    use = ToolUse(detect(source), read_choice(None, read_functions(tools or []), True))
    yield _judged(source, template, use.messages(read), use.template_tools, messages, tools)


def _judged(
    source: str,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    sent: Any,
    offered: Any,
) -> Verdict:
    marks = set(_TEXT.findall(f"{sent}{offered}"))
    expected = _expected(source, messages, tools)
    try:
        text = template.render(messages, tools=tools)
    except EdgeInferError as error:
        named = error.hint and (
            "messages[" in error.message or "a tool's" in error.message or "failed: " in error.message
        )
        if expected is not None and marks <= _whole(expected):
            return Verdict("differs", f"refused: {error.message}")
        return Verdict("refused" if named else "unnamed", error.message)
    if missing := marks - _whole(text):
        return Verdict("incomplete", f"{sorted(missing)} in {text!r}")
    if expected is not None and marks <= _whole(expected):
        same = text == expected
        return Verdict("as transformers" if same else "differs", "" if same else f"{text!r} is not {expected!r}")
    return Verdict("another form")


def _whole(text: str) -> set[str]:
    """The marks of a text, unless lists of parts were printed."""
    return set() if _PRINTED_PARTS.search(text) else set(_TEXT.findall(text))


def _expected(source: str, messages: Sequence[Any], tools: Any) -> str | None:
    """What transformers makes of it; None where it refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    # A template that writes null content writes "None", of which no model learnt anything.
    for given in (messages, [{**message, "content": message["content"] or ""} for message in messages]):
        try:
            rendered = render_jinja_template(
                [list(given)], tools=tools, chat_template=source, add_generation_prompt=True, **TOKENS
            )[0]
        except Exception:
            continue
        text = str(rendered[0])
        said = text.replace("null", "") if "'null'" in f"{messages}" else text  # as arguments
        if not (any(message["content"] is None for message in given) and _PRINTED_NOTHING.search(said)):
            return text
    return None


GOOD = {"as transformers", "another form", "refused"}
# They leave out texts in every form, or want what no shape has.
HOPELESS = ("language", "last only", "nothing")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates are rendered in this process, which starts none."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)


def check(name: str, shapes: tuple[Shape, ...]) -> None:
    """That every shape is rendered whole or refused by name, and as transformers does where it renders it whole."""
    template = ChatTemplate(DIALECTS[name], TOKENS)
    for shape in shapes:
        python, request = judged(DIALECTS[name], shape, template)
        assert python.kind in GOOD and request.kind in GOOD, (name, shape.name, python, request)
        if name not in HOPELESS:
            # Python's way alone refuses, and only tools that a template does not know.
            assert request.kind != "refused", (name, shape.name, request)
            assert python.kind != "refused" or (shape.tools and "a tool's" in python.detail), (name, shape.name, python)


@pytest.mark.usefixtures("here")
def test_some_shapes_of_each_dialect() -> None:
    for place, name in enumerate(DIALECTS):
        check(name, SHAPES[place :: 2 * len(DIALECTS)])


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", DIALECTS)
def test_every_shape_of_each_dialect(name: str) -> None:
    check(name, SHAPES)


def said(*turns: str) -> list[dict[str, Any]]:
    """Messages, each "role: content"."""
    return [{"role": role, "content": content} for role, _, content in (turn.partition(": ") for turn in turns)]


CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
CUT = [*said("user: Go"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*CUT, {"role": "tool", "tool_call_id": "call00001", "content": "Error"}]
TOLD = '<tool_call>\n{"name": "f", "arguments": {"a}\n</tool_call>'
ANSWER = "<tool_response>\nError\n</tool_response>"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
LATER = said("system: A", "user: Hi", "assistant: Yes?", "system: B", "user: Go")
LED = "user\n<end_of_turn>\n<start_of_turn>model\nWelcome<end_of_turn>\n<start_of_turn>user\nHi<end_of_turn>\n"
CALLED = f"user\nGo<end_of_turn>\n<start_of_turn>model\n{TOLD}<end_of_turn>\n<start_of_turn>user\n{ANSWER}\n\nSo?"
LLAMA3_CUT = '<|system|><|eot_id|><|user|>Go<|eot_id|><|assistant|>{"name": "f", "parameters": "{\\"a"}<|eot_id|>'
PARALLEL = [
    *said("user: Go"),
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id_, "type": "function", "function": {"name": id_, "arguments": {}}} for id_ in "fg"],
    },
    {"role": "tool", "tool_call_id": "g", "content": "of g"},
    {"role": "tool", "tool_call_id": "f", "content": "of f"},
]
LANGUAGE = [{"role": "user", "content": [{"type": "text", "text": "Hi", "to": "de"}]}]
LLAMA3_PARALLEL = "<|system|><|eot_id|><|user|>Go<|eot_id|>" + "".join(
    f'<|assistant|>{{"name": "{name}", "parameters": {{}}}}<|eot_id|><|ipython|>of {name}<|eot_id|>' for name in "fg"
)
RENDERED = [
    ("gemma", said("system: A", "user: Hi"), "<s><start_of_turn>user\nA\n\nHi<end_of_turn>\n"),
    ("gemma", said("developer: A"), "<s><start_of_turn>user\nA<end_of_turn>\n"),
    ("gemma", said("user: A", "user: B"), "<s><start_of_turn>user\nA\n\nB<end_of_turn>\n"),
    ("gemma", said("assistant: Welcome", "user: Hi"), f"<s><start_of_turn>{LED}"),
    ("gemma", [*ANSWERED, *said("user: So?")], f"<s><start_of_turn>{CALLED}<end_of_turn>\n"),
    ("mistral", said("user: A", "assistant: ", "user: B"), "<s>[INST] A\n\nB [/INST]"),
    ("phi3", said("system: A", "user: Hi"), "<|user|>\nA\n\nHi<|end|>\n"),
    ("system first", LATER, "<|system|>A<|user|>Hi<|assistant|>Yes?<|user|>B\n\nGo"),
    ("smolvlm", said("user: Hi"), "<|im_start|>User: Hi<end_of_utterance>\n"),
    ("llava", said("system: A", "user: Hi"), "USER: A\n\nHi "),
    ("mixed", LATER, "<|system|>A<|user|>Hi<|assistant|>Yes?<|system|>B<|user|>Go"),
    ("printed", PARTS, "user: ab\n"),
    ("language", LANGUAGE, "de: Hi"),
    ("llama3", CUT, LLAMA3_CUT),
    ("llama3", PARALLEL, LLAMA3_PARALLEL),
    ("deepseek", ANSWERED, '<|User|>Go<|call|>f\n{"a<|/call|><|output|>Error'),
    ("elements", CUT, f"<|user|>Go<|assistant|>{TOLD}"),
]


@pytest.mark.usefixtures("here")
def test_what_is_changed_about_a_conversation() -> None:
    for name, messages, text in RENDERED:
        assert ChatTemplate(DIALECTS[name], TOKENS).render(messages, add_generation_prompt=False) == text, name


def test_a_refusal_is_no_end_of_the_process() -> None:
    template = ChatTemplate(DIALECTS["gemma"], TOKENS)
    template.render(said("user: Hi"))
    assert template.process is not None
    pid = template.process.pid
    assert "Be brief\n\nHi" in template.render(said("system: Be brief", "user: Hi"))
    assert template.process.pid == pid
    template.close()


@pytest.mark.usefixtures("here")
@each_row(
    ("name", "messages", "named"),
    [
        ("last only", said("user: A", "assistant: B", "user: C"), r"messages\[0\].content, of the role user"),
        ("nothing", said("system: A"), r"messages\[0\].content, of the role system"),
        ("nothing", said("user: A", "reviewer: B"), r"messages\[0\].content, of the role user"),
        ("mistral", said("user: A", "reviewer: B"), "Only user and assistant roles are supported"),
    ],
)
def test_what_no_form_tells_is_refused_by_name(name: str, messages: list[dict[str, Any]], named: str) -> None:
    template = ChatTemplate(DIALECTS[name], TOKENS)
    for _ in range(2):  # found, and remembered
        with pytest.raises(TemplateError, match=named) as caught:
            template.render(messages)
        assert caught.value.hint


@pytest.mark.usefixtures("here")
def test_documents_reach_a_template_that_takes_them() -> None:
    given: dict[str, Any] = {"documents": [{"title": "A", "text": "B"}]}
    source = "{% for d in documents or [] %}{{ d.title ~ d.text }} {% endfor %}" + DIALECTS["turns"]
    assert ChatTemplate(source, TOKENS).render(said("user: Hi"), variables=given).startswith("AB <|user|>")
    with pytest.raises(TemplateError, match="takes no documents"):
        ChatTemplate(DIALECTS["turns"], TOKENS).render(said("user: Hi"), variables=given)


def test_data_changes_nothing_about_the_form() -> None:
    """Only what kinds of messages there are counts, so that a conversation that goes on keeps its beginning."""
    template = ChatTemplate(DIALECTS["gemma"], TOKENS)
    counts: Counter[str] = Counter()
    for content in ("x", "System role not supported", "'text': 'zq0qz'", "<|im_end|>", "é" * 5000):
        text = template.render(said(f"system: {content}", "user: Hi"), add_generation_prompt=False)
        counts[text.replace(content, "")] += 1
    assert counts == {"<s><start_of_turn>user\n\n\nHi<end_of_turn>\n": 5}
    template.close()
