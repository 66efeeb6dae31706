"""Grammars of replies that may hold calls: free text up to a call's marker, from there on only valid calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeinfer.core.records import dataclass
from edgeinfer.openai.dialects import Kind, ToolFormat, bare, bare_key, kind_of, python_keywords, tag_key, target
from edgeinfer.openai.schemas import argument_rules, closed
from edgeinfer.runtime.sampling.grammar_source import json_rule

_ANY = "/(?s:.*)/"
_MOST_HOPS = 8


@dataclass(frozen=True)
class OfferedFunction:
    """What a grammar needs to know of a function."""

    name: str
    strict: bool
    schema: Mapping[str, Any]  # of its arguments


@dataclass(frozen=True)
class CallRules:
    """Rules for the arguments of functions in one style, and what of their schemas these rules leave out."""

    lines: tuple[str, ...]
    left_out: tuple[str, ...]


def calls_grammar(
    form: ToolFormat,
    functions: Sequence[OfferedFunction],
    *,
    required: bool,
    several: bool,
    tokens: Mapping[int, str] | None = None,
    free_tokens: Sequence[int] = (),
    content: Mapping[str, Any] | None = None,
) -> tuple[str, tuple[str, ...]]:
    """A grammar in Lark's notation, and what of the functions' schemas it leaves out.

    Args:
        several: whether there may be more than one call.
        tokens: tags of the form that are special tokens, which no text spells, by id.
        free_tokens: further special tokens that free text may hold.
        content: a JSON Schema that a reply without calls must follow.
    """
    by_text = {text: id_ for id_, text in (tokens or {}).items()}
    made: dict[tuple[str, ...], tuple[CallRules, list[str]]] = {}
    makers = []
    for place, each in enumerate((form,) if required or content is not None else form.family):
        style = (each.style, each.parameter, each.quote)
        if style not in made:
            made[style] = _argument_rules(each, f"f{place}", functions, lambda text: _lark(text, by_text))
        makers.append(_FormRules(each, f"f{place}", functions, made[style][1], several, by_text))
    first, left_out = makers[0], next(iter(made.values()))[0].left_out
    if required:
        start = [f"start: {first.whole}"]
    elif content is not None:
        start = [f"start: content | {first.whole}", f"content: {json_rule(content)}"]
    else:
        start = _free(makers, by_text, free_tokens)
    lines = [line for maker in makers for line in maker.lines]
    arguments = [line for rules, _ in made.values() for line in rules.lines]
    return "\n".join([*start, *lines, *arguments]), left_out


def _free(makers: Sequence[_FormRules], by_text: Mapping[str, int], free_tokens: Sequence[int]) -> list[str]:
    """Free text, or text and calls behind it."""
    ways, rules, never = ["text"], list[str](), list[str]()
    whole: set[int] = set()  # tokens that always begin calls
    for maker in makers:
        for marker, rest in maker.started:
            token = next((text for text in by_text if marker.startswith(text)), None)
            if token is not None:
                behind = marker[len(token) :]
                whole |= set() if behind else {by_text[token]}
                never += [behind] if behind else []
                ways.append(f"FREE {_lark(marker, by_text)} {rest}")
            elif maker.form.anywhere:
                name = f"before{len(rules)}"
                rules.append(f"{name}[suffix={json.dumps(marker)}]: FREE")
                ways.append(f"{name} {rest}")
            else:
                never.append(marker)
                ways.append(f"{json.dumps(marker)} {rest}")
    special = sorted({*free_tokens, *by_text.values()} - whole)
    free = _ANY + "".join(f" & ~/{_escaped(text)}(?s:.*)/" for text in never)
    start = f"start: {'pre ' if special else ''}({' | '.join(ways)})"
    named = [f"pre: (FREE <[{','.join(map(str, special))}]>)*"] if special else []
    return [start, *named, "text: FREE", f"FREE: {free}", *rules]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n").replace(r"\ ", " ")


def _lark(text: str, tokens: Mapping[str, int], id_length: int = 0) -> str:
    """A text as terminals: special tokens, holes and what lies between."""
    pattern = "|".join([r"\{index\}", r"\{id\}", *map(re.escape, tokens)])
    made = []
    for part in re.split(f"({pattern})", text):
        if part in tokens:
            made.append(f"<[{tokens[part]}]>")
        elif part == "{index}":
            made.append("/[0-9]{1,3}/")
        elif part == "{id}":
            made.append(f"/[A-Za-z0-9]{{{id_length or 9}}}/")
        elif part:
            made.append(json.dumps(part))
    return " ".join(made)


class _FormRules:
    """The rules of one form, with names that begin with `prefix`."""

    def __init__(
        self,
        form: ToolFormat,
        prefix: str,
        functions: Sequence[OfferedFunction],
        arguments: Sequence[str],
        several: bool,
        tokens: Mapping[str, int],
    ) -> None:
        self.form, self._tokens = form, tokens
        names = [function.name for function in functions]
        head, middle, tail = form.parts
        tail = "" if form.ends_turn else tail
        before, after = form.ends
        more = f"{prefix}_call*" if several and form.several else ""
        behind = " ".join(filter(None, [more, self._spelled(after)]))
        heads = [head + name + middle for name in names]

        def calls(texts: Sequence[str]) -> str:
            ways = [(self._spelled(text), place) for place, text in enumerate(texts)]
            return " | ".join(" ".join(filter(None, [text, arguments[at], self._spelled(tail)])) for text, at in ways)

        self.whole = f"{prefix}_first {behind}"
        self.lines = [
            f"{prefix}_first: {calls([before + each for each in heads])}",
            f"{prefix}_call: {calls([form.between + each for each in heads])}",
        ]
        # What follows a marker where free text may come before it.
        self.started: list[tuple[str, str]] = []
        markers = form.markers(names)
        if len(markers) == 1 and "{name}" not in form.opening:
            rests = [(before + each)[len(markers[0]) :] for each in heads]
            self.lines.append(f"{prefix}_rest: {calls(rests)}")
            self.started.append((markers[0], f"{prefix}_rest {behind}"))
            return
        for place, marker in enumerate(markers):
            rest = self._spelled((before + heads[place])[len(marker) :])
            parts = [rest, arguments[place], self._spelled(tail)]
            self.lines.append(f"{prefix}_rest{place}: {' '.join(filter(None, parts))}")
            self.started.append((marker, f"{prefix}_rest{place} {behind}"))

    def _spelled(self, text: str) -> str:
        return _lark(text, self._tokens, self.form.id_length)


def _argument_rules(
    form: ToolFormat, prefix: str, functions: Sequence[OfferedFunction], lark: Callable[[str], str]
) -> tuple[CallRules, list[str]]:
    """Rules, and the name of each function's."""
    if form.style == "json":
        made = argument_rules((each.name, each.strict, closed(each.schema)) for each in functions)
        lines = [f"args_{place}: {rule}" for place, rule in enumerate(made.rules)]
        return CallRules(tuple(lines), made.left_out), [f"args_{place}" for place in range(len(functions))]
    maker = _BareRules(form, lark) if form.style == "bare" else _ParameterRules(form, lark)
    names = [maker.function(f"{prefix}_args_{place}", each) for place, each in enumerate(functions)]
    return maker.finished(), names


@dataclass(frozen=True)
class _Parameter:
    key: str
    schema: Any
    required: bool


def _parameters(schema: Mapping[str, Any]) -> list[_Parameter] | None:
    """The parameters of a function's schema; None where they are not simply listed."""
    properties = schema.get("properties", {})
    needed = schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(needed, list):
        return None
    if any(word in schema for word in ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "not")):
        return None
    if schema.get("additionalProperties") or any(key not in properties for key in needed):
        return None
    return [_Parameter(key, each, key in needed) for key, each in properties.items()]


def _sequence(name: str, parts: Sequence[tuple[str, bool]], between: str) -> list[str]:
    """Rules for parts in their order, each with whether it is required, with a text in between."""
    separator = f"{json.dumps(between)} " if between else ""
    lines = []
    for place in range(len(parts) + 1):
        ended = place == len(parts)
        part, needed = ("", True) if ended else parts[place]
        following, first = f"{name}_{place + 1}", f"{name}_{place + 1}_first"
        later = '""' if ended else f"{separator}{part} {following}" + ("" if needed else f" | {following}")
        lines.append(f"{name}_{place}: {later}")
        if separator:
            started = '""' if ended else f"{part} {following}" + ("" if needed else f" | {first}")
            lines.append(f"{name}_{place}_first: {started}")
    return lines


class _ParameterRules:
    """Arguments as parameters in tags, or as Python's keywords."""

    def __init__(self, form: ToolFormat, lark: Callable[[str], str]) -> None:
        self._form, self._lark = form, lark
        self._lines: list[str] = []
        self._values: list[tuple[str, bool, Mapping[str, Any]]] = []  # those that are JSON
        self._left_out: list[str] = []

    def function(self, name: str, function: OfferedFunction) -> str:
        parameters = _parameters(function.schema)
        if parameters is None:
            self._left_out.append(f"the schema of the tool {function.name}")
            self._free(name)
            return name
        parts = []
        for place, each in enumerate(parameters):
            rule = f"{name}_p{place}"
            self._lines += self._parameter(rule, each, function)
            parts.append((rule, each.required))
        python = self._form.style == "python"
        self._lines += _sequence(name, parts, ", " if python else "")
        return f"{name}_0_first" if python else f"{name}_0"

    def finished(self) -> CallRules:
        made = argument_rules(self._values, free={})
        lines = [f"{self._value(place)}: {rule}" for place, rule in enumerate(made.rules)]
        return CallRules((*self._lines, *lines), (*self._left_out, *made.left_out))

    def _value(self, place: int) -> str:
        kind = "python" if self._form.style == "python" else re.sub(r"\W", "", self._form.name)
        return f"{kind}_value_{place}"

    def _json(self, function: OfferedFunction, schema: Any) -> str:
        """The rule of a value as JSON."""
        shared = {word: function.schema[word] for word in ("$defs", "definitions") if word in function.schema}
        whole = {**shared, **closed(schema)} if isinstance(schema, Mapping) else {}
        self._values.append((function.name, function.strict, whole))
        return self._value(len(self._values) - 1)

    def _parameter(self, rule: str, parameter: _Parameter, function: OfferedFunction) -> list[str]:
        kind = kind_of(parameter.schema, function.schema)
        if self._form.style == "python":
            value = _python_choices(parameter.schema) or self._json(function, parameter.schema)
            return (
                [f"{rule}: {self._lark(f'{parameter.key}=')} ({value})"]
                if parameter.key.isidentifier()
                else [f"{rule}: {json.dumps('**{' + json.dumps(parameter.key) + ': ')} ({value}) {json.dumps('}')}"]
            )
        return self._tagged(rule, parameter, kind, function)

    def _tagged(self, rule: str, parameter: _Parameter, kind: Kind, function: OfferedFunction) -> list[str]:
        head, middle, tail = self._form.tags
        if "{kind}" in middle and kind == "either":
            kind = "text"
        middle = middle.replace("{kind}", str(kind == "text").lower())
        key = tag_key(parameter.key)
        before = self._lark(head + key + middle)
        choices = _texts(parameter.schema, function.schema) if kind == "text" else None
        if choices:
            ways = " | ".join(json.dumps(choice) for choice in choices)
            return [f"{rule}: {before} ({ways}) {self._lark(tail)}"]
        if kind == "value":
            return [f"{rule}: {before} {self._json(function, parameter.schema)} {self._lark(tail)}"]
        self._left_out += _unheld(parameter.schema, function.name)
        return [f"{rule}: {before} {rule}_text {self._rest(tail)}".rstrip(), self._text(f"{rule}_text", tail)]

    def _text(self, name: str, tail: str) -> str:
        end = tail.rstrip()
        token = self._lark(end)
        if token.startswith("<["):
            return f"{name}: {_ANY} {token}"
        return f"{name}[suffix={json.dumps(end)}]: {_ANY}"

    def _rest(self, tail: str) -> str:
        return self._lark(tail[len(tail.rstrip()) :])

    def _free(self, name: str) -> None:
        """Any arguments."""
        if self._form.style == "python":
            self._lines.append(f'{name}: ({name}_p (", " {name}_p)*)?')
            self._lines.append(f'{name}_p: /[A-Za-z_][A-Za-z0-9_]*/ "=" {name}_value')
            self._lines.append(f"{name}_value: {json_rule({})}")
            return
        head, middle, tail = self._form.tags
        middle = middle.replace("{kind}", "true")
        self._lines.append(f"{name}: {name}_p*")
        parts = [self._lark(head), r"/[^<>\"\n]+/", self._lark(middle), f"{name}_text", self._rest(tail)]
        self._lines.append(f"{name}_p: {' '.join(filter(None, parts))}")
        self._lines.append(self._text(f"{name}_text", tail))


def _python_choices(schema: Any) -> str | None:
    """The values of a schema that lists them or has few, as Python writes them."""
    if not isinstance(schema, Mapping):
        return None
    values = schema.get("enum", [True, False] if schema.get("type") == "boolean" else None)
    if not isinstance(values, list) or not values:
        return None
    return " | ".join(json.dumps(python_keywords({"a": value})[2:]) for value in values)


def _texts(schema: Any, root: Mapping[str, Any]) -> list[str] | None:
    """The texts that a schema lists; None where it lists none."""
    for _ in range(_MOST_HOPS):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            break
        schema = target(str(schema["$ref"]), root)
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None


# What a text between tags or quotes is not waiting to.
_UNHELD = ("pattern", "format", "minLength", "maxLength")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _unheld(schema: Any, name: str) -> list[str]:
    words = [word for word in _UNHELD if isinstance(schema, Mapping) and word in schema]
    return [f"{word} of the tool {name}" for word in words]


class _BareRules:
    """Arguments as an object of bare keys."""

    def __init__(self, form: ToolFormat, lark: Callable[[str], str]) -> None:
        self._form = form
        self._quote = lark(form.quote)
        self._lines: list[str] = []
        self._left_out: dict[str, None] = {}
        self._made = 0
        end = f"{_ANY} {self._quote}" if self._quote.startswith("<[") else ""
        text = f"bare_text: {end}" if end else f"bare_text[suffix={json.dumps(form.quote)}]: {_ANY}"
        pair = r'bare_pair: /[A-Za-z0-9_$.\-]+/ ":" bare_any'
        self._shared = [
            f"bare_string: {self._quote} bare_text",
            text,
            r"bare_number: /-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?/",
            "bare_integer: /-?(0|[1-9][0-9]{0,15})/",
            'bare_any: bare_string | bare_number | "true" | "false" | "null" | bare_array | bare_object',
            'bare_array: "[" (bare_any ("," bare_any)*)? "]"',
            'bare_object: "{" (bare_pair ("," bare_pair)*)? "}"',
            pair,
        ]

    def function(self, name: str, function: OfferedFunction) -> str:
        return self._rule(function.schema, function.schema, function.name, _MOST_HOPS)

    def finished(self) -> CallRules:
        return CallRules((*self._lines, *self._shared), tuple(self._left_out))

    def _rule(self, schema: Any, root: Mapping[str, Any], function: str, hops: int) -> str:
        if not isinstance(schema, Mapping) or not hops:
            return "bare_any"
        if isinstance(schema.get("$ref"), str):
            return self._rule(target(schema["$ref"], root), root, function, hops - 1)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list) and values:
            return f"({' | '.join(self._constant(value) for value in values)})"
        kind = schema.get("type")
        if isinstance(kind, list):
            return f"({' | '.join(self._rule({**schema, 'type': each}, root, function, hops - 1) for each in kind)})"
        self._left_out |= dict.fromkeys(_unheld(schema, function))
        simple = {"string": "bare_string", "integer": "bare_integer", "number": "bare_number", "null": '"null"'}
        bounds = {word: schema[word] for word in _BOUNDS if word in schema}
        if bounds and kind in ("integer", "number"):
            self._made += 1
            self._lines.append(f"bare_number_{self._made}: {json_rule({'type': kind, **bounds})}")
            return f"bare_number_{self._made}"
        if kind in simple:
            return simple[kind]
        if kind == "boolean":
            return '("true" | "false")'
        if kind == "array":
            inner = self._rule(schema.get("items"), root, function, hops - 1)
            return f'("[" ({inner} ("," {inner})*)? "]")'
        parameters = _parameters(schema) if kind == "object" and "properties" in schema else None
        if kind == "object":
            return "bare_object" if parameters is None else self._object(parameters, root, function, hops)
        return "bare_any"

    def _object(self, parameters: Sequence[_Parameter], root: Mapping[str, Any], function: str, hops: int) -> str:
        self._made += 1
        name, parts = f"bare_object_{self._made}", list[tuple[str, bool]]()
        # As templates of these models sort them.
        for each in sorted(parameters, key=lambda each: each.key):
            rule = f"{name}_p{len(parts)}"
            key = json.dumps(bare_key(each.key) + ":")
            self._lines.append(f"{rule}: {key} {self._rule(each.schema, root, function, hops - 1)}")
            parts.append((rule, each.required))
        self._lines += [f'{name}: "{{" {name}_0_first "}}"', *_sequence(name, parts, ",")]
        return name

    def _constant(self, value: Any) -> str:
        if isinstance(value, str) and self._form.quote not in value:
            return " ".join(filter(None, [self._quote, json.dumps(value) if value else "", self._quote]))
        return json.dumps(bare(value, self._form.quote))
