"""Calls in every format: what the grammars let through, and what the reader makes of it however it is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeinfer.errors import GrammarError
from edgeinfer.openai.replies import (
    FORMATS,
    ArgumentsPiece,
    CallPiece,
    CallReader,
    Piece,
    TextPiece,
    ToolFormat,
    dialect_of,
)
from edgeinfer.openai.tools import ToolChoice, calls_grammar
from edgeinfer.results import Chunk
from tests.edgeinfer.openai.functions import CLOCK, WEATHER, written
from tests.tables import each_row

MARKER = 300  # a special token's id, where a marker is one
OSLO = ("get_weather", {"town": "Oslo", "unit": "celsius"})
ZONE = ("time.of", {"zone": 'a "quoted" {zone}]'})
each_format = pytest.mark.parametrize("form", FORMATS.values(), ids=list(FORMATS))
Call = tuple[str, dict[str, Any]]


def gathered(pieces: Iterable[Piece]) -> tuple[str, list[Call]]:
    """Text and calls of a whole reply, as a client puts them together."""
    text = ""
    calls: list[list[str]] = []
    for piece in pieces:
        match piece:
            case TextPiece(more):
                text += more
            case CallPiece(place, id_, name):
                assert place == len(calls) and id_
                calls.append([name, ""])
            case ArgumentsPiece(place, more):
                calls[place][1] += more
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def read(form: ToolFormat, pieces: Sequence[str | int], marker_id: int | None = None) -> tuple[str, list[Call]]:
    reader = CallReader(form, marker_id)
    found: list[Piece] = []
    for piece in pieces:
        found += reader.push(Chunk("", (piece,)) if isinstance(piece, int) else Chunk(piece, ()))
    return gathered([*found, *reader.finish()])


def cut(text: str, sizes: list[int]) -> list[str]:
    """A text in pieces of these sizes, and the rest."""
    pieces = []
    for size in sizes:
        pieces.append(text[:size])
        text = text[size:]
    return [*pieces, text]


@each_format
@given(
    calls=st.lists(
        st.sampled_from([OSLO, ZONE, ("f", {}), ("g", {"a": [{"b": "}]"}, "\\"], "c": "</tool_call>"})]), max_size=3
    ),
    text=st.sampled_from(["", "Let me see.", 'Text with {"na and <tool_ and [TOOL', "  two\n lines "]),
    sizes=st.lists(st.integers(0, 9), max_size=60),
)
def test_calls_are_read_however_they_are_cut(form: ToolFormat, calls: list[Call], text: str, sizes: list[int]) -> None:
    calls = calls[: None if form.several else 1]
    if calls and not form.anywhere:
        text = ""
    reply = text + (written(form, calls) if calls else "")
    assert read(form, cut(reply, sizes)) == (text.rstrip() if calls else text, calls)


@given(sizes=st.lists(st.integers(0, 9), max_size=40))
def test_a_marker_that_is_a_special_token(sizes: list[int]) -> None:
    form = FORMATS["mistral"]
    rest = written(form, [OSLO, ZONE]).removeprefix(form.marker)
    assert read(form, ["Well. ", MARKER, *cut(rest, sizes)], MARKER) == ("Well.", [OSLO, ZONE])
    # The same text is no marker where a token is one.
    assert read(form, ["[TOOL_CALLS]"], None) == ("", [])


@each_format
def test_a_call_that_was_cut_short(form: ToolFormat) -> None:
    """The available part of the arguments is returned, and nothing around it."""
    whole = written(form, [OSLO])
    for length in range(len(whole)):
        reader = CallReader(form)
        pieces = [*reader.push(Chunk(whole[:length], ())), *reader.finish()]
        arguments = "".join(piece.text for piece in pieces if isinstance(piece, ArgumentsPiece))
        assert json.dumps(OSLO[1]).startswith(arguments)
        begun = length > len(form.marker)
        assert not begun or not any(isinstance(piece, TextPiece) for piece in pieces)


@each_format
def test_what_is_no_call_is_text(form: ToolFormat) -> None:
    if form.prefix:
        assert read(form, [form.marker, "oops", " and more"]) == (f"{form.marker}oops and more", [])
    assert read(form, [written(form, [OSLO]), " and more"])[1] == [OSLO]


class Bytes:
    """A vocabulary of single bytes for the engine, with a special token."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256, MARKER)

    def __init__(self) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [b"\xff<|end|>"]
        self.tokens += [b""] * (MARKER - len(self.tokens)) + [b"\xff[TOOL_CALLS]"]

    def __call__(self, text: str | bytes) -> list[int]:
        return []


def follows(grammar: str, *parts: str | int) -> str:
    """Whether a reply is no text of a grammar, the beginning of one, or one ("no", "open", "end")."""
    llguidance = pytest.importorskip("llguidance")
    vocabulary: Any = Bytes()
    source = grammar + '\n%llguidance {"no_forcing": true}\n'
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(vocabulary), source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else part.encode())]
    if matcher.try_consume_tokens(ids) < len(ids):
        return "no"
    return "end" if matcher.is_accepting() else "open"


def grammar(
    form: ToolFormat, mode: Any, several: bool = True, marker_id: int | None = None, content: Any = None
) -> str:
    return calls_grammar(form, ToolChoice(mode, (WEATHER, CLOCK), several), marker_id, content)


@each_format
def test_auto_is_free_up_to_the_marker(form: ToolFormat) -> None:
    source = grammar(form, "auto")
    for text in ("", "Hello.", '{"na', '{"nam": 1}', "<tool_cal", "[TOOL_CALL]", "a\nb"):
        assert follows(source, text) == "end"
    for calls in ([OSLO], [ZONE], [OSLO, ZONE, OSLO]):
        expected = "end" if form.several or len(calls) == 1 else "no"
        assert follows(source, written(form, calls)) == expected
    assert follows(source, "Let me see.\n" + written(form, [OSLO])) == "end"
    assert follows(source, form.marker) == "open"
    assert follows(source, written(form, [("rm_rf", {})])) == "no"


@each_format
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_arguments_are_what_the_schema_allows(form: ToolFormat, mode: str) -> None:
    source = grammar(form, mode)
    wrong: list[dict[str, Any]] = [
        {"town": "Oslo"},
        {"town": "Oslo", "unit": "kelvin"},
        {"town": "Oslo", "unit": "celsius", "days": 10},
        {"town": "Oslo", "unit": "celsius", "mood": 1},
        {"town": 5, "unit": "celsius"},
    ]
    for arguments in wrong:
        assert follows(source, written(form, [("get_weather", arguments)])) == "no"
    assert follows(source, written(form, [("get_weather", {**OSLO[1], "days": 9})])) == "end"


@each_format
def test_required_is_a_call(form: ToolFormat) -> None:
    source = grammar(form, "required", several=False)
    assert follows(source, written(form, [ZONE])) == "end"
    assert follows(source, "") == "open"
    assert follows(source, "Hello") == "no"
    assert follows(source, written(form, [OSLO, OSLO])) == "no"


def test_special_tokens_are_not_text() -> None:
    form = FORMATS["mistral"]
    rest = written(form, [OSLO]).removeprefix(form.marker)
    for source in (grammar(form, "auto", marker_id=MARKER), grammar(form, "required", marker_id=MARKER)):
        assert follows(source, MARKER, rest) == "end"
        assert follows(source, MARKER, "x") == "no"
    assert follows(grammar(form, "auto", marker_id=MARKER), "Well. ", MARKER, rest) == "end"
    assert follows(grammar(form, "required", marker_id=MARKER), form.marker) == "no"


@each_row("form", [form for form in FORMATS.values() if form.anywhere])
def test_a_reply_by_a_schema_or_a_call(form: ToolFormat) -> None:
    content = {"type": "object", "properties": {"mood": {"enum": ["good", "bad"]}}, "required": ["mood"]}
    source = grammar(form, "auto", content=content)
    assert follows(source, '{"mood": "good"}') == "end"
    assert follows(source, written(form, [OSLO])) == "end"
    assert follows(source, "Hello") == "no"


def test_hopeless_schemas() -> None:
    deep: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(GrammarError, match="deep"):
        calls_grammar(FORMATS["hermes"], ToolChoice("auto", (type(WEATHER)("f", "", deep, strict=True),), True), None)


TEMPLATES = {
    "hermes": "{%- if tools %}<tools>{% endif %}<tool_call>",
    "mistral": "{% if tools is not none %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "llama3": "{% if not tools is defined %}{% endif %}<|python_tag|>",
}


@each_row("name", TEMPLATES)
def test_formats_are_known_by_templates(name: str) -> None:
    dialect = dialect_of(TEMPLATES[name])
    assert dialect.native and dialect.format is FORMATS[name]


@each_row(
    "template",
    [
        None,
        "",
        "{{ messages }}",
        "{{ tools }} <|other_call|>",
        "a text about <tool_call>",
        "{{ tools }} <tool_call><function=",
        "{{ tools }} [TOOL_CALLS] [ARGS]",
    ],
)
def test_others_are_told_in_messages(template: str | None) -> None:
    dialect = dialect_of(template)
    assert not dialect.native and dialect.format is FORMATS["hermes"]
