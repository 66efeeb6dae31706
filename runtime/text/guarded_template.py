"""Renders conversations so that the marks which the template wrote are known.

A conversation is rendered as it is, and where its data could have a part in a mark, once more with stand-ins
(`control_marks`). Both texts are the same unless the template looks at the characters that were stood for; those in
constants that templates look for, such as "</think>", are therefore left as they are where they can do no harm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

from edgeinfer.records import dataclass
from edgeinfer.runtime.text.control_marks import ControlMarks, Stand, mapped, strings_in
from edgeinfer.runtime.text.template import ChatTemplate

# Templates write them between pieces of marks.
_ROLES = frozenset(
    ("system", "developer", "user", "human", "assistant", "model", "bot", "tool", "function", "ipython", "environment",
     "observation", "context", "documents", "text")
)  # fmt: skip
# Keys that every template is given, by these names.
_KEYS = frozenset({"role", "content", "type", "text", "tool_calls"})
# Constants that are looked for in data: more, or longer ones, are no chat template's.
_MOST_CONSTANTS, _LONGEST_CONSTANT = 200, 200


@dataclass(frozen=True)
class GuardedTemplate:
    """A chat template beside the marks of the tokenizer that its text is for.

    Attributes:
        template: renders.
        marks: that its data must not write.
    """

    template: ChatTemplate
    marks: ControlMarks

    def parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        partial_reply: str = "",
    ) -> list[str]:
        """The conversation in parts of which every second one is a mark of the template's."""
        if tools and self._tool_use is not None:
            return self._tool_use.parts(messages, tools, variables, partial_reply)
        messages, tools = self.template.fitted(messages, True, tools, variables)
        plain = self.template.rendered(messages, True, tools, variables)
        given = dict(variables or {})
        found = [*strings_in((messages, tools)), ("content", partial_reply)]
        found += [each for name, value in given.items() for each in strings_in(value, name)]
        stood_for = {each: characters for each in found if (characters := self._stood_for(*each))}
        if not stood_for:
            return self.marks.split(plain + partial_reply)
        stand = Stand(set().union(*stood_for.values()), [plain, self.template.source, *(text for _, text in found)])

        def guarded(key: str | None, text: str) -> str:
            characters = stood_for.get((key, text))
            return stand.put(text, characters, self._exempt(key, text)) if characters else text

        values = {name: mapped(value, guarded, name) for name, value in given.items()}
        text = self.template.rendered(mapped(messages, guarded), True, mapped(tools, guarded), values)
        genuine = self.marks.split(text + guarded("content", partial_reply))
        parts = [stand.back(part) for part in genuine]
        if "".join(parts) == plain + partial_reply:
            return parts
        # The template did something to a character that was stood for. Where that makes no difference to the marks,
        # the text that it gives otherwise is the right one.
        as_it_is = self.marks.split(plain + partial_reply)
        return as_it_is if as_it_is[1::2] == genuine[1::2] else parts

    def _stood_for(self, key: str | None, text: str) -> Collection[str]:
        """Characters of a text of the data that need a stand-in."""
        if self._known(key, text):
            return ()
        if key == "role" or self.marks.inside(text):
            return self.marks.characters.intersection(text)
        edges = [edge for edge in self.marks.edges if edge in text]
        if not edges:
            return ()
        exempt = Counter(text[place] for place in self._exempt(key, text))
        return [edge for edge in edges if text.count(edge) > exempt[edge]]

    def _known(self, key: str | None, text: str) -> bool:
        """Whether templates expect this very word, and may make marks of it."""
        if key is None:
            return text in _KEYS or text in self._words.names
        return key in ("role", "type") and (text in _ROLES or text in self._words.constants)

    def _exempt(self, key: str | None, text: str) -> Collection[int]:
        """Places inside constants of the template that can be left as they are."""
        found: set[int] = set()
        if key == "role" or self.marks.inside(text):
            return found
        for constant, places in self._words.harmless.items():
            begin = text.find(constant)
            while begin >= 0:
                found.update(begin + place for place in places)
                begin = text.find(constant, begin + 1)
        return found

    @cached_property
    def _tool_use(self) -> GuardedTemplate | None:
        return None if self.template.tool_use is None else GuardedTemplate(self.template.tool_use, self.marks)

    @cached_property
    def _words(self) -> _Words:
        return _Words.of(self.template.source, self.marks)


@dataclass(frozen=True)
class _Words:
    """What a template's source names and looks for.

    Attributes:
        names: its identifiers, and constants: keys of data that are its own.
        constants: words in quotes; no part of a mark but what stands inside.
        harmless: texts in quotes with characters that need no stand-in, and where.
    """

    names: frozenset[str]
    constants: frozenset[str]
    harmless: Mapping[str, frozenset[int]]

    @classmethod
    def of(cls, source: str, marks: ControlMarks) -> _Words:
        import jinja2  # here by now: the template was rendered

        # Compiling it has shown that it can be read.
        tokens = list(jinja2.Environment().lex(source))
        names = {text for _, kind, text in tokens if kind == "name"}
        quoted = {_unquoted(text) for _, kind, text in tokens if kind == "string"}
        constants = {text for text in quoted if text.isidentifier() or marks.edges.isdisjoint(text)}
        short = sorted(text for text in quoted if len(text) <= _LONGEST_CONSTANT and marks.edges.intersection(text))
        places = {text: marks.harmless(text) for text in short[:_MOST_CONSTANTS]}
        harmless = {text: where for text, where in places.items() if where}
        return cls(frozenset(names | constants), frozenset(constants), harmless)


def _unquoted(text: str) -> str:
    """Reads a text in quotes as jinja2 does."""
    return text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
