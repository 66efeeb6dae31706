"""What a caller sent is in the prompt, or refused by name, whatever the dialect of the chat template."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import pytest

from edgeinfer.errors import TemplateError
from edgeinfer.runtime.text.template import ChatTemplate
from tests.runtime.text.template_shapes import DIALECTS, SHAPES, TOKENS, Shape, judged
from tests.tables import each_row

pytest.importorskip("transformers")

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
