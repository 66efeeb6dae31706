"""The limit on thoughts: counted by tokens or spelled out, behind drafts, in prompts, and in a model's replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import UsageError
from edgeinfer.options.reply import GenerationConfig
from edgeinfer.runtime.sampling.processor import LogitsProcessor
from edgeinfer.runtime.sampling.sampler import Sampler
from edgeinfer.runtime.sampling.thinking import ThinkingBudget, thinking_tags
from tests.runtime.search.fakes import Letters, LettersBackend, Trial, V
from tests.speculation import needs_builtin


class Spelled(Letters):
    """A tokenizer of one character a token, in which tags are spelled out."""

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, ids))

    def token_to_id(self, text: str) -> int | None:
        return ord(text) if len(text) == 1 else None


class Tagged(Spelled):
    """A tokenizer whose tags are tokens."""

    tags: Mapping[str, int] = {"[THINK]": 1, "[/THINK]": 2}

    def token_to_id(self, text: str) -> int | None:
        return self.tags.get(text)


def follow(budget: ThinkingBudget, wanted: str) -> str:
    """A text that goes on as is wanted where it may."""
    found, left = "", iter(wanted)
    while True:
        allowed = budget.allowed()
        token = next(map(ord, left), None) if allowed is None else int(allowed[0])
        if token is None:
            return found
        assert allowed is None or next(iter(budget.forced())) == token
        budget.push(token)
        found += chr(token)


def test_thoughts_end_where_they_have_had_their_tokens() -> None:
    rows = [
        (3, "", "<think>abcdefg", "<think>abc</think>defg"),
        (3, "", "<think>ab</think>abcdefg", "<think>ab</think>abcdefg"),
        (0, "", "x<think>abc", "x<think></think>abc"),
        (2, "", "<think>a</think>b<think>cde", "<think>a</think>b<think>cd</think>e"),
        (3, "<think>\n", "abcdefg", "abc</think>defg"),
        (3, "<think>a</think>", "abcdefg", "abcdefg"),
        (3, "", "abcdefg<thin>abcd", "abcdefg<thin>abcd"),
    ]
    for most, prompt, wanted, expected in rows:
        assert follow(ThinkingBudget(Spelled(), most, list(map(ord, prompt))), wanted) == expected


def test_tags_that_are_tokens_are_those_alone() -> None:
    tokenizer = Tagged()
    assert thinking_tags(tokenizer) == ("[THINK]", "[/THINK]")
    assert thinking_tags(Spelled()) == ("<think>", "</think>")
    assert follow(ThinkingBudget(tokenizer, 2, []), "\x01abcd") == "\x01ab\x02cd"
    assert follow(ThinkingBudget(tokenizer, 2, [1, 97]), "abcd") == "ab\x02cd"
    # A user's text that reads like a tag opens no thought.
    assert follow(ThinkingBudget(tokenizer, 2, list(map(ord, "[THINK]"))), "abcd") == "abcd"


def test_what_is_pushed_is_undone() -> None:
    budget = ThinkingBudget(Spelled(), 2, [])
    for token in map(ord, "<think>ab"):
        budget.push(token)
    assert "".join(map(chr, budget.forced())) == "</think>"
    for token in map(ord, "xyz</think>and on"):
        budget.push(token)
    assert budget.allowed() is None
    budget.pop(17)
    assert "".join(map(chr, budget.forced())) == "</think>"
    budget.pop()
    assert budget.allowed() is None and not budget.forced()


def test_it_goes_with_some_searches_and_no_form() -> None:
    with pytest.raises(UsageError, match="leaves no thought"):
        GenerationConfig(thinking_budget=3, choices=("a", "b"))
    with pytest.raises(UsageError, match="out of range"):
        GenerationConfig(thinking_budget=-1)
    for search in ("vote", "particles"):
        assert Trial(LettersBackend(400), search=search, temperature=0.9, thinking_budget=3).tokens()
    with pytest.raises(UsageError, match="cannot limit thoughts"):
        Trial(LettersBackend(), search="beam", thinking_budget=3)


def test_only_the_end_can_be_drawn() -> None:
    config = GenerationConfig(temperature=1.0, thinking_budget=1)
    sampler = Sampler(LogitsProcessor(config, V, 1), [1], ThinkingBudget(Tagged(), 1, [1]))
    logits = np.zeros(V, np.float32)
    sampler.accept(0, logits)
    assert {sampler.sample(logits, position) for position in range(20)} == {2}
    assert len({sampler.sample(logits, position, [2]) for position in range(20)}) > 3
    assert sampler.forced([]) == [2] and not sampler.forced([2])


@needs_builtin
@pytest.mark.slow
def test_a_model_ends_its_thought() -> None:
    with edgeinfer.load(threads=1, context=400, remember=False) as model:
        prompt = "<think>Once upon a time"
        texts = [
            model.generate(prompt, max_tokens=40, thinking_budget=8, speculation=drafters).text
            for drafters in ("off", "forced,ngram")
        ]
        assert texts[0] == texts[1]
        thought, end, rest = texts[0].partition("</think>")
        assert end and len(model.tokenize(thought)) <= 9 and "</think>" not in rest
        free = model.generate(prompt, max_tokens=40, speculation="off").text
        assert free.startswith(thought)
