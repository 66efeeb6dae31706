"""Legacy completions: prompts in every form, several replies, log-probabilities, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

import edgeinfer
from edgeinfer.openai import make_completion, whole
from edgeinfer.openai.errors import RequestError


def complete(model: edgeinfer.Model, **body: Any) -> dict[str, Any]:
    return whole(model, make_completion("text_completion", {"ignore_eos": True, **body}, model))


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def test_prompts_in_every_form(model: edgeinfer.Model) -> None:
    ids = model.tokenize("the cat")
    expected = model.generate("the cat", max_tokens=16, ignore_eos=True).text
    for prompt in ("the cat", ["the cat"], ids, [ids]):
        assert texts(complete(model, prompt=prompt)) == [expected]
    both = complete(model, prompt=["the cat", "a dog"])
    assert texts(both) == [expected, *texts(complete(model, prompt="a dog"))]
    assert both["usage"]["prompt_tokens"] == len(ids) + len(model.tokenize("a dog"))
    begun = complete(model, prompt="")
    assert begun["usage"]["prompt_tokens"] == 1


def test_several_replies(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    answer = complete(model, prompt=["a", "b"], n=2, best_of=2, **options)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for place, prompt in enumerate("ab"):
        for reply in range(2):
            alone = complete(model, prompt=prompt, **options | {"seed": 7 + reply})
            assert texts(alone) == [texts(answer)[2 * place + reply]]
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 48, "total_tokens": 50}
    assert answer["timings"]["predicted_n"] == 48


def test_the_best_of_several_replies(model: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 7, "max_tokens": 12}
    answer = complete(model, prompt=["a", "b"], n=2, best_of=4, **options)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 4
    best = []
    for prompt in "ab":
        every = complete(model, prompt=prompt, n=4, logprobs=0, **options)["choices"]
        every.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))  # of as many tokens
        best += [choice["text"] for choice in every[:2]]
    assert texts(answer) == best
    assert answer["usage"] == answer["usage"] | {"prompt_tokens": 2, "completion_tokens": 96}
    searched = model.generate("a", search="best-of", samples=4, ignore_eos=True, **options)
    assert searched.text == best[0]


def test_echo(model: edgeinfer.Model) -> None:
    reply = texts(complete(model, prompt="the cat"))[0]
    assert texts(complete(model, prompt="the cat", echo=True)) == ["the cat" + reply]
    assert texts(complete(model, prompt=model.tokenize("the cat"), echo=True)) == ["the cat" + reply]


def test_log_probabilities(tales: edgeinfer.Model) -> None:
    (choice,) = complete(tales, prompt="Once upon a time", logprobs=2)["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == choice["text"]
    for token, logprob, top, offset in zip(*(told[name] for name in FIELDS), strict=True):
        assert choice["text"][offset:].startswith(token)
        assert top[token] == logprob <= max(top.values()) <= 0
        assert 2 <= len(top) <= 3


FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": ["a", 5]}),
    ("prompt", {"prompt": [5, "a"]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": ["a"] * 200}),
    ("n", {"prompt": ["a"] * 100, "n": 2}),
    ("best_of", {"prompt": "a", "best_of": 1, "n": 2}),
    ("best_of", {"prompt": "a", "best_of": 2, "stream": True}),
    ("best_of", {"prompt": ["a"] * 100, "best_of": 2}),
    ("suffix", {"prompt": "a", "suffix": "b"}),
    ("logprobs", {"prompt": "a", "logprobs": True}),
    ("logprobs", {"prompt": "a", "logprobs": 21}),
    ("logprobs", {"prompt": "a", "logprobs": 1, "echo": True}),
    ("max_tokens", {"prompt": "a", "max_tokens": -2}),
    ("messages", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
    ("stream", {"prompt": "a", "stream": "yes"}),
]


@pytest.mark.parametrize(("param", "body"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused(model: edgeinfer.Model, param: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        make_completion("text_completion", body, model)
    assert caught.value.param == param


def test_a_prompt_that_is_too_long_names_it(model: edgeinfer.Model) -> None:
    with pytest.raises(RequestError) as caught:
        complete(model, prompt=[5] * 600)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
