"""Replies that are searched for, with every form that a reply can have: they keep to it, or are refused by name."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.cli.main import main
from edgeinfer.core.errors import UsageError
from edgeinfer.core.results import Result
from edgeinfer.export.exporter import export_checkpoint
from edgeinfer.export.options import ExportConfig
from tests.cache import made
from tests.factories import make_checkpoint
from tests.methods import all_methods
from tests.speculation import BUILTIN, PROMPT, known_costs, needs_builtin

WARM: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
OPTIONS: dict[str, dict[str, Any]] = {
    "samples": WARM,
    "first-finish": WARM,
    "best-of": WARM,
    "vote": WARM,
    "momentum": {},
    "extract": {"passage": "Tom had a red ball. He met a dog in the park."},
    # Truncation may leave nothing of a form.
    "aligned": WARM | {"top_p": 1.0, "choices": ("He met a dog.", "She met a cat.", "They went home.")},
    "beam": {"beams": 4, "beam_groups": 2},
}


@pytest.fixture(scope="module", autouse=True)
def costs() -> Iterator[None]:
    """Nothing is timed."""
    with known_costs():
        yield


@pytest.fixture(scope="module", params=["builtin", "portable"])
def model(request: pytest.FixtureRequest, small_bundle: Path) -> Iterator[edgeinfer.Model]:
    if request.param == "builtin" and not (BUILTIN / "edgeinfer.json").is_file():
        pytest.skip("the built-in model has not been made")
    bundle = None if request.param == "builtin" else small_bundle
    # Which anchors itself.
    options: dict[str, Any] = {"draft_model": bundle or BUILTIN, "context": 400, "remember": False}
    with edgeinfer.load(bundle, threads=1, speculation="off", **options) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def drafting(small_bundle: Path) -> Iterator[edgeinfer.Model]:
    pytest.importorskip("llguidance")
    with edgeinfer.load(small_bundle, threads=1, draft_model=small_bundle, context=400, remember=False) as loaded:
        yield loaded


def fresh(model: edgeinfer.Model, prompt: str | list[int] = PROMPT, **options: Any) -> Result:
    """A reply of an empty cache."""
    model.score([5, 6])
    return model.generate(prompt, **options)


def test_every_way_is_tried_here() -> None:
    assert {*OPTIONS} == {*all_methods("searches")}


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.2}, {"stop": ("was", " a")}])
def test_samples_are_separate_replies_bit_for_bit(model: edgeinfer.Model, options: dict[str, Any]) -> None:
    asked = WARM | {"max_tokens": 50} | options
    found = fresh(model, search="samples", samples=4, **asked)
    assert found.search is not None and found.search.lossless and found.search.branches > 0
    assert len(found.search.texts) == 4
    for index, text in enumerate(found.search.texts):
        alone = fresh(model, **asked | {"seed": 7 + index})
        assert (text.text, text.finish_reason) == (alone.text, alone.finish_reason)
        # A stop string may end inside a token that is not reported then.
        assert text.token_ids == alone.token_ids
        if index == 0:
            assert (found.text, found.token_ids) == (alone.text, alone.token_ids)


@pytest.mark.parametrize("search", OPTIONS)
def test_the_next_turn_rests_on_the_same_bits(model: edgeinfer.Model, search: str) -> None:
    """Log-probabilities behind a reply that was searched for are those of an empty cache."""
    found = fresh(model, search=search, max_tokens=24, **OPTIONS[search])
    assert found.search is not None and found.search.search == search
    assert 1 <= len(found.token_ids) <= 24
    text = [*model.tokenize(PROMPT), *found.token_ids, 9, 8]
    ends: dict[str, Any] = {"max_tokens": 6, "logprobs": 2}
    behind = [chunk.logprobs for chunk in model.stream(text, **ends)]
    assert model.stream(text, **ends).complete().timings.cached_prompt_tokens > len(text) - 4
    model.score([5, 6])
    assert [chunk.logprobs for chunk in model.stream(text, **ends)] == behind


@pytest.mark.parametrize("search", OPTIONS)
def test_the_same_is_found_again(model: edgeinfer.Model, search: str) -> None:
    asked: dict[str, Any] = {"search": search, "max_tokens": 20} | OPTIONS[search]
    one, two = fresh(model, **asked), model.generate(PROMPT, **asked)
    assert (one.text, one.token_ids, one.search) == (two.text, two.token_ids, two.search)
    streamed = "".join(chunk.text for chunk in model.stream(PROMPT, **asked))
    assert streamed == one.text


@pytest.mark.parametrize("search", OPTIONS)
def test_logprobs_are_the_models_own(model: edgeinfer.Model, search: str) -> None:
    asked = OPTIONS[search] | {"seed": 11}
    found = list(model.stream(PROMPT, search=search, max_tokens=10, logprobs=0, **asked))
    told = [entry for chunk in found for entry in chunk.logprobs]
    ids = [token for chunk in found for token in chunk.token_ids]
    assert ids and [entry.token_id for entry in told] == ids
    prompt = model.tokenize(PROMPT)
    scored = model.score([*prompt, *ids])
    assert scored.logprobs[-len(ids) :] == pytest.approx([entry.logprob for entry in told], abs=1e-4)


@pytest.mark.parametrize("search", [name for name in OPTIONS if name != "momentum"])
def test_a_cancelled_search_leaves_the_model_ready(model: edgeinfer.Model, search: str) -> None:
    wanted = fresh(model, max_tokens=8)
    stream = model.stream(PROMPT, search=search, max_tokens=60, **OPTIONS[search])
    next(stream)
    stream.cancel()
    stream.complete()
    assert stream.result.finish_reason in ("cancelled", "stop", "length")
    assert model.generate(PROMPT, max_tokens=8).token_ids == wanted.token_ids


def test_a_search_is_not_paused(small_bundle: Path) -> None:
    options: dict[str, Any] = {"threads": 1, "remember": False, "prefix_cache": "20MB"}
    with edgeinfer.load(small_bundle, **options) as model:
        stream = model.stream(PROMPT, search="samples", max_tokens=20, **WARM)
        next(stream)
        assert not stream.pause()
        assert len(stream.complete().token_ids) == 20
        assert model.stream(PROMPT, max_tokens=20).pause()


def test_what_excludes_each_other(model: edgeinfer.Model) -> None:
    excluded: tuple[tuple[dict[str, Any], str], ...] = (
        ({"speculation": "copy"}, "cannot be combined"),
        ({"compute": "exit"}, "cannot be combined"),
        ({"regex": "a+"}, "grammar"),
        ({"choices": ("one", "two")}, "grammar"),
        ({"max_tokens": 300}, "do not fit"),
        ({"temperature": 0}, "value above 0"),
    )
    for wrong, match in excluded:
        with pytest.raises(UsageError, match=match):
            model.generate(PROMPT, **WARM | {"search": "vote", "max_tokens": 10} | wrong)
    assert len(model.generate(PROMPT, max_tokens=5, ignore_eos=True).token_ids) == 5


def test_a_backend_for_chains_only_searches_too(bigrams: Path) -> None:
    with edgeinfer.load(bigrams, threads=1, remember=False) as model:
        beams = model.generate([3, 4], search="beam", max_tokens=10).search
        assert beams is not None and len(beams.texts) == 4
        plain = model.generate([3, 4], max_tokens=60, ignore_eos=True).token_ids
        found = model.generate([3, 4], search="momentum", max_tokens=60, ignore_eos=True)
    # A bigram's greedy text runs in a circle.
    runs = [found.token_ids[i : i + 5] for i in range(56)]
    assert len(set(runs)) == len(runs) > len({plain[i : i + 5] for i in range(56)})
    assert found.search is not None and found.search.trials > 0


def make_plain(folder: Path) -> None:
    """A bundle that is not quantized."""
    make_checkpoint(folder / "checkpoint", "llama")
    export_checkpoint(folder / "checkpoint", folder / "plain", ExportConfig(bits=32))


def test_the_reference_backend_branches_too() -> None:
    with edgeinfer.load(made(make_plain) / "plain", threads=1, backend="reference", remember=False) as model:
        asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True} | WARM
        found = model.generate(PROMPT, search="samples", samples=3, **asked)
        assert found.search is not None
        separate = [model.generate(PROMPT, **asked | {"seed": 7 + i}).token_ids for i in range(3)]
        assert [text.token_ids for text in found.search.texts] == separate


@needs_builtin
def test_requests_name_the_options_as_they_are() -> None:
    with edgeinfer.load(threads=1, remember=False) as model:
        messages = [{"role": "user", "content": "Tell me about a dog."}]
        asked: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 3}
        vote = model.create_chat_completion(messages, search="vote", samples=3, **asked)
        expected = model.stream_chat(messages, search="vote", samples=3, **asked).complete()
        assert isinstance(vote, dict)
        assert vote["choices"][0]["message"]["content"] == expected.text
        plain = [model.stream_chat(messages, **asked | {"seed": seed}).complete().text for seed in (3, 4)]
        several = model.create_chat_completion(messages, n=2, search="samples", samples=2, **asked)
        assert isinstance(several, dict)
        assert [choice["message"]["content"] for choice in several["choices"]] == plain
        with pytest.raises(UsageError, match="samples"):
            model.create_chat_completion(messages, search="vote", samples="many", **asked)  # type: ignore[call-overload]


@needs_builtin
def test_run_shows_what_was_searched(capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: str, code: int = 0) -> tuple[str, str]:
        line = ["run", "-p", PROMPT, "--no-remember", "-t", "1", *options.split()]
        assert main(line) == code
        out, err = capsys.readouterr()
        return out, err

    drawn = "--temperature 0.8 --seed 3"
    told = json.loads(run(f"-n 12 {drawn} --json --search vote --samples 3 --answer line")[0])
    assert told["search"]["search"] == "vote" and len(told["search"]["texts"]) == 3
    assert told["search"]["texts"][told["search"]["chosen"]]["text"] == told["text"]
    shown, _ = run(f"--raw -n 8 {drawn} --search samples --samples 2")
    with edgeinfer.load(threads=1, remember=False) as model:
        one, two = (model.generate(PROMPT, max_tokens=8, temperature=0.8, seed=seed).text for seed in (3, 4))
    assert shown == f"{PROMPT}{one}\n\n[sample 2]\n{PROMPT}{two.rstrip()}\n"
    resisted, _ = run("-n 12 --json --search momentum --resistance 1,2,3 --resistance-weight 0.4 --candidates 8")
    assert json.loads(resisted)["search"]["search"] == "momentum"
    assert "resistance" in run("-n 12 --json --search momentum --resistance 1,x", 2)[1]


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", "yes indeed", "perhaps not")


def is_json(schema: dict[str, Any]) -> Callable[[str], None]:
    def check(text: str) -> None:
        pytest.importorskip("jsonschema").Draft202012Validator(schema).validate(json.loads(text))

    return check


def matches(expression: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(expression, text, re.DOTALL), text

    return check


# What is asked for, and what a reply that ended by itself must be.
FORMS: dict[str, tuple[dict[str, Any], Callable[[str], None]]] = {
    "none": ({}, matches(".*")),
    "schema": ({"json_schema": SCHEMA}, is_json(SCHEMA)),
    "object": ({"json_object": True}, is_json({"type": "object"})),
    "regex": ({"regex": "(yes|no), [a-z]{2,5}[.]"}, matches("(yes|no), [a-z]{2,5}[.]")),
    "grammar": ({"grammar": 'start: "the " ("cat" | "dog")~1..3'}, matches("the (cat|dog){1,3}")),
    "choices": ({"choices": CHOICES}, matches("|".join(CHOICES))),
}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 7}
WAYS: dict[str, dict[str, Any]] = {
    "off": {},
    "samples": DRAWN,
    "first-finish": DRAWN,
    "best-of": DRAWN,
    "vote": DRAWN,
    "momentum": {},
    "extract": {"passage": "Tom had a red ball. He met a dog in the park."},
    "aligned": DRAWN,
    "beam": {"beams": 4, "beam_groups": 2},
}
FOLLOWS = ("off", "aligned", "beam")
DRAWS_BY_RULE = ("momentum", "extract", "beam")
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm": DRAWN,
    "speculation": {"speculation": "forced,ngram"},
    "stop": {"stop": ("d", '"')},
    "stop ids": {"stop_token_ids": (9, 10**6)},
    "bias": {"logit_bias": {7: 50.0, 9: -math.inf, 11: -1e6, 13: 1e6}},
    "bans the likely": {"logit_bias": dict.fromkeys(range(40, 90), -math.inf)},
    "repetition": {"repetition_penalty": 100.0},
    "penalties": {"frequency_penalty": -100.0, "presence_penalty": 100.0},
    "truncation": {"top_k": 3, "top_p": 1e-6, "min_p": 1.0},
    "logprobs": {"logprobs": 20},
}


def check(model: edgeinfer.Model, way: str, form: str, extra: str) -> bool:
    """Whether there was a reply, which keeps to its form; where there was none, it was refused for a reason."""
    options, fits = FORMS[form]
    try:
        asked = WAYS[way] | options | EXTRAS[extra]
        found = model.generate("One day", max_tokens=40, **{"search": way, **asked})
    except UsageError as error:
        by_form = form != "none" and way not in FOLLOWS and "cannot follow a grammar" in error.message
        by_rule = way in DRAWS_BY_RULE and "by a rule of its own" in error.message
        beside = extra == "speculation" and way != "off" and "cannot be combined" in error.message
        banned = "bias" in extra and "bans every token" in error.message
        formless = way == "aligned" and form == "none" and "a form that they must have" in error.message
        stuck = way == "aligned" and "led nowhere" in error.message
        reasons = (by_form, by_rule, beside, banned, formless, stuck, "bans" in extra)
        assert any(reasons), (way, form, extra, error.message)
        return False
    assert form == "none" or way in FOLLOWS
    if found.finish_reason == "stop" and "stop" not in extra:
        fits(found.text)
    assert model.generate("One day", max_tokens=2).usage.completion_tokens
    return True


def test_all_ways_and_extras_are_tried() -> None:
    assert {*WAYS} == {"off", *all_methods("searches")}


def test_all_ways_and_forms(drafting: edgeinfer.Model) -> None:
    extras = itertools.cycle(EXTRAS)
    replies = {(way, form): check(drafting, way, form, "plain") for way, form in itertools.product(WAYS, FORMS)}
    for way, form in itertools.product(WAYS, FORMS):
        assert replies[way, form] == (way in FOLLOWS if form != "none" else way != "aligned")
    # The other combinations are tried by the slow test.
    for way, form in itertools.product(FOLLOWS, FORMS):
        check(drafting, way, form, next(extras))


@pytest.mark.slow
def test_all_ways_forms_and_extras(drafting: edgeinfer.Model) -> None:
    replies = sum(check(drafting, *case) for case in itertools.product(WAYS, FORMS, EXTRAS))
    assert replies > 150
