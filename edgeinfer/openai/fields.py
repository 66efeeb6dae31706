"""A request's fields, read one by one so that none is left out of account silently."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError, shown
from edgeinfer.openai.errors import RequestError
from edgeinfer.openai.ignored import OTHERS_FIELDS, REFUSED_FIELDS, changes_nothing
from edgeinfer.options import is_integer, nearest, options_of

# Characters and names of unknown fields that an answer tells of; only so many are looked at for misspellings.
_LONGEST_NAME, _MOST_NAMED = 80, 32
# What asks for nothing, whatever the field.
_NOTHING: tuple[Any, ...] = (False, "", [], {})
# Of letters in common, from which on a name is taken for a misspelling of another, and letters that it may lack.
_ALIKE, _LACKING = 0.85, 2


class Fields:
    """The fields of a JSON object. A field that is null counts as left out.

    Args:
        body: the object.
        where: what it is called before the names of its fields, such as "tools[0]."; empty for a whole request.

    Raises:
        RequestError: it is no object.

    Attributes:
        ignored: fields that were left out of account though they ask for something, of inner objects too.
    """

    def __init__(self, body: Any, where: str = "", ignored: list[str] | None = None) -> None:
        self._where = where
        if not isinstance(body, Mapping) or not all(isinstance(name, str) for name in body):
            name = where.rstrip(".") or "The request"
            raise RequestError(f"{name} is not an object.", "See the reference of the API.", param=where.rstrip("."))
        self._left = {name: value for name, value in body.items() if value is not None}
        self._followed: set[str] = set()
        self.ignored: list[str] = [] if ignored is None else ignored

    def take(self, name: str, kind: type | tuple[type, ...], what: str) -> Any:
        """A field's value, None where it is left out.

        Args:
            kind: JSON types of Python that it may have; bool is no int, but 2.0 is.
        """
        value = self._pop(name)
        if value is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        value = as_whole(value) if int in kinds else value
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
        return None if value is None else Fields(value, f"{self._where}{name}.", self.ignored)

    def ignore(self, *names: str) -> None:
        """Fields that change no text and no answer here."""
        for name in names:
            self._left.pop(name, None)

    def only(self, name: str, allowed: tuple[Any, ...], hint: str) -> None:
        """A field that may only ask for what happens anyway."""
        value = self._left.pop(name, None)
        if value not in (None, *_NOTHING, *allowed):
            message = f"{self._where}{name}={shown(value)} is not supported."
            raise RequestError(message, hint, param=self._where + name, code="unsupported_parameter")

    def refuse(self, *names: str) -> None:
        """Fields that cannot be followed."""
        for name in sorted(names):
            self.only(name, OTHERS_FIELDS.get(name) or (), REFUSED_FIELDS[name])

    def option(self, name: str, to: str | None = None) -> dict[str, Any]:
        """A field that is the option `to` of GenerationConfig; empty where it is left out."""
        value = _asked(to or name, self._pop(name))
        return {} if value is None else self.checked(name, to or name, value)

    def checked(self, name: str, to: str, value: Any) -> dict[str, Any]:
        """An option of GenerationConfig that a field's value became."""
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

    def end(self, *, strict: bool = False) -> None:
        """All that is known was read. What is left is ignored, and `ignored` tells of what asks for something.

        Args:
            strict: nothing may be left.
        """
        self.refuse(*(REFUSED_FIELDS.keys() & self._left.keys()))
        for place, (name, value) in enumerate(self._left.items()):
            close = _misspelt(name, self._followed) if place < _MOST_NAMED else None
            if close or strict:
                hint = f"Did you mean {close!r}?" if close else "Leave it out; the reference of the API lists fields."
                message = f"Unknown field {shown(self._where + name)}."
                raise RequestError(message, hint, param=self._where + name)
            if not changes_nothing(name, value):
                self.leave_out(name)

    def leave_out(self, name: str) -> None:
        """Tells that a field is left out of account."""
        if len(self.ignored) < _MOST_NAMED:
            self.ignored.append(ignored_name(self._where + name))
            self.ignored.sort()

    def _pop(self, name: str) -> Any:
        self._followed.add(name)
        return self._left.pop(name, None)


def ignored_name(name: str) -> str:
    """A name from a request as answers and their headers can carry it."""
    return re.sub(r"[^\w.\[\]() -]", "?", name[:_LONGEST_NAME], flags=re.ASCII)


def _misspelt(name: str, known: set[str]) -> str | None:
    """The field that a name is meant to be, None where it is a word of its own. Names that other servers have are."""
    if name in OTHERS_FIELDS:
        return None
    plain = name.replace("-", "_")
    spelt = next((each for each in known if each.replace("_", "") == plain.replace("_", "").lower()), None)
    close = spelt or nearest(plain, sorted(known), _ALIKE)
    return close if close and abs(len(close) - len(plain)) <= _LACKING else None


def _asked(option: str, value: Any) -> Any:
    """A field's value as its option takes it, None where it asks for nothing: an empty text, and what other servers
    take for "off"."""
    if value is None or value == "":
        return None
    declared = options_of(GenerationConfig).get(option)
    if declared is not None and declared.range is not None and declared.range.whole:
        value = as_whole(value)
    if option == "stop" and isinstance(value, list | tuple):
        return [text for text in value if text != ""] or None
    if option == "top_k" and is_integer(value):
        return max(0, value)
    if option == "thinking_budget" and is_integer(value) and value < 0:
        return None
    return value


def as_whole(value: Any) -> Any:
    """Languages without whole numbers of their own write them as 2.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _companion(name: str, value: Any) -> dict[str, Any]:
    """What an option is checked beside that is refused alone; whether both came shows when the reply begins."""
    options = options_of(GenerationConfig)
    if name in options and (other := options[name].goes_with):
        return dict([other])
    return {option.name: "." for option in options.values() if option.goes_with == (name, value)}
