"""How a reply is to be made, by the fields that all endpoints share; knows nothing of prompts."""

from __future__ import annotations

from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.openai.fields import Fields
from edgeinfer.options import options_of
from edgeinfer.version import VERSION

__all__ = ["FINGERPRINT", "IGNORED", "MOST_ALTERNATIVES", "MOST_REPLIES", "form", "limit", "sampling", "usage_wanted"]

# Fields of OpenAI's that say who asks, what it may cost or where it is kept.
IGNORED = (
    "metadata",
    "model",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
MOST_REPLIES = 128  # OpenAI's, as the next
MOST_ALTERNATIVES = 20
# With which the same seed gives the same text.
FINGERPRINT = f"edgeinfer-{VERSION}"
# OpenAI's fields, and those of llama.cpp's and vLLM's servers, with the option of GenerationConfig that each gives.
_OPTIONS = {field: name for name, option in options_of(GenerationConfig).items() for field in option.wire}
_SEEDS = 2**64


def sampling(fields: Fields) -> dict[str, Any]:
    """Options of GenerationConfig that fields of the same meaning give."""
    options: dict[str, Any] = {}
    for name, to in _OPTIONS.items():
        options |= fields.option(name, to)
    seed = fields.take("seed", int, "a whole number")
    if seed is not None:
        options["seed"] = seed % _SEEDS  # OpenAI's may be negative
    bias = fields.any("logit_bias")
    if bias is not None:
        options |= fields.checked("logit_bias", "logit_bias", _by_id(bias))
    return options


def limit(fields: Fields, *names: str) -> dict[str, Any]:
    """The length of the reply, by the first of these fields that is there."""
    found = [fields.option(name, "max_tokens") for name in names]
    return next((option for option in found if option), {})


def form(fields: Fields, name: str) -> dict[str, Any]:
    """Options of a field that says what form the reply has, as `response_format` does."""
    inner = fields.inner(name)
    if inner is None:
        return {}
    kind = inner.text("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        # llama.cpp's server takes a schema here too.
        schema = inner.take("schema", dict, "an object")
        return {"json_object": True} if schema is None else {"json_schema": schema}
    if kind != "json_schema":
        raise inner.wrong("type", kind, "It must be text, json_object or json_schema.")
    # /v1/responses has no object in between. `strict` or not, nothing but what the schema allows is written.
    schema = (inner.inner("json_schema") or inner).take("schema", dict, "an object")
    if schema is None:
        hint = 'Give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
        raise inner.missing("json_schema.schema", hint)
    return {"json_schema": schema}


def usage_wanted(fields: Fields) -> bool:
    """Whether a stream shall end with the count of tokens."""
    inner = fields.inner("stream_options")
    if inner is None:
        return False
    wanted = inner.flag("include_usage")
    inner.ignore("include_obfuscation")
    inner.end()
    return wanted


def _by_id(bias: Any) -> Any:
    """JSON's keys are strings; GenerationConfig judges what is no number."""
    if not isinstance(bias, dict):
        return bias
    return {int(token) if isinstance(token, str) and token.isdecimal() else token: b for token, b in bias.items()}
