"""Thoughts split from answers: tags of every format as tokens and as text, cut anywhere, and where prompts end."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeinfer.runtime.text.streaming import ReplyText
from edgeinfer.runtime.text.thoughts import FORMATS, ThoughtFormat, ThoughtSplitter, ThoughtStart, ThoughtTags

_FIRST = 0x110000  # ids of tags that are tokens; others are characters
_PART = re.compile(r"(<[^<>]+>|\[/?THINK\]|◁[^◁▷]+▷)")


class Characters:
    """A tokenizer of one character a token, in which parts of tags are tokens or text."""

    decoder_types: tuple[str, ...] = ()

    def __init__(self, form: ThoughtFormat | None = None) -> None:
        tags = "" if form is None else form.start + form.end + form.between + form.header
        parts = dict.fromkeys(part for part in _PART.split(tags) if _PART.fullmatch(part))
        self._ids = {part: _FIRST + place for place, part in enumerate(parts)}
        self._texts = {id_: text for text, id_ in self._ids.items()}
        self.special_ids = frozenset(self._texts)
        self.control_texts = self._ids
        self.vocab_size = _FIRST + len(self._ids)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        ids: list[int] = []
        for part in _PART.split(text):
            ids += [self._ids[part]] if part in self._ids else map(ord, part)
        return ids

    def encode_between(self, parts: Sequence[str]) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join("" if id_ in self._texts else chr(id_) for id_ in ids)

    def token_to_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def id_to_token(self, id_: int) -> str | None:
        return self._texts.get(id_) or chr(id_)


def split(tokenizer: Characters, tags: ThoughtTags, start: ThoughtStart, tokens: Sequence[int]) -> tuple[str, str, int]:
    """The thought, the answer and the tokens of the thought; what streams must be the whole."""
    thoughts = ThoughtSplitter(tags, start)
    text = ReplyText(tokenizer, (), frozenset(), thoughts=thoughts)
    answer, reasoning = "", ""
    for token in tokens:
        answer += text.push(token)
        reasoning += thoughts.reasoning
    answer += text.finish()
    reasoning += thoughts.reasoning
    assert (answer, reasoning) == (text.text, text.reasoning)
    return reasoning, answer, thoughts.tokens


WORDS = st.text("ab \n<>/think[]|{}", max_size=12)
ANYWHERE, OPENED = ThoughtStart(False, True), ThoughtStart(True, False)


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.start)
@settings(max_examples=40)
@given(thought=WORDS, answer=WORDS, opened=st.booleans(), again=st.booleans())
def test_a_thought_is_told_from_the_answer(
    form: ThoughtFormat, as_tokens: bool, thought: str, answer: str, opened: bool, again: bool
) -> None:
    tokenizer = Characters(form if as_tokens else None)
    tags = ThoughtTags.of(form.start, tokenizer)
    assert tags is not None
    before = "" if opened and not again else form.start
    parts = [before, thought, form.end]
    written = [token for part in parts for token in tokenizer.encode(part)]
    answered = [token for part in (form.between, form.header, answer) for token in tokenizer.encode(part)]
    found = split(tokenizer, tags, OPENED if opened else ANYWHERE, written + answered)
    if form.end in thought or form.start in (thought, answer):
        return  # another tag
    assert found == (thought.strip(), answer.lstrip(), len(written))
    # A reply that ends inside its thought has no answer.
    cut = split(tokenizer, tags, OPENED if opened else ANYWHERE, tokenizer.encode(before + thought))
    if as_tokens and before:
        assert cut == (thought.strip(), "", len(tokenizer.encode(before + thought)))


@given(text=st.text("ab \n<>/think", max_size=20))
def test_a_reply_without_a_thought_is_its_text(text: str) -> None:
    tokenizer = Characters()
    tags = ThoughtTags(FORMATS[0], tokenizer)
    if not text.lstrip().startswith("<think>"):
        assert split(tokenizer, tags, ANYWHERE, tokenizer.encode(text)) == ("", text, 0)


def test_harmony_without_a_thought_has_no_header_either() -> None:
    form = next(each for each in FORMATS if each.header)
    tokenizer = Characters(form)
    tags = ThoughtTags(form, tokenizer)
    assert split(tokenizer, tags, ANYWHERE, tokenizer.encode(form.header + "Yes")) == ("", "Yes", 0)


def test_where_prompts_end() -> None:
    tokenizer = Characters(FORMATS[0])
    tags = ThoughtTags(FORMATS[0], tokenizer)
    rows = [
        ("user: hi\nassistant: <think>\n", "", OPENED),
        ("user: hi\nassistant: <think>\n\n</think>\n\n", "", ThoughtStart(False, False)),
        ("user: what is <think>?\nassistant: ", "", ANYWHERE),
        ("assistant: <think>\nhm", "<think>\nhm", OPENED),
        ("assistant: <think>\nhm</think>Y", "<think>\nhm</think>Y", ThoughtStart(False, False)),
        ("assistant: Yes", "Yes", ThoughtStart(False, False)),
        ("assistant: <think>\nYes", "Yes", OPENED),
    ]
    for prompt, prefill, expected in rows:
        assert ThoughtStart.after(tags, tokenizer.encode(prompt), prefill) == expected, prompt


def test_tags_are_found_in_the_template_else_in_the_vocabulary() -> None:
    mistral = Characters(FORMATS[1])
    for template, tokenizer, expected in (
        ("{{ '[THINK]' }}", Characters(), "[THINK]"),
        ("{{ content.split('</think>')[-1] }}", Characters(), "<think>"),
        (None, mistral, ThoughtTags(FORMATS[1], mistral).start),
        ("{{ '<|end|>' }}", Characters(), None),  # of Phi, which does not think
    ):
        tags = ThoughtTags.of(template, tokenizer)
        assert (tags and tags.start) == expected
        assert tags is None or tags.offered == (template is not None)
