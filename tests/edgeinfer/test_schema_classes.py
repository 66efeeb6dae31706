"""A class for `json_schema`: its schema is followed, and `Result.parsed` is an instance."""

from __future__ import annotations

import json
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import UsageError
from edgeinfer.options.reply import GenerationConfig
from edgeinfer.results import read_reply
from tests.speculation import PROMPT, needs_builtin

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
    for config in (GenerationConfig(json_schema=Person), GenerationConfig.of().replace(json_schema=Person)):  # type: ignore[arg-type]
        assert config.json_schema == SCHEMA and json.dumps(config.json_schema) == json.dumps(SCHEMA)
        assert config.replace(max_tokens=3).json_schema.schema_class is Person  # type: ignore[union-attr]
    for wrong in (int, 5, [Person]):
        with pytest.raises(UsageError, match="json_schema"):
            GenerationConfig.of(json_schema=wrong)


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
