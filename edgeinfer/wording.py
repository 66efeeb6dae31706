"""Texts that name options, which every front end says in its own words: `context=1024` in Python, `--context 1024` in a
shell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edgeinfer.records import dataclass

_SHOWN = 80  # characters


@dataclass(frozen=True)
class Setting:
    """An option as a text names it, by its name in Python: `"Load with a larger " + Setting("context") + "."`.

    Attributes:
        value: that the text speaks of; absent where it speaks of the option as such.
    """

    name: str
    value: object = ...

    def __str__(self) -> str:
        return self.name if self.value is ... else f"{self.name}={shown(self.value)}"

    def __add__(self, other: str | Setting | Wording) -> Wording:
        return Wording((self,)) + other

    def __radd__(self, other: str) -> Wording:
        return Wording((other, self))


@dataclass(frozen=True)
class Wording:
    """A text that names options."""

    parts: tuple[str | Setting, ...]

    def __add__(self, other: str | Setting | Wording) -> Wording:
        return Wording((*self.parts, *(other.parts if isinstance(other, Wording) else (other,))))

    def __radd__(self, other: str) -> Wording:
        return Wording((other, *self.parts))

    def __str__(self) -> str:
        return said(self, str)


def joined(settings: Iterable[Setting], word: str) -> Wording:
    """Several options, with a word such as "and" between them."""
    text = Wording(())
    for index, each in enumerate(settings):
        text += each if index == 0 else f" {word} " + each
    return text


def one_of(values: Sequence[object]) -> str:
    """Several values to choose from, such as "2, 4 or 8"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def said(text: str | Wording, say: Callable[[Setting], str]) -> str:
    """A text with its options in the words of a place."""
    if isinstance(text, str):
        return text
    return "".join(part if isinstance(part, str) else say(part) for part in text.parts)


def shown(value: object) -> str:
    """A value as messages show it, in a few words whatever it is."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
