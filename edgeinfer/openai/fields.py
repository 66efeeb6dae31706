"""Reads a request's fields one by one, so that none is left unread; knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import UsageError
from edgeinfer.openai.errors import RequestError
from edgeinfer.options import shown

__all__ = ["Fields"]


class Fields:
    """The fields of a JSON object. A field that is null counts as left out.

    Args:
        body: the object.
        where: what it is called before the names of its fields, such as "tools[0]."; empty for a whole request.

    Raises:
        RequestError: it is no object.
    """

    def __init__(self, body: Any, where: str = "") -> None:
        self._where = where
        if not isinstance(body, Mapping) or not all(isinstance(name, str) for name in body):
            name = where.rstrip(".") or "The request"
            raise RequestError(f"{name} is not an object.", "See the OpenAI API reference.", param=where.rstrip("."))
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, kind: type | tuple[type, ...], what: str) -> Any:
        """A field's value, None where it is left out.

        Args:
            kind: JSON types of Python that it may have; bool is no int.
            what: those in words.

        Raises:
            RequestError: it has another type.
        """
        value = self._left.pop(name, None)
        if value is None:
            return None
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.wrong(name, value, f"{name} must be {what}.")
        return value

    def any(self, name: str) -> Any:
        """A field's value, whatever it is."""
        return self._left.pop(name, None)

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
        value = self._left.pop(name, None)
        return None if value is None else Fields(value, f"{self._where}{name}.")

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here."""
        for name in names:
            self._left.pop(name, None)

    def only(self, name: str, allowed: tuple[Any, ...], hint: str) -> None:
        """A field that may only ask for what happens anyway."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            message = f"{self._where}{name}={shown(value)} is not supported."
            raise RequestError(message, hint, param=self._where + name, code="unsupported_parameter")

    def refuse(self, *names: str, hint: str) -> None:
        """Fields that cannot be followed."""
        for name in names:
            self.only(name, (), hint)

    def option(self, name: str, to: str | None = None) -> dict[str, Any]:
        """A field that is the option `to` of GenerationConfig; empty where it is left out."""
        value = self._left.pop(name, None)
        return {} if value is None else self.checked(name, to or name, value)

    def checked(self, name: str, to: str, value: Any) -> dict[str, Any]:
        """An option of GenerationConfig that a field's value became.

        Raises:
            RequestError: the option cannot be that.
        """
        try:
            GenerationConfig().replace(**{to: value})
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
            message = f"Unknown field {self._where + name!r}."
            raise RequestError(message, "See the OpenAI API reference.", param=self._where + name)
