"""No text of messages, tools or variables becomes a control token, and text without marks keeps its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.core.errors import PromptError, TemplateError
from edgeinfer.export.gguf.route import ORDINARY as TEXTS
from edgeinfer.export.gguf.route import RARE
from edgeinfer.runtime.text.contract import SPECIAL
from edgeinfer.runtime.text.special_tokens import GuardedTemplate, LiteralEncoder
from edgeinfer.runtime.text.template import ChatTemplate
from edgeinfer.runtime.text.tokenizer import Tokenizer
from tests.marked_tokenizers import KINDS, MARKS, TEMPLATES, template, tokenizer
from tests.runtime.text.test_template import CALLS, PLAIN, WEATHER, WITH_SYSTEM

NAMES = [*TEMPLATES, "tales"]
# Marks, what they are made of, what templates look for, what becomes a mark when it is normalized, and what might be
# taken for a stand-in.
PIECES = [
    *MARKS,
    *("<|", "|>", "end", "<|im_", "_end", "im_end", "|", "<", ">", "<s", "s>", "/", "[", "INST", "]", "</s", "[INST"),
    *("</think>", "<think>", "<tool_response>", "</tool_response>", "user", "＜s＞", "<|END|>", "<S>", "<ſ>"),
    *(" ", "\n", "\t", "a", "the cat", "漢", "é", "\\u003c", "&lt;", "\ue000", "\ue001", "\\ue000", "\U000f0001"),
]
mixtures = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)
roles = st.sampled_from(["system", "tool", "end", "im_end", "User", "|><|end", "s", "_end"]) | mixtures
ORDINARY: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "if (a < b && c[0] > 1) { return x | y; } // <div>x</div> #include <s.h>"}],
    [
        {"role": "user", "content": "  <p class='a'>Hi &amp; bye</p> < 3 [1] <<x>> |a|b|  "},
        {"role": "assistant", "content": "<think>\nhm, x < y\n</think>\n\nYes: [INST a] </ s>"},
        {"role": "user", "content": "end user assistant im_end"},
    ],
    [{"role": "user", "content": "s"}, {"role": "assistant", "content": "end"}, {"role": "user", "content": "\ue000<"}],
    WITH_SYSTEM[:2],
    *([{"role": "user", "content": text}] for text in (*TEXTS, *RARE) if not any(mark in text for mark in MARKS)),
]


@cache
def encoder(kind: str) -> LiteralEncoder:
    return LiteralEncoder(tokenizer(kind))


@cache
def guarded(kind: str, name: str) -> GuardedTemplate:
    return GuardedTemplate(template(name), encoder(kind).special_tokens)


def controls(kind: str, ids: Sequence[int]) -> list[int]:
    """All but the token for characters that the vocabulary lacks, which text of any kind may have."""
    unknown = tokenizer(kind).encode("\U0010fffe", False, parse_special=False)
    return [id_ for id_ in ids if id_ in tokenizer(kind).special_ids and id_ not in unknown]


def harmless(value: Any, key: str | None = None) -> Any:
    """Data with plain words for all texts that are not the template's own."""
    if isinstance(value, str):
        roles = ("user", "assistant", "system", "tool", "function", "string", "text")
        known = key in ("role", "type") and value in roles
        return value if known else "x"
    if isinstance(value, dict):
        own = {"role", "content", "tool_calls", "type", "text", "function", "name", "arguments"}
        own |= {"properties", "parameters"}
        return {(k if k in own else f"x{i}"): harmless(v, k) for i, (k, v) in enumerate(value.items())}
    return [harmless(item) for item in value] if isinstance(value, list) else value


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """Messages in turns, some with odd roles, calls and tools, all full of pieces of marks."""
    messages: list[dict[str, Any]] = []
    for place in range(draw(st.sampled_from([1, 3]))):
        message: dict[str, Any] = {"role": ("user", "assistant")[place % 2], "content": draw(mixtures)}
        if draw(st.integers(0, 5)) == 0:
            message["role"] = draw(roles)
        if draw(st.integers(0, 5)) == 0:
            message["content"] = [{"type": "text", "text": draw(mixtures)}, {"type": "text", "text": draw(mixtures)}]
        if place % 2 and draw(st.booleans()):
            function = {"name": draw(mixtures), "arguments": {draw(mixtures): draw(mixtures)}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        if draw(st.integers(0, 5)) == 0:
            message[draw(mixtures)] = draw(mixtures)
        messages.append(message)
    properties = {draw(mixtures): {"type": "string"}}
    function = {"name": draw(mixtures), "parameters": {"type": "object", "properties": properties}}
    tools = [{"type": "function", "function": function, draw(mixtures): draw(mixtures)}]
    return {
        "messages": messages,
        "tools": draw(st.sampled_from([None, tools])),
        "variables": draw(st.sampled_from([None, {"mood": draw(mixtures)}])),
        "partial_reply": draw(st.just("") | mixtures),
    }


def check(kind: str, name: str, data: dict[str, Any]) -> None:
    try:
        parts = guarded(kind, name).parts(**data)
        expected = guarded(kind, name).parts(**{key: harmless(value) for key, value in data.items()})
    except TemplateError:  # some want turns to alternate
        return
    ids = encoder(kind).encode_parts(parts)
    assert controls(kind, ids) == controls(kind, encoder(kind).encode_parts(expected)), (kind, name)
    if tokenizer(kind).decoder_types == ("ByteLevel",) and kind in ("byte-level", "gaps"):
        assert tokenizer(kind).decode(ids, skip_special_tokens=False) == "".join(parts)
    if name not in ("curious", "capitals", "macros"):
        rendered = template(name).render(data["messages"], True, data["tools"], data["variables"])
        assert "".join(parts) == rendered + data["partial_reply"]


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_no_mixture_of_pieces_makes_a_control_token(data: st.DataObject) -> None:
    conversation = data.draw(conversations())
    for kind in KINDS:
        check(kind, data.draw(st.sampled_from(NAMES)), conversation)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(st.data(), st.sampled_from(list(KINDS)), st.sampled_from(NAMES))
def test_no_mixture_does_in_many_tries(data: st.DataObject, kind: str, name: str) -> None:
    check(kind, name, data.draw(conversations()))


def test_text_without_marks_keeps_its_tokens_on_either_path() -> None:
    for turn, kind in enumerate(KINDS):
        for name in NAMES[turn % 6 :: 6]:
            for messages in (*ORDINARY, PLAIN[:1], CALLS):
                for tools in (None, [WEATHER]):
                    try:
                        text = template(name).render(messages, True, tools)
                    except TemplateError:
                        continue
                    ids = tokenizer(kind).encode(text, add_special_tokens=False)
                    parts = guarded(kind, name).parts(messages, tools)
                    if messages is CALLS:  # holds a mark, so that its tokens change, and its text does not
                        assert "".join(parts) == text
                        continue
                    assert encoder(kind).encode_parts(parts) == ids, (kind, name, messages)
                    found = iter([encoder(kind).special_tokens.ids[mark] for mark in parts[1::2]])
                    between = tokenizer(kind).encode_between(parts)
                    if kind not in ("unigram", "gaps"):  # of which the vocabulary, or what it lacks, is in the way
                        assert [next(found) if id_ == SPECIAL else id_ for id_ in between] == ids, (
                            kind,
                            name,
                            messages,
                        )


def test_marks_beside_marks_that_are_none() -> None:
    """What the tokens are: the library's where marks are meant, and plain text's where they are not."""
    kind = "pieces, first"
    parts = ["", "<|user|>", " the <|end|> cat ", "<|end|>", "the", "</s>", ""]
    ids = encoder(kind).encode_parts(parts)
    texts = [tokenizer(kind).id_to_token(id_) for id_ in ids]
    assert texts[0] == "<|user|>" and texts[-1] == "</s>" and texts.count("<|end|>") == 1
    plain = tokenizer(kind).encode("<|user|> the <|end|> cat ", False)[1:-2]
    assert ids[1:3] == plain[:2]
    assert texts[-3:-1] == ["t", "he"]  # no space is put before it, as it does not begin the text


def test_a_vocabulary_that_spells_marks_does_not_make_them() -> None:
    for kind in ("unigram", "words", "pieces, first", "pieces, always", "pieces, normalized"):
        text = "a <s> </s> <s>the<|end|>er </s>"
        plain = tokenizer(kind).encode(text, False, parse_special=False)
        ids = encoder(kind).literal(text)
        assert not controls(kind, ids), kind
        if kind not in ("pieces, always", "unigram"):
            assert controls(kind, plain), f"{kind} does not try what it is to"
        own = encoder(kind).literal(text, add_special_tokens=True)
        assert controls(kind, own) == controls(kind, tokenizer(kind).encode("", True))
        assert len(own) == len(ids) + len(controls(kind, own))
    assert tokenizer("pieces, first").decode(encoder("pieces, first").literal("a <s> b")).lstrip() == "a <s> b"


def test_end_tokens_count_as_marks_where_they_are_written_like_one() -> None:
    kind = "stripping"
    by_text = {text: tokenizer(kind).token_to_id(text) or 0 for text in ("</think>", "the", "a")}
    ends = LiteralEncoder(tokenizer(kind), by_text.values())
    assert by_text["</think>"] not in ends.literal("x</think>") and by_text["a"] in ends.literal("a")
    assert tokenizer(kind).decode(ends.literal("x</think>"), False) == "x</think>"
    assert by_text["</think>"] in encoder(kind).literal("x</think>")


# Templates with messages of which they would make marks.
MAKERS: list[tuple[str, list[dict[str, Any]]]] = [
    ("{{ '<|' ~ messages[0].name ~ '|>' }}", [{"role": "user", "content": "", "name": "end"}]),
    ("{{ '<|' ~ messages[0].content | trim | lower ~ '|>' }}", [{"role": "user", "content": " END\n"}]),
    ("{{ '<|' ~ messages[0].role ~ '|>' ~ messages[0].content }}", [{"role": "end", "content": "x"}]),
    ("{{ messages[0].content ~ messages[1].content }}", [{"role": "user", "content": c} for c in ("<|e", "nd|>")]),
    ("{{ messages[0].content.replace('</s>', '') }}", [{"role": "user", "content": "<|en</s>d|>"}]),
    ("{{ messages[0].content ~ 'end|>' }}", [{"role": "user", "content": "<|"}]),
    ("{{ '<|end' ~ messages[0].content }}", [{"role": "user", "content": "|>"}]),
    ("{{ messages[0].content.split('<tool>')[0] ~ '|>' }}", [{"role": "user", "content": "<|end<tool>|>"}]),
    ("{{ messages[0] | tojson }}", [{"role": "user", "content": "", "<|end|>": {"<s>": ["</s>"]}}]),
    ("{{ messages[0].content | tojson(ensure_ascii=true) }}", [{"role": "user", "content": "<|end|>"}]),
    ("{{ messages[0].content[::-1] }}", [{"role": "user", "content": ">|dne|<"}]),
    ("{% for c in messages[0].content %}{{ c }}{% endfor %}", [{"role": "user", "content": "<|end|>※"}]),
    ("{{ messages[0].content | replace('x', '') }}", [{"role": "user", "content": "<x|end|x>"}]),
]


def test_templates_that_would_make_marks_of_data() -> None:
    for source, messages in MAKERS:
        parts = GuardedTemplate(ChatTemplate(source, {}), encoder("byte-level").special_tokens).parts(messages)
        assert len(parts) == 1, source
        assert not controls("byte-level", encoder("byte-level").encode_parts(parts)), source


def test_what_templates_look_for_is_found() -> None:
    source = (
        "{% set c = messages[0].content %}{% if '</think>' in c %}{{ c.split('</think>')[-1] }}"
        "{% elif c.startswith('<tool_response>') %}tool{% else %}{{ c }}{% endif %}</s>"
    )
    rules = GuardedTemplate(ChatTemplate(source, {}), encoder("byte-level").special_tokens)
    assert rules.parts([{"role": "user", "content": "<think>x</think>y</s>"}]) == ["y</s>", "</s>", ""]
    assert rules.parts([{"role": "user", "content": "<tool_response></s>"}]) == ["tool", "</s>", ""]


def test_the_vocabulary_shows_nothing_of_stand_ins(tmp_path: Path) -> None:
    backend = KINDS["byte-level"]()
    backend.save(str(tmp_path / "tokenizer.json"))
    kept = Tokenizer.from_file(tmp_path / "tokenizer.json")

    def spelled() -> list[str | None]:
        return [kept.id_to_token(id_) for id_ in range(kept.vocab_size)]

    before = (kept.vocab_size, kept.special_ids, spelled(), dict(kept.control_texts))
    parts = ["a<s>", "<|end|>", "b"]
    ids = kept.encode_between(parts)
    assert ids.count(SPECIAL) == 1
    assert (kept.vocab_size, kept.special_ids, spelled(), dict(kept.control_texts)) == before
    beyond = range(kept.vocab_size, kept.vocab_size + 9)
    assert [kept.id_to_token(id_) for id_ in beyond] == [None] * 9 and kept.decode(list(beyond)) == ""


def test_data_that_holds_all_stand_ins_is_refused() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(PromptError, match="private use"):
        guarded("byte-level", "chatml").parts([{"role": "user", "content": f"<{everything}"}])
    assert guarded("byte-level", "chatml").parts([{"role": "user", "content": everything}])
