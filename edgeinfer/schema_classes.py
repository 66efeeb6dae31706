"""Classes that say what JSON a reply is, such as pydantic's models: their schemas, and instances from replies."""

from __future__ import annotations

import json
from typing import Any, Protocol

from edgeinfer.errors import UsageError


class SchemaClass(Protocol):
    """A class as pydantic's models are."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """Its JSON Schema."""

    @classmethod
    def model_validate_json(cls, json_data: str, /) -> Any:
        """An instance from a text of JSON."""


class ClassSchema(dict[str, Any]):
    """The JSON Schema of a class, with the class."""

    schema_class: type[SchemaClass] | None = None

    @classmethod
    def of(cls, schema: Any) -> Any:
        """The schema of a class; whatever else is given, as it is."""
        if isinstance(schema, cls) or not callable(getattr(schema, "model_json_schema", None)):
            return schema
        made = cls(schema.model_json_schema())
        made.schema_class = schema
        return made


def read_reply(text: str, finish_reason: str, schema_class: type[SchemaClass] | None) -> Any:
    """What a reply says: values of JSON, or an instance of a class."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        if finish_reason != "stop":
            message = f"The reply ended ({finish_reason}) before its JSON did."
            raise UsageError(message, "Give it more tokens with max_tokens, or a larger context.") from error
        raise UsageError("The reply is not JSON.", "Ask for JSON with json_schema.") from error
    if schema_class is None:
        return found
    try:
        return schema_class.model_validate_json(text)
    except ValueError as error:  # pydantic's, of checks that no schema has
        message = f"{schema_class.__name__} refuses the reply: {' '.join(str(error).split())[:300]}"
        raise UsageError(message, "Ask again with another seed, or read result.text.") from error
