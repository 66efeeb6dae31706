"""Replies by schemas, expressions and grammars as a caller meets them: valid, ended, and the same whoever drafts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.apps.bench.memory_plans import PlanCase, PlannedModel, run_case
from edgeinfer.core.errors import BudgetError, UsageError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.results import read_reply
from edgeinfer.runtime.sampling import grammar_trial
from tests.speculation import BUILTIN, PROMPT, load_eager, needs_builtin, plain, same

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["balls", "dogs", "été"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "size": {"type": "number"}},
            "required": ["size"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
REGEX = r"(yes|no), [A-Z][a-z]{2,9}\."
GRAMMAR = 'start: "the " ANIMAL (" and the " ANIMAL)~0..3\nANIMAL: "cat" | "dog" | "horse"'
FORMS: dict[str, dict[str, Any]] = {
    "schema": {"json_schema": PERSON},
    "tree": {"json_schema": json.dumps(TREE)},
    "object": {"json_object": True},
    "regex": {"regex": REGEX},
    "grammar": {"grammar": GRAMMAR},
}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


def check(form: str, text: str) -> None:
    """Whether a complete reply is what was asked for."""
    if form == "regex":
        assert re.fullmatch(REGEX, text)
    elif form == "grammar":
        assert re.fullmatch("the (cat|dog|horse)( and the (cat|dog|horse)){0,3}", text)
    else:
        value = json.loads(text)
        assert isinstance(value, dict)
        jsonschema.Draft202012Validator({"schema": PERSON, "tree": TREE}.get(form, {})).validate(value)


@pytest.fixture(scope="module")
def tales() -> Iterator[edgeinfer.Model]:
    """The built-in model, with itself as its draft model."""
    with load_eager(context=512, draft_model=BUILTIN) as model:
        yield model


@needs_builtin
@pytest.mark.parametrize("form", FORMS)
def test_complete_replies_are_what_was_asked_for(tales: edgeinfer.Model, form: str) -> None:
    ended = seed = 0
    options: dict[str, Any] = {"max_tokens": 150, "temperature": 1.0, "speculation": "forced,ngram"}
    # Two seeds, and more where none of these ends: which do is a matter of rounding, and so of the machine.
    while seed < 2 or not ended:
        assert seed < 300, "one free object in sixty or so ends, of other forms one reply in eight"
        result = tales.generate(PROMPT, seed=seed, **options, **FORMS[form])
        if result.finish_reason == "stop":
            check(form, result.text)
            ended += 1
        else:
            assert result.finish_reason == "length" and len(result.token_ids) == 150
        seed += 1


@needs_builtin
@pytest.mark.parametrize("form", ["schema", "object", "regex", "grammar"])
@pytest.mark.parametrize("who", ["auto", "forced", "copy,forced,ngram,recycle", "exit,forced,model"])
def test_text_is_that_of_plain_decoding(tales: edgeinfer.Model, form: str, who: str) -> None:
    for way in ({}, SAMPLED):
        for width in (1, 3):
            found = same(tales, who, max_tokens=40, draft_width=width, **way, **FORMS[form])
            assert found.lossless


@needs_builtin
def test_rejection_keeps_to_the_grammar(tales: edgeinfer.Model) -> None:
    options: dict[str, Any] = {"max_tokens": 80, "temperature": 1.0, "draft_width": 3, "verification": "rejection"}
    drafted = 0
    for form in ("schema", "regex", "grammar"):
        for seed in range(3):
            result = tales.generate(PROMPT, speculation="model,forced,ngram", seed=seed, **options, **FORMS[form])
            drafted += result.speculation.drafted
            if result.finish_reason == "stop":
                check(form, result.text)
    assert drafted


@needs_builtin
def test_what_is_certain_is_drafted(tales: edgeinfer.Model) -> None:
    text = "Once upon a time there was a little dog and the dog was happy."
    expected = plain(tales, regex=re.escape(text))
    result = tales.generate(PROMPT, regex=re.escape(text), speculation="forced")
    assert result.text == expected.text == text and result.finish_reason == "stop"
    assert result.speculation.accepted > 5
    assert result.speculation.rounds < len(result.token_ids) / 2


@needs_builtin
def test_a_reply_ends_where_its_grammar_does(tales: edgeinfer.Model) -> None:
    for options in ({}, {"stop_token_ids": (5,)}, {"stop_token_ids": (5,), "ignore_eos": True}):
        result = tales.generate(PROMPT, regex="[a-z]{9}", max_tokens=40, **options)
        assert (result.finish_reason, len(result.text)) == ("stop", 9)
    with pytest.raises(UsageError, match="needs a stop token"):
        tales.generate(PROMPT, regex="a", ignore_eos=True)


@needs_builtin
def test_what_is_too_long_is_cut(tales: edgeinfer.Model) -> None:
    schema = {"type": "string", "minLength": 5000}
    result = tales.generate(PROMPT, json_schema=schema, max_tokens=30)
    assert (result.finish_reason, len(result.token_ids)) == ("length", 30)
    assert result.text.startswith('"') and not result.text.endswith('"')


@needs_builtin
def test_a_refused_schema_leaves_the_model_free(tales: edgeinfer.Model) -> None:
    for _ in range(2):
        with pytest.raises(UsageError, match="cannot be used: not is not supported"):
            tales.generate(PROMPT, json_schema={"not": {"pattern": "a"}})
    assert tales.generate(PROMPT, max_tokens=3).usage.completion_tokens == 3


@needs_builtin
def test_costs_are_told(tales: edgeinfer.Model) -> None:
    with tales.stream(PROMPT, regex="[ab]{4}", speculation="off") as stream:
        result = stream.complete()
        costs = stream.grammar_costs
    assert costs is not None and costs.compile_ms > 0
    assert 0 < len(costs.mask_ms) <= len(result.token_ids)
    with tales.stream(PROMPT, max_tokens=1) as stream:
        assert stream.grammar_costs is None


def answer(model: edgeinfer.Model, response_format: Any, **options: Any) -> str:
    found = model.create_chat_completion(
        [{"role": "user", "content": "Hello"}], response_format=response_format, **{"max_tokens": 60} | options
    )
    assert isinstance(found, dict)
    return found["choices"][0]["message"]["content"] or ""


@needs_builtin
def test_response_formats(tales: edgeinfer.Model) -> None:
    short = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": short, "strict": True}}
    jsonschema.validate(json.loads(answer(tales, asked)), short)
    jsonschema.validate(json.loads(answer(tales, {"type": "json_object", "schema": short})), short)
    assert answer(tales, {"type": "json_object"}).startswith("{")
    assert answer(tales, {"type": "text"}) == answer(tales, None)
    chunks = tales.create_chat_completion(
        [{"role": "user", "content": "Hello"}], response_format=asked, stream=True, max_tokens=60
    )
    assert isinstance(chunks, Iterator)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert text == answer(tales, asked)


@pytest.mark.gguf
def test_a_gguf_vocabulary_is_followed_as_well() -> None:
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    from tests.gguf_models import builtin_gguf

    if not (BUILTIN / "edgeinfer.json").is_file():
        pytest.skip("the built-in model has not been made")
    with load_eager(builtin_gguf(), backend="llamacpp", context=256) as model:
        for form in ("schema", "regex", "grammar"):
            found = [
                model.generate(PROMPT, max_tokens=120, speculation=who, **SAMPLED, **FORMS[form])
                for who in ("off", "forced,ngram")
            ]
            if form != "schema":
                assert found[0].finish_reason == "stop"
            for result in found:
                if result.finish_reason == "stop":
                    check(form, result.text)


@needs_builtin
def test_what_takes_too_much_is_found_out_before_the_reply(
    tales: edgeinfer.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    tales.check(temperature=0.5, **FORMS["schema"])
    monkeypatch.setattr(grammar_trial, "_SECONDS", 0.2)
    bomb = {"type": "integer", "multipleOf": 1_000_003_000_000_007}
    for options in ({"json_schema": bomb}, {"regex": "(" * 5000}, {"temperature": -1}, {"nonsense": 1}):
        with pytest.raises(UsageError):
            tales.check(**options)


LEAN: dict[str, Any] = {"context": 64, "threads": 1, "speculation": "off", "remember": False, "counted": "anonymous"}


def test_memory_is_planned_from_the_start_where_it_is_asked_for(small_bundle: Path) -> None:
    without, ample = (edgeinfer.plan(small_bundle, structured=asked, **LEAN) for asked in (False, True))
    assert "grammars" not in without.terms and ample.configuration.grammars == "sliced"
    assert ample.terms["grammars"] > 8_000_000
    beside = edgeinfer.plan(small_bundle, structured=True, parallel=3, **LEAN)
    assert beside.terms["grammars"] > ample.terms["grammars"]


def test_memory_is_planned_when_the_first_such_reply_is_asked_for(small_bundle: Path) -> None:
    with edgeinfer.load(small_bundle, memory="2GB", **LEAN) as model:
        before = model.plan
        result = model.generate(PROMPT, max_tokens=4, regex="[a-z ]{20}")
        assert model.plan.configuration.grammars == "sliced"
        # Pages of libraries come and go with what else the process does.
        same = {"libraries": 0, "grammars": result.memory.terms["grammars"]}
        assert {**model.plan.terms, **same} == {**before.terms, **same}
        assert model.plan.terms["grammars"] == same["grammars"] > 0
        model.generate(PROMPT, max_tokens=4)
        assert "grammars" in model.plan.terms


def test_replies_without_room_for_them_are_refused_and_others_are_made(small_bundle: Path) -> None:
    least = edgeinfer.plan(small_bundle, **LEAN).minimum_bytes
    with edgeinfer.load(small_bundle, memory=least + 4_000_000, **LEAN) as model:
        with pytest.raises(BudgetError, match="for which the budget of") as caught:
            model.generate(PROMPT, max_tokens=4, json_object=True)
        assert "structured=True" in str(caught.value.hint) and caught.value.minimum_bytes > least + 4_000_000
        assert model.generate(PROMPT, max_tokens=4).token_ids and "grammars" not in model.plan.terms


@needs_builtin
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_reply_by_a_schema_stays_within_a_limit_of_the_system() -> None:
    model = PlannedModel("built-in", str(BUILTIN), 5_000_000, 512, "built-in")
    options = {**LEAN, "context": 128, "structured": True, "kv": "int8"}
    run = run_case(PlanCase(0, model, 1.0, seed=1, draft_width=1, cold=False, options=options))
    assert run["outcome"] == "kept", run["reason"]
    assert run["details"]["anonymous"]["grammars"] > 0


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


class Person:
    """As pydantic's models are."""

    def __init__(self, age: int) -> None:
        self.age = age

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return dict(SCHEMA)

    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Person:
        age = json.loads(json_data)["age"]
        if age == 7:
            raise ValueError("seven\nis taken")
        return cls(age)


def test_a_class_is_its_schema_with_whoever_asks() -> None:
    for config in (ReplyOptions(json_schema=Person), ReplyOptions.of().replace(json_schema=Person)):  # type: ignore[arg-type]
        assert config.json_schema == SCHEMA and json.dumps(config.json_schema) == json.dumps(SCHEMA)
        assert config.replace(max_tokens=3).json_schema.schema_class is Person  # type: ignore[union-attr]
    for wrong in (int, 5, [Person]):
        with pytest.raises(UsageError, match="json_schema"):
            ReplyOptions.of(json_schema=wrong)


def test_what_a_class_makes_of_a_reply() -> None:
    assert read_reply('{"age": 3}', "stop", Person).age == 3 and read_reply('{"age": 3}', "stop", None) == {"age": 3}
    for text, reason, says in (
        ('{"age": 7}', "stop", "Person refuses the reply: seven is taken"),
        ('{"age": ', "length", "before its JSON did"),
        ("Ann", "stop", "not JSON"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            read_reply(text, reason, Person)
        assert caught.value.hint


@needs_builtin
def test_a_reply_is_an_instance() -> None:
    pydantic = pytest.importorskip("pydantic")
    pytest.importorskip("llguidance")
    mood = pydantic.create_model("Mood", score=(float, pydantic.Field(ge=0, le=1)), tags=(dict[str, bool], {}))
    with edgeinfer.load(context=256, structured=True) as model:
        result = model.generate(PROMPT, json_schema=Person, max_tokens=30)
        assert isinstance(result.parsed, Person) and result.parsed.age == json.loads(result.text)["age"]
        assert "schema_class" not in result.to_dict() and json.dumps(result.to_dict())
        for chunk in (stream := model.stream(PROMPT, json_schema=mood, max_tokens=100)):
            assert chunk.text is not None
        found = stream.result
        assert found.finish_reason != "stop" or isinstance(found.parsed, mood)
        assert isinstance(model.chat().send("Hi", json_schema=Person, max_tokens=30).parsed, Person)
        assert model.generate(PROMPT, json_schema=SCHEMA, max_tokens=30).parsed == json.loads(result.text)
