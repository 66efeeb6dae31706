"""JSON Schemas of requests, read as other servers read them, and what the arguments of functions must be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from edgeinfer.core.errors import GrammarError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.core.records import dataclass
from edgeinfer.runtime.sampling.grammar import fault
from edgeinfer.runtime.sampling.grammar_source import grammar_source, in_words, json_rule

# With one of these keywords, an object may have more than the listed properties.
_OPENING = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties", "allOf", "anyOf", "oneOf",
    "$ref",
)  # fmt: skip
_IDLE: Mapping[str, Any] = {"minProperties": 0, "allOf": [], "patternProperties": {}}
_MAPS = ("properties", "$defs", "definitions")
# Keywords that may accompany a reference that is followed here.
_ALLOWED = frozenset({"$ref", "title", "description", "default", "examples"})
# Alternatives are compared in pairs, value by value; a million comparisons take a third of a second.
_MOST_HOPS, _MOST_STEPS = 8, 1_000_000
_RECENT = ("https://json-schema.org/draft/2020-12/", "https://json-schema.org/draft/2019-09/")
_LISTS = ("anyOf", "oneOf", "prefixItems")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with `additionalProperties: false` for objects that list their properties, unless it allows others.

    By the standard others are allowed, and small models invent one after another; llama.cpp's server and Ollama close
    objects too. Every document of the result matches the schema. A schema whose parts define an object together is
    left as it is, as is one with a `oneOf` where closing could make a document match one alternative instead of two.
    """
    return dict(schema) if _combines(schema) or _blurs(schema) else dict(_closed(schema))


def _combines(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_combines, value))
    if not isinstance(value, Mapping):
        return False
    several = isinstance(value.get("allOf"), list) and len(value["allOf"]) > 1
    combined = _says(value, "properties") and any(_says(value, word) for word in ("allOf", "anyOf", "oneOf", "$ref"))
    return several or combined or any(map(_combines, value.values()))


def _says(schema: Mapping[str, Any], keyword: str) -> bool:
    """Whether a schema has a keyword with a value that has an effect."""
    value = schema.get(keyword)
    return value is not None and not (keyword in _IDLE and value == _IDLE[keyword])


def _closed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, Mapping):
            made[keyword] = {name: _closed(each) for name, each in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            made[keyword] = list(map(_closed, value))
        else:
            made[keyword] = _closed(value) if keyword == "items" else value
    named, required = made.get("properties"), made.get("required") or []
    if (
        not isinstance(named, dict)
        or not isinstance(required, list)
        or any(_says(made, keyword) for keyword in _OPENING)
    ):
        return made
    if all(name in named for name in required if isinstance(name, str)):
        made["additionalProperties"] = False
    return made


def _blurs(schema: Mapping[str, Any]) -> bool:
    """Whether closing may change which documents match exactly one alternative of a `oneOf`."""
    found = [part["oneOf"] for part in _parts(schema) if isinstance(part.get("oneOf"), list)]
    if found and "$schema" in schema and not str(schema["$schema"]).startswith(_RECENT):
        # Older drafts lack keywords that distinguish alternatives here.
        return True
    followed = [[_target(each, schema) for each in alternatives] for alternatives in found]
    sizes: dict[int, int] = {}  # of targets that several references share
    steps = 0
    for targets in followed:
        for each in targets:
            if id(each) not in sizes:
                sizes[id(each)] = sum(1 for _ in _values_in(each))
        steps += sum(sizes[id(each)] for each in targets) ** 2
    if steps > _MOST_STEPS:
        return True
    pairs = (permutations(list(map(_Alternative.of, targets)), 2) for targets in followed)
    return any(two.closes and not one.excludes(two) for each in pairs for one, two in each)


def _values_in(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        yield part
        if isinstance(part, Mapping):
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """The objects among them."""
    return (part for part in _values_in(value) if isinstance(part, Mapping))


def _target(schema: Any, root: Mapping[str, Any]) -> Any:
    """The target of a reference to `$defs` that only annotations accompany; other schemas as they are."""
    for _ in range(_MOST_HOPS):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            break
        start, _, name = reference.rpartition("/")
        parts = root.get(start.removeprefix("#/"))
        if not schema.keys() <= _ALLOWED or not isinstance(parts, Mapping) or name not in parts:
            break
        schema = parts[name]
    return schema


@dataclass(frozen=True)
class _Alternative:
    """The properties that distinguish an alternative of a `oneOf`."""

    closes: bool  # whether closing may reduce its documents
    types: frozenset[str] = frozenset()  # allowed types; empty where it does not say, or refers to another schema
    # Allowed values by property; empty for any value, None where it lists no properties.
    listed: Mapping[str, list[Any]] | None = None
    required: frozenset[str] = frozenset()  # required properties
    ends: bool = False  # whether it allows only the listed properties, once it is closed

    @classmethod
    def of(cls, schema: Any) -> _Alternative:
        closes = any("properties" in part or "$ref" in part for part in _parts(schema))
        if not isinstance(schema, Mapping) or "$ref" in schema:
            return cls(closes)
        named, made = schema.get("properties"), _closed(schema)
        listed = {name: _values(each) for name, each in named.items()} if isinstance(named, Mapping) else None
        required = frozenset(name for name in _listed(schema.get("required")) if isinstance(name, str))
        ends = made.get("additionalProperties") is False and "patternProperties" not in made
        return cls(closes, frozenset(_types(schema)), listed, required, ends)

    def excludes(self, other: _Alternative) -> bool:
        """Whether certainly no document of this schema, once closed, matches another that is not."""
        if self.types and other.types and self.types.isdisjoint(other.types):
            return True
        if {"object"} not in (self.types, other.types) or self.listed is None:
            return False
        if self.ends and not other.required <= self.listed.keys():
            return True
        if other.listed is None:
            return False
        certain = (self.required | other.required) & self.listed.keys() & other.listed.keys()
        pairs = ((self.listed[name], other.listed[name]) for name in certain)
        return any(one and two and not any(value in two for value in one) for one, two in pairs)


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema allows, with integers as numbers; empty where it does not say."""
    return {"number" if name == "integer" else name for name in _listed(schema.get("type")) if isinstance(name, str)}


def _values(schema: Any) -> list[Any]:
    """The values that a schema lists; empty where it lists none."""
    if not isinstance(schema, Mapping):
        return []
    return [schema["const"]] if "const" in schema else _listed(schema.get("enum"))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


# Keywords that the engine follows in some schemas and not in others, depending on their neighbours.
_DELICATE: tuple[str, ...] = ("oneOf", "minProperties", "maxProperties", "patternProperties", "pattern", "format")
_DELICATE += ("multipleOf", "minLength", "maxLength", "minItems", "maxItems")
_WHOLE = "the schema"  # named where all of it is left out


@dataclass(frozen=True)
class ArgumentRules:
    """Grammar rules for the arguments of functions, in their order."""

    rules: tuple[str, ...]
    left_out: tuple[str, ...]  # constraints that the rules do not enforce, such as "uniqueItems of the tool set_tags"


def argument_rules(
    functions: Iterable[tuple[str, bool, Mapping[str, Any]]], free: Mapping[str, Any] = {"type": "object"}
) -> ArgumentRules:
    """The rules of functions given as name, strictness and schema of the arguments, or of one of them. May take
    seconds. OpenAI's and Anthropic's servers accept any schema for a function that is not strict. A schema that cannot
    be followed therefore loses the keywords at fault, or else is `free`, instead of being refused."""
    every = [_Arguments(*function, free) for function in functions]
    if fault(_grammar(every)):
        for each in every:
            each.loosen_while_faulty()
    if fault(_grammar(every)):  # all of them are too much
        for each in every:
            each.free()
    named = [f"{word} of the tool {each.name}" for each in every for word in sorted(each.left_out)]
    return ArgumentRules(tuple(each.rule for each in every), tuple(named))


class _Arguments:
    """The arguments of one function, by the strictest rule that can be followed."""

    def __init__(self, name: str, strict: bool, schema: Mapping[str, Any], free: Mapping[str, Any]) -> None:
        self.name, self._strict, self._schema, self._free = name, strict, schema, free
        self.left_out: set[str] = set()
        try:
            self.rule = json_rule(schema)
        except GrammarError as error:
            if strict:
                raise GrammarError(f"{error.message[:-1]} in the strict tool {name}.", error.hint) from error
            self._loosen(schema)

    def loosen_while_faulty(self) -> None:
        """Leave out more and more, up to all, until the engine can follow the rest."""
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
        """Allow anything, unless the function is strict."""
        if not self._strict:
            self.rule, self.left_out = json_rule(self._free), {_WHOLE}

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
    """A grammar that matches the arguments of any of these functions."""
    start = " | ".join(f'"{place} " args_{place}' for place in range(len(every)))
    rules = [f"start: {start}", *(f"args_{place}: {each.rule}" for place, each in enumerate(every))]
    return grammar_source(ReplyOptions(grammar="\n".join(rules))) or ""


def _coarse(schema: Any, words: Collection[str], found: set[str], *, of_names: bool = False) -> Any:
    """A schema without some keywords, and with `anyOf` for `oneOf`; adds those it had to `found`."""
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
