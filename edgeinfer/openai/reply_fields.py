"""The fields of a request that say what a reply may be, as options of replies, in the words of several servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.config import REPLY_GROUPS, GenerationConfig
from edgeinfer.openai.fields import Fields, as_whole
from edgeinfer.openai.schemas import closed
from edgeinfer.option_groups import flat_options
from edgeinfer.options import options_of
from edgeinfer.reply_options import FORMS
from edgeinfer.version import VERSION

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
# The options of GenerationConfig by their own names, and by those of OpenAI's, llama.cpp's and vLLM's servers.
_OPTIONS = {field: name for name, option in options_of(GenerationConfig).items() for field in option.wire}
_SEEDS = 2**64
# vLLM's and SGLang's names of options, at the top of a request and inside of `structured_outputs`.
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choices",
    "guided_grammar": "grammar",
}
_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "grammar"}


def sampling(fields: Fields) -> dict[str, Any]:
    """Options of GenerationConfig that fields of the same meaning give."""
    options: dict[str, Any] = {}
    for name, to in _OPTIONS.items():
        options |= fields.option(name, to)
    if fields.take("do_sample", bool, "true or false") is False:
        options["temperature"] = 0
    seed = fields.take("seed", int, "a whole number")
    if seed is not None:
        options["seed"] = seed % _SEEDS  # OpenAI's may be negative
    bias = fields.any("logit_bias")
    if bias not in (None, [], ""):
        options |= fields.checked("logit_bias", "logit_bias", _by_id(bias))
    options |= _guided(fields)
    inner = fields.any("sampling")
    if isinstance(inner, Mapping) and "logit_bias" in inner:
        inner = {**inner, "logit_bias": _by_id(inner["logit_bias"])}
    together = {} if inner is None else fields.checked("sampling", "sampling", inner)
    return flat_options(together | options, REPLY_GROUPS)


def _guided(fields: Fields) -> dict[str, Any]:
    """Options that vLLM's servers, of today and of before, and SGLang's name in ways of their own."""
    options: dict[str, Any] = {}
    for name, to in (*_GUIDED.items(), ("ebnf", "grammar")):
        options |= fields.option(name, to)
    inner = fields.inner("structured_outputs")
    if inner is not None:
        for name, to in _STRUCTURED.items():
            options |= inner.option(name, to)
        options |= {"json_object": True} if inner.flag("json_object") else {}
        inner.end()
    schema = options.get("json_schema")
    return options | {"json_schema": closed(schema)} if isinstance(schema, dict) else options


def limit(fields: Fields, *names: str) -> dict[str, Any]:
    """The length of the reply, by the first of these fields that is there; -1 is none, as for llama.cpp's server."""
    given = {name: value for name in names if (value := fields.any(name)) is not None}
    found = [_checked_limit(fields, name, value) for name, value in given.items()]
    return next(iter(found), {})


def _checked_limit(fields: Fields, name: str, value: Any) -> dict[str, Any]:
    return {} if value == -1 and not isinstance(value, bool) else fields.checked(name, "max_tokens", as_whole(value))


def form(fields: Fields, name: str) -> dict[str, Any]:
    """Options of a field that says what form the reply has, as `response_format` does."""
    inner = fields.inner(name)
    if inner is None:
        return {}
    options = _form(inner)
    # `strict` or not, nothing but what the schema allows is written.
    inner.ignore("name", "description", "strict")
    inner.end()
    return options


def _form(inner: Fields) -> dict[str, Any]:
    kind = inner.text("type")
    if kind in (None, "", "text"):
        return {}
    if kind == "json_object":
        # llama.cpp's server takes a schema here too.
        schema = inner.take("schema", dict, "an object")
        return {"json_object": True} if schema is None else {"json_schema": closed(schema)}
    if kind in ("regex", "grammar"):  # Text Generation Inference's and Fireworks'
        return inner.option("value" if kind == "regex" else "grammar", kind)
    if kind not in ("json_schema", "json"):
        raise inner.wrong("type", kind, "It must be text, json_object, json_schema, regex or grammar.")
    # /v1/responses has no object in between.
    named = inner.inner("json_schema")
    schema = (named or inner).take("schema", dict, "an object")
    if schema is None and kind == "json":
        schema = inner.take("value", dict, "an object")
    if named is not None:
        named.ignore("name", "description", "strict")
        named.end()
        if schema is None:  # OpenAI's reference lets it be left out
            return {"json_object": True}
    if schema is None:
        hint = 'Give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
        raise inner.missing("json_schema.schema", hint)
    return {"json_schema": closed(schema)}


def thinking(fields: Fields, options: dict[str, Any], *, calls: bool = False) -> dict[str, Any]:
    """What the chat template is given of the fields that say whether and how much to think.

    Args:
        options: of the reply; how many tokens it may think is added, unless a grammar holds it, which leaves none.
        calls: whether the reply may hold calls, to which a grammar holds it.
    """
    variables: dict[str, Any] = {}
    budgets: dict[str, dict[str, Any]] = {}
    for effort in (fields.text("reasoning_effort"), *_reasoning(fields, variables, budgets)):
        variables |= {"reasoning_effort": effort} if effort else {}
    for name in ("enable_thinking", "think", "thinking"):
        kinds = (bool, str, dict) if name == "thinking" else (bool, str)
        value = fields.take(name, kinds, "true or false")
        if isinstance(value, dict):
            inner = Fields(value, f"{name}.", fields.ignored)
            budgets[f"{name}.budget_tokens"] = inner.option("budget_tokens", "thinking_budget")
            value = {"disabled": False, "enabled": True, "adaptive": True}.get(inner.text("type") or "")
            inner.ignore("display")
            inner.end()
        if isinstance(value, bool):
            variables["enable_thinking"] = value
        elif value:
            variables["reasoning_effort"] = value
    if variables.get("reasoning_effort") == "none":  # OpenAI's word, which few templates know
        variables.setdefault("enable_thinking", False)
    for name, budget in budgets.items():
        if not (calls or any(form in options for form in FORMS)):
            options |= budget
        elif budget:
            fields.leave_out(name)
    return variables


def _reasoning(fields: Fields, variables: dict[str, Any], budgets: dict[str, dict[str, Any]]) -> list[str | None]:
    """OpenRouter's field, and that of /v1/responses."""
    inner = fields.inner("reasoning")
    if inner is None:
        return []
    enabled = inner.take("enabled", bool, "true or false")
    if enabled is not None:
        variables["enable_thinking"] = enabled
    budgets["reasoning.max_tokens"] = inner.option("max_tokens", "thinking_budget")
    effort = inner.text("effort")
    inner.ignore("summary", "generate_summary", "exclude", "context")
    inner.end()
    return [effort]


def usage_wanted(fields: Fields) -> bool:
    """Whether a stream shall end with the count of tokens."""
    inner = fields.inner("stream_options")
    if inner is None:
        return False
    wanted = inner.flag("include_usage")
    inner.ignore("include_obfuscation")
    inner.end()
    return wanted


def warnings(ignored: tuple[str, ...]) -> dict[str, Any]:
    """What an answer says of fields that were left out of account; nothing where there were none."""
    return {"warnings": [f"{name} is not supported and was ignored." for name in ignored]} if ignored else {}


def _by_id(bias: Any) -> Any:
    """JSON's keys are strings; GenerationConfig judges what is no number."""
    if not isinstance(bias, dict):
        return bias
    return {int(token) if isinstance(token, str) and token.isdecimal() else token: b for token, b in bias.items()}
