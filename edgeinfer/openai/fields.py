"""A request's fields, read one by one so that none is left unread, and the options of replies that they give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.config import REPLY_GROUPS, GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.ignored import OTHERS_FIELDS, changes_nothing
from edgeinfer.openai.schemas import closed
from edgeinfer.option_groups import flat_options
from edgeinfer.options import is_integer, nearest, options_of
from edgeinfer.version import VERSION
from edgeinfer.wording import shown

__all__ = [
    "FINGERPRINT",
    "IGNORED",
    "MOST_ALTERNATIVES",
    "MOST_REPLIES",
    "Fields",
    "form",
    "limit",
    "sampling",
    "usage_wanted",
    "warnings",
]


class Fields:
    """The fields of a JSON object. A field that is null counts as left out.

    Args:
        body: the object.
        where: what it is called before the names of its fields, such as "tools[0]."; empty for a whole request.

    Raises:
        RequestError: it is no object.

    Attributes:
        ignored: fields that were left out of account though they ask for something.
    """

    def __init__(self, body: Any, where: str = "") -> None:
        self._where = where
        if not isinstance(body, Mapping) or not all(isinstance(name, str) for name in body):
            name = where.rstrip(".") or "The request"
            raise RequestError(f"{name} is not an object.", "See the reference of the API.", param=where.rstrip("."))
        self._left = {name: value for name, value in body.items() if value is not None}
        self._known: set[str] = set()
        self.ignored: list[str] = []

    def take(self, name: str, kind: type | tuple[type, ...], what: str) -> Any:
        """A field's value, None where it is left out.

        Args:
            kind: JSON types of Python that it may have; bool is no int.
            what: those in words.

        Raises:
            RequestError: it has another type.
        """
        value = self._pop(name)
        if value is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(name, value, f"{name} must be {what}.")
        return value

    def any(self, name: str) -> Any:
        """A field's value, whatever it is."""
        return self._pop(name)

    def flag(self, name: str) -> bool:
        """Whether a field is true."""
        return bool(self.take(name, bool, "true or false"))

    def text(self, name: str) -> str | None:
        """A field that is a text."""
        value: str | None = self.take(name, str, "a text")
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A field that is a whole number between two."""
        value: int | None = self.take(name, int, "a whole number")
        if value is not None and not low <= value <= high:
            raise self.wrong(name, value, f"{name} must be between {low} and {high}.")
        return value

    def items(self, name: str) -> list[Any]:
        """A field that is a list; empty where it is left out."""
        return list(self.take(name, (list, tuple), "a list") or ())

    def inner(self, name: str) -> Fields | None:
        """A field that is an object."""
        value = self._pop(name)
        return None if value is None else Fields(value, f"{self._where}{name}.")

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here."""
        for name in names:
            self._pop(name)

    def ignore_others(self) -> None:
        """Fields that other servers know and this one does not; `ignored` tells of those that ask for something."""
        for name in OTHERS_FIELDS.keys() & self._left.keys():
            if not changes_nothing(name, self._left.pop(name)):
                self.ignored.append(self._where + name)
        self.ignored.sort()

    def only(self, name: str, allowed: tuple[Any, ...], hint: str) -> None:
        """A field that may only ask for what happens anyway."""
        value = self._pop(name)
        if value is not None and value not in allowed:
            message = f"{self._where}{name}={shown(value)} is not supported."
            raise RequestError(message, hint, param=self._where + name, code="unsupported_parameter")

    def refuse(self, *names: str, hint: str) -> None:
        """Fields that cannot be followed."""
        for name in names:
            self.only(name, (), hint)

    def option(self, name: str, to: str | None = None) -> dict[str, Any]:
        """A field that is the option `to` of GenerationConfig; empty where it is left out."""
        value = self._pop(name)
        return {} if value is None else self.checked(name, to or name, value)

    def checked(self, name: str, to: str, value: Any) -> dict[str, Any]:
        """An option of GenerationConfig that a field's value became.

        Raises:
            RequestError: the option cannot be that.
        """
        try:
            GenerationConfig.of(**_companion(to, value), **{to: value})
        except UsageError as error:
            raise RequestError(error.message, error.hint, param=self._where + name) from error
        return {to: value}

    def wrong(self, name: str, value: Any, hint: str) -> RequestError:
        """The error of a value that a field cannot have."""
        message = f"{self._where}{name}={shown(value)} cannot be used."
        return RequestError(message, hint, param=self._where + name)

    def missing(self, name: str, hint: str) -> RequestError:
        """The error of a field that has to be there."""
        return RequestError(f"{self._where}{name} is missing.", hint, param=self._where + name)

    def end(self) -> None:
        """All that is known was read.

        Raises:
            RequestError: something is left.
        """
        for name in self._left:
            close = nearest(name, sorted(self._known))
            hint = f"Did you mean {close!r}?" if close else "Leave it out; the reference of the API lists fields."
            message = f"Unknown field {shown(self._where + name)}."
            raise RequestError(message, hint, param=self._where + name)

    def _pop(self, name: str) -> Any:
        self._known.add(name)
        return self._left.pop(name, None)


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


def _companion(name: str, value: Any) -> dict[str, Any]:
    """What an option is checked beside that is refused alone; whether both came shows when the reply begins."""
    options = options_of(GenerationConfig)
    if name in options and (other := options[name].goes_with):
        return dict([other])
    return {option.name: "." for option in options.values() if option.goes_with == (name, value)}


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
    inner = fields.any("sampling")
    if isinstance(inner, Mapping) and "logit_bias" in inner:
        inner = {**inner, "logit_bias": _by_id(inner["logit_bias"])}
    together = {} if inner is None else fields.checked("sampling", "sampling", inner)
    return flat_options(together | options, REPLY_GROUPS)


def limit(fields: Fields, *names: str) -> dict[str, Any]:
    """The length of the reply, by the first of these fields that is there; -1 is none, as for llama.cpp's server."""
    given = {name: value for name in names if (value := fields.any(name)) is not None}
    found = [_checked_limit(fields, name, value) for name, value in given.items()]
    return next(iter(found), {})


def _checked_limit(fields: Fields, name: str, value: Any) -> dict[str, Any]:
    return {} if is_integer(value) and value == -1 else fields.checked(name, "max_tokens", value)


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
        return {"json_object": True} if schema is None else {"json_schema": closed(schema)}
    if kind != "json_schema":
        raise inner.wrong("type", kind, "It must be text, json_object or json_schema.")
    # /v1/responses has no object in between. `strict` or not, nothing but what the schema allows is written.
    schema = (inner.inner("json_schema") or inner).take("schema", dict, "an object")
    if schema is None:
        hint = 'Give {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}.'
        raise inner.missing("json_schema.schema", hint)
    return {"json_schema": closed(schema)}


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
