"""What arguments of functions must be: their schemas, without what cannot be followed where a function need not be
strict."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from edgeinfer.config import GenerationConfig
from edgeinfer.errors import GrammarError
from edgeinfer.records import dataclass
from edgeinfer.runtime.sampling.grammar import fault
from edgeinfer.runtime.sampling.grammar_source import grammar_source, in_words, json_rule

# Demands that the engine follows in some schemas and not in others, by what stands next to them.
_DELICATE: tuple[str, ...] = ("oneOf", "minProperties", "maxProperties", "patternProperties", "pattern", "format")
_DELICATE += ("multipleOf", "minLength", "maxLength", "minItems", "maxItems")
_WHOLE = "the schema"  # that was left out


@dataclass(frozen=True)
class ArgumentRules:
    """Of each of some functions, what its arguments are in a grammar.

    Attributes:
        rules: of the functions, in order.
        left_out: what the rules do not hold arguments to, such as "uniqueItems of the tool set_tags".
    """

    rules: tuple[str, ...]
    left_out: tuple[str, ...]


def argument_rules(functions: Iterable[tuple[str, bool, Mapping[str, Any]]]) -> ArgumentRules:
    """The rules of functions, each given by its name, whether it is strict, and the schema of its arguments. May take
    seconds.

    OpenAI's and Anthropic's servers take any schema of a function that is not strict, so that one which cannot be
    followed is no reason to refuse a request: it loses the keywords at fault, or else all.
    """
    every = [_Arguments(*function) for function in functions]
    if fault(_grammar(every)):
        for each in every:
            each.loosen_while_faulty()
    if fault(_grammar(every)):  # all of them are too much
        for each in every:
            each.free()
    named = [f"{word} of the tool {each.name}" for each in every for word in sorted(each.left_out)]
    return ArgumentRules(tuple(each.rule for each in every), tuple(named))


class _Arguments:
    """Those of one function, by the strictest rule that can be followed."""

    def __init__(self, name: str, strict: bool, schema: Mapping[str, Any]) -> None:
        self.name, self._strict, self._schema = name, strict, schema
        self.left_out: set[str] = set()
        try:
            self.rule = json_rule(schema)
        except GrammarError as error:
            if strict:
                raise GrammarError(f"{error.message[:-1]} in the strict tool {name}.", error.hint) from error
            self._loosen(schema)

    def loosen_while_faulty(self) -> None:
        """Leaves out more and more, up to all, until the engine follows the rest."""
        wrong = fault(_grammar([self]))
        if wrong and self._strict:
            message = f"The schema of the strict tool {self.name} cannot be used: {in_words(wrong)}."
            raise GrammarError(message, "Change that part, or do not ask for a strict tool.")
        steps = iter(
            (lambda: self._coarsen(()), lambda: self._coarsen(("oneOf",)), lambda: self._coarsen(_DELICATE), self.free)
        )
        while wrong and (step := next(steps, None)):
            step()
            wrong = fault(_grammar([self]))

    def free(self) -> None:
        """Holds arguments to nothing but JSON's object, unless the function is strict."""
        if not self._strict:
            self.rule, self.left_out = json_rule({"type": "object"}), {_WHOLE}

    def _loosen(self, schema: Any, also: Iterable[str] = ()) -> None:
        left_out = set(also)
        try:
            self.rule = json_rule(schema, left_out)
        except GrammarError:
            self.free()
        else:
            self.left_out = left_out

    def _coarsen(self, words: Collection[str]) -> None:
        found: set[str] = set()
        self._loosen(_coarse(self._schema, words, found), found)


def _grammar(every: Sequence[_Arguments]) -> str:
    """A grammar of the arguments of one of some functions."""
    start = " | ".join(f'"{place} " args_{place}' for place in range(len(every)))
    rules = [f"start: {start}", *(f"args_{place}: {each.rule}" for place, each in enumerate(every))]
    return grammar_source(GenerationConfig(grammar="\n".join(rules))) or ""


def _coarse(schema: Any, words: Collection[str], found: set[str], *, of_names: bool = False) -> Any:
    """A schema without some keywords, `anyOf` for `oneOf`; `found` is given those that it had."""
    if isinstance(schema, list):
        return [_coarse(each, words, found) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for word, value in schema.items():
        if not of_names and word in words:
            found.add(word)
            if word == "oneOf" and "anyOf" not in schema:
                made["anyOf"] = _coarse(value, words, found)
        elif not of_names and word in ("const", "enum", "default", "examples"):
            made[word] = value
        elif of_names or word != "additionalProperties" or not {"patternProperties"} <= {*words} & schema.keys():
            names = not of_names and word in ("properties", "patternProperties", "$defs", "definitions")
            made[word] = _coarse(value, words, found, of_names=names)
    return made
