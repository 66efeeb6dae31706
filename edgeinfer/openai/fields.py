"""A request's fields, read one by one so that none is overlooked, and the options of replies that they become."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeinfer.core.errors import UsageError, shown
from edgeinfer.core.options import flat_options, is_integer, nearest, options_of
from edgeinfer.core.options.reply import REPLY_GROUPS, ReplyOptions
from edgeinfer.core.version import VERSION
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.schemas import closed

_EMPTY: tuple[Any, ...] = ("", [], {})

# Fields of other servers that are ignored, by the values without an effect, which need no warning: a sampler's value
# for "off", or what happens here anyway. Fields with the values None need no warning at all.
_OTHERS: tuple[tuple[tuple[Any, ...] | None, str], ...] = (
    (
        None,
        "cache_salt details guided_decoding_backend include_reasoning keep_alive mirostat_eta mirostat_tau priority "
        "provider reasoning_control request_id route session_id smoothing_curve spaces_between_special_tokens "
        "sse_ping_interval temperature_last timings_per_token ttl usage",
    ),
    (("medium",), "verbosity"),
    (
        (),
        "adaptive_decay models penalty_prompt post_sampling_probs reasoning_in_content return_progress "
        "sampler_order samplers transforms",
    ),
    ((-1,), "adaptive_target id_slot repeat_last_n slot_id"),
    ((0, 1), "typical typical_p"),
    (
        (0,),
        "epsilon_cutoff eta_cutoff min_keep min_tokens mirostat mirostat_mode n_cache_reuse n_discard n_indent "
        "n_keep n_probs num_keep penalize_newline penalize_nl prompt_logprobs smoothing_factor t_max_predict_ms top_a",
    ),
    (
        (1,),
        "add_special_tokens cache_prompt parse_tool_calls separate_reasoning skip_special_tokens "
        "stream_reasoning tfs_z",
    ),
    ((["text"],), "modalities"),
)
OTHERS_FIELDS: Mapping[str, tuple[Any, ...] | None] = {
    name: values for values, names in _OTHERS for name in names.split()
}

_TEXT_ONLY = "This model writes text only."
_NOT_STORED = "Nothing is stored here: send the whole conversation."
_NO_CODE = "No code that a request names is run here."
_ADAPTER = "Name an adapter that the server was started with in adapter."
# An answer that ignores these would answer another question; with the hint of their error.
REFUSED_FIELDS: Mapping[str, str] = {
    "audio": _TEXT_ONLY,
    "background": "Wait for the answer, or have it streamed.",
    "chat_template": "The model's own chat template is used.",
    "contexts": "Only /v1/chat/completions reads contexts.",
    "conversation": _NOT_STORED,
    "custom_logit_processor": _NO_CODE,
    "logits_processors": _NO_CODE,
    "lora": _ADAPTER,
    "lora_path": _ADAPTER,
    "messages": "This path continues a text: send messages to the one for chats.",
    "modalities": _TEXT_ONLY,
    "moderation": "Replies are not moderated here.",
    "previous_response_id": _NOT_STORED,
    "structural_tag": "Give json, regex, choice or grammar.",
    "thread": _NOT_STORED,
    "web_search_options": "This server reads nothing from other machines.",
}


def changes_nothing(name: str, value: Any) -> bool:
    """Whether an unsupported field has no effect with this value: an empty one, or false for what is never done."""
    neutral = OTHERS_FIELDS.get(name, ())
    return neutral is None or value in neutral or value in _EMPTY or (value is False and True not in neutral)


# Length and number of unknown fields that an answer names; only so many are checked for misspellings.
_LONGEST_NAME, _MOST_NAMED = 80, 32
# Values without an effect, whatever the field.
_NOTHING: tuple[Any, ...] = (False, "", [], {})
# Share of common letters from which a name counts as a misspelling of another, and how many may be missing.
_ALIKE, _LACKING = 0.85, 2


class Fields:
    """The fields of a JSON object, named in messages behind the prefix `where`; a field that is null counts as left
    out."""

    def __init__(self, body: Any, where: str = "", ignored: list[str] | None = None) -> None:
        self._where = where
        if not isinstance(body, Mapping) or not all(isinstance(name, str) for name in body):
            name = where.rstrip(".") or "The request"
            raise RequestError(f"{name} is not an object.", "See the reference of the API.", param=where.rstrip("."))
        self._left = {name: value for name, value in body.items() if value is not None}
        self._followed: set[str] = set()
        # Fields with an effect elsewhere that are ignored here, those of inner objects included.
        self.ignored: list[str] = [] if ignored is None else ignored

    def take(self, name: str, kind: type | tuple[type, ...], what: str) -> Any:
        """A field's value, None where it is left out; True is no int here, but 2.0 is one."""
        value = self._pop(name)
        if value is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        value = as_whole(value) if int in kinds else value
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(name, value, f"{name} must be {what}.")
        return value

    def any(self, name: str) -> Any:
        return self._pop(name)

    def flag(self, name: str) -> bool:
        return bool(self.take(name, bool, "true or false"))

    def text(self, name: str) -> str | None:
        value: str | None = self.take(name, str, "a text")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        value: int | None = self.take(name, int, "a whole number")
        if value is not None and not low <= value <= high:
            raise self.wrong(name, value, f"{name} must be between {low} and {high}.")
        return value

    def items(self, name: str) -> list[Any]:
        return list(self.take(name, (list, tuple), "a list") or ())

    def inner(self, name: str) -> Fields | None:
        value = self._pop(name)
        return None if value is None else Fields(value, f"{self._where}{name}.", self.ignored)

    def ignore(self, *names: str) -> None:
        """Skip fields that change no text and no answer here."""
        for name in names:
            self._left.pop(name, None)

    def only(self, name: str, allowed: tuple[Any, ...], hint: str) -> None:
        """Refuse a field unless its value asks for what happens anyway."""
        value = self._left.pop(name, None)
        if value not in (None, *_NOTHING, *allowed):
            message = f"{self._where}{name}={shown(value)} is not supported."
            raise RequestError(message, hint, param=self._where + name, code="unsupported_parameter")

    def refuse(self, *names: str) -> None:
        for name in sorted(names):
            self.only(name, OTHERS_FIELDS.get(name) or (), REFUSED_FIELDS[name])

    def option(self, name: str, to: str | None = None) -> dict[str, Any]:
        """A field as the option `to` of ReplyOptions; empty where it is left out."""
        value = _asked(to or name, self._pop(name))
        return {} if value is None else self.checked(name, to or name, value)

    def checked(self, name: str, to: str, value: Any) -> dict[str, Any]:
        """A value as the option `to` of ReplyOptions, checked."""
        try:
            ReplyOptions.of(**_companion(to, value), **{to: value})
        except UsageError as error:
            raise RequestError(error.message, error.hint, param=self._where + name) from error
        return {to: value}

    def wrong(self, name: str, value: Any, hint: str) -> RequestError:
        return RequestError(f"{self._where}{name}={shown(value)} cannot be used.", hint, param=self._where + name)

    def missing(self, name: str, hint: str) -> RequestError:
        return RequestError(f"{self._where}{name} is missing.", hint, param=self._where + name)

    def end(self, *, strict: bool = False) -> None:
        """Ignore the remaining fields, listing those with an effect elsewhere in `ignored`; refuse any if `strict`."""
        self.refuse(*(REFUSED_FIELDS.keys() & self._left.keys()))
        for place, (name, value) in enumerate(self._left.items()):
            close = _misspelt(name, self._followed) if place < _MOST_NAMED else None
            if close or strict:
                hint = f"Did you mean {close!r}?" if close else "Leave it out; the reference of the API lists fields."
                raise RequestError(f"Unknown field {shown(self._where + name)}.", hint, param=self._where + name)
            if not changes_nothing(name, value):
                self.leave_out(name)

    def leave_out(self, name: str) -> None:
        if len(self.ignored) < _MOST_NAMED:
            shortened = (self._where + name)[:_LONGEST_NAME]
            # Only what fits into answers and headers.
            self.ignored.append(re.sub(r"[^\w.\[\]() -]", "?", shortened, flags=re.ASCII))
            self.ignored.sort()

    def _pop(self, name: str) -> Any:
        self._followed.add(name)
        return self._left.pop(name, None)


def _misspelt(name: str, known: set[str]) -> str | None:
    """The field that a name is a misspelling of; None where it is not one, such as other servers' fields."""
    if name in OTHERS_FIELDS:
        return None
    plain = name.replace("-", "_")
    spelt = next((each for each in known if each.replace("_", "") == plain.replace("_", "").lower()), None)
    close = spelt or nearest(plain, sorted(known), _ALIKE)
    return close if close and abs(len(close) - len(plain)) <= _LACKING else None


def _asked(option: str, value: Any) -> Any:
    """A field's value in the form of its option; None without an effect, such as another server's value for "off"."""
    if value is None or value == "":
        return None
    declared = options_of(ReplyOptions).get(option)
    if declared is not None and declared.range is not None and declared.range.whole:
        value = as_whole(value)
    if option == "stop" and isinstance(value, list | tuple):
        return [text for text in value if text != ""] or None
    if option == "top_k" and is_integer(value):
        return max(0, value)
    if option == "thinking_budget" and is_integer(value) and value < 0:
        return None
    if option == "reasoning_format":
        return _REASONING_FORMATS.get(value, value) if isinstance(value, str) else value
    return value


# Other servers' formats; what they tell apart goes into the same fields here.
_REASONING_FORMATS = {"raw": "none", "parsed": "auto", "hidden": "auto", "deepseek": "auto", "deepseek-legacy": "auto"}


def as_whole(value: Any) -> Any:
    """The whole number that a float stands for, as languages without integers write 2.0; other values as they are."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _companion(name: str, value: Any) -> dict[str, Any]:
    """The option that must accompany another, so that one is checked alone; starting the reply checks both."""
    options = options_of(ReplyOptions)
    if name in options and (other := options[name].goes_with):
        return dict([other])
    return {option.name: "." for option in options.values() if option.goes_with == (name, value)}


# OpenAI's fields about the user, the price and storage.
IGNORED = (
    "metadata", "model", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
)  # fmt: skip
MOST_REPLIES = 128  # OpenAI's, as the next
MOST_ALTERNATIVES = 20
# The same seed gives the same text with the same fingerprint.
FINGERPRINT = f"edgeinfer-{VERSION}"
# The options of ReplyOptions by their own names, and by those of OpenAI's, llama.cpp's and vLLM's servers.
_OPTIONS = {field: name for name, option in options_of(ReplyOptions).items() for field in option.wire}
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
    """Options of ReplyOptions from the fields of the same meaning."""
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
    """Options under the names of vLLM's current and earlier servers, and of SGLang's."""
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
    """The length of the reply by the first of these fields that is given; -1 is no limit, as in llama.cpp's server."""
    given = {name: value for name in names if (value := fields.any(name)) is not None}
    for name, value in given.items():
        if value == -1 and not isinstance(value, bool):
            return {}
        return fields.checked(name, "max_tokens", as_whole(value))
    return {}


def form(fields: Fields, name: str) -> dict[str, Any]:
    """Options from a field like `response_format`, which gives the form of the reply."""
    inner = fields.inner(name)
    if inner is None:
        return {}
    options = _form(inner)
    # With or without `strict`, only what the schema allows is written.
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


def thinking(fields: Fields, options: dict[str, Any]) -> dict[str, Any]:
    """Variables of the chat template from the fields that say whether and how much to think. The token budget of
    thoughts is added to `options`."""
    variables: dict[str, Any] = {}
    for effort in (fields.text("reasoning_effort"), *_reasoning(fields, variables, options)):
        variables |= {"reasoning_effort": effort} if effort else {}
    for name in ("enable_thinking", "think", "thinking"):
        kinds = (bool, str, dict) if name == "thinking" else (bool, str)
        value = fields.take(name, kinds, "true or false")
        if isinstance(value, dict):
            inner = Fields(value, f"{name}.", fields.ignored)
            options |= inner.option("budget_tokens", "thinking_budget")
            value = {"disabled": False, "enabled": True, "adaptive": True}.get(inner.text("type") or "")
            inner.ignore("display")
            inner.end()
        if isinstance(value, bool):
            variables["enable_thinking"] = value
        elif value:
            variables["reasoning_effort"] = value
    if variables.get("reasoning_effort") == "none":  # OpenAI's word, which few templates know
        variables.setdefault("enable_thinking", False)
    return variables


def _reasoning(fields: Fields, variables: dict[str, Any], options: dict[str, Any]) -> list[str | None]:
    """Read OpenRouter's field, which /v1/responses has too; return its effort."""
    inner = fields.inner("reasoning")
    if inner is None:
        return []
    enabled = inner.take("enabled", bool, "true or false")
    if enabled is not None:
        variables["enable_thinking"] = enabled
    options |= inner.option("max_tokens", "thinking_budget")
    effort = inner.text("effort")
    inner.ignore("summary", "generate_summary", "exclude", "context")
    inner.end()
    return [effort]


def usage_wanted(fields: Fields) -> bool:
    """Whether a stream ends with the count of tokens."""
    inner = fields.inner("stream_options")
    if inner is None:
        return False
    wanted = inner.flag("include_usage")
    inner.ignore("include_obfuscation")
    inner.end()
    return wanted


def warnings(ignored: tuple[str, ...]) -> dict[str, Any]:
    """The warnings of an answer about ignored fields; empty where there were none."""
    return {"warnings": [f"{name} is not supported and was ignored." for name in ignored]} if ignored else {}


def _by_id(bias: Any) -> Any:
    """Biases with token ids for JSON's strings; ReplyOptions refuses keys that are no numbers."""
    if not isinstance(bias, dict):
        return bias
    return {int(token) if isinstance(token, str) and token.isdecimal() else token: b for token, b in bias.items()}
