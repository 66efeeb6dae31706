"""What a caller may ask of the form of a reply, as source for the grammar engine, and what is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from edgeinfer.core.errors import GrammarError
from edgeinfer.core.options.reply import ReplyOptions
from edgeinfer.runtime.sampling.grammar_schema import has_open_escapes, mended
from edgeinfer.runtime.sampling.grammar_tokens import engine

MAX_SOURCE = 2**20  # characters of a schema, an expression or a grammar
_MAX_REGEX = 4096  # the engine's time and memory grow with its square
_MAX_GBNF = 2**16
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_MAX_DEPTH = 100  # of a schema's own text; llguidance's parser stops at 128
_MESSAGE = 300
# Last, because the last one counts: where a text is certain, its spelling in tokens is still the model's choice.
_DIRECTIVE = '\n%llguidance {"no_forcing": true}\n'
# Without \u, by which names of properties have a second spelling, and otherwise only control characters are written.
_STRICT = {"lenient": False, "json_allowed_escapes": 'nrbtf\\"'}
_ALL_ESCAPES = 'nrbtf\\"u'
# Blanks as json.dumps writes them, which is what models see most. Where there is a choice, small models go on writing
# blanks until the reply is cut off.
_SCHEMA_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "} | _STRICT
_QUOTED = re.compile(r"^ *\d+ \| ", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*?)\]")
_REGEX_ERROR = re.compile(r"regex parse error:.*?error: ([^\n]*)", re.DOTALL)
# What the engine advises is for its own callers.
_ADVICE = ". Enable 'coerce_one_of'"
_TOO_MUCH = re.compile(r"fuel exhausted|lexer precomputation failed")
_OF_KEYWORD = (("Pointer", "$ref"), ("Resource", "$ref"), ("Unknown format", "format"), ("regex parse", "pattern"))


def grammar_source(config: ReplyOptions) -> str | None:
    """The engine's source of the form that a reply must have; None where there is none, or a list of choices."""
    if config.json_schema is not None:
        return f"start: {json_rule(config.json_schema)}{_DIRECTIVE}"
    if config.json_object:
        return f"start: {json_rule({'type': 'object'})}{_DIRECTIVE}"
    if config.regex is not None:
        _check_size("regex", config.regex, _MAX_REGEX)
        grammars = json.loads(engine().LLMatcher.grammar_from_regex(config.regex))["grammars"]
        return str(grammars[0]["lark_grammar"]) + _DIRECTIVE
    if config.grammar is not None:
        _check_size("grammar", config.grammar, MAX_SOURCE)
        return _as_lark(config.grammar) + _DIRECTIVE
    return None


def _as_lark(grammar: str) -> str:
    """Translate llama.cpp's notation, GBNF, to Lark's."""
    if _GBNF_RULE.search(grammar) is None:
        return grammar
    _check_size("grammar", grammar, _MAX_GBNF)
    engine()
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(grammar))
    except Exception as error:  # of whatever kind: it is the text's fault
        reason = _clipped(" ".join(str(error).split()))
        message = f"The grammar is not valid GBNF: {reason}."
        raise GrammarError(message, "Correct it, or write it in Lark's notation.") from error


def json_rule(schema: Mapping[str, Any] | str, left_out: set[str] | None = None) -> str:
    """A grammar's rule for documents of a JSON Schema, with the blanks of json.dumps; `left_out` as in `mended`."""
    if isinstance(schema, str):
        _check_size("json_schema", schema, MAX_SOURCE)
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"json_schema is not JSON: {error}.", "Give a JSON Schema, an object.") from error
    if not isinstance(schema, Mapping):
        raise GrammarError("json_schema is not an object.", "Give a JSON Schema such as {'type': 'object'}.")
    _check_depth(schema)
    try:
        whole = mended(schema, left_out)
        options = _SCHEMA_OPTIONS | ({"json_allowed_escapes": _ALL_ESCAPES} if has_open_escapes(whole) else {})
        text = json.dumps({**whole, "x-guidance": options}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json_schema cannot be written as JSON: {error}.", "Give plain values.") from error
    _check_size("json_schema", text, MAX_SOURCE)
    return f"%json {text}"


def in_words(message: str) -> str:
    """Put the engine's message in one line, with the schema's keyword at fault if it is known."""
    quoted = _QUOTED.search(message)
    text = message[: quoted.start()] if quoted else message
    place = _PLACE.match(text)
    text = _PLACE.sub("", text)
    about_schema = "failed to compile JSON schema: " in text
    text = text.replace("failed to compile JSON schema: ", "").replace("<non-verbose/>", "")
    unimplemented = _UNIMPLEMENTED.search(text)
    if unimplemented:
        return f"{_clipped(unimplemented.group(1).replace(chr(34), ''))} is not supported"
    if _TOO_MUCH.search(text):
        return "it takes too much to compile"
    text = text.partition(_ADVICE)[0]
    text = " ".join(_REGEX_ERROR.sub(r"regex parse error: \1", text).split())
    if about_schema:
        keyword = next((keyword for start, keyword in _OF_KEYWORD if text.startswith(start)), None)
        return _clipped(text if keyword is None else f"{keyword}: {text}")
    # The place is of use in a grammar of several lines.
    return _clipped(f"line {place.group(1)}, column {place.group(2)}: {text}" if place else text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _check_size(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise GrammarError(f"{name} has {len(text)} characters.", f"The limit is {limit}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise GrammarError(f"{name} is not valid Unicode.", "It holds a lone surrogate.") from error


def _check_depth(schema: Mapping[str, Any]) -> None:
    """Check level by level, so that neither depth nor a mapping inside itself exhausts anything."""
    level: list[Any] = [schema]
    values = 0
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                below.extend(value.values())
            elif isinstance(value, list | tuple):
                below.extend(value)
        values += len(below)
        if values > MAX_SOURCE:
            raise GrammarError("json_schema is too large.", f"The limit is {MAX_SOURCE} characters.")
        if not below:
            return
        level = below
    raise GrammarError(f"json_schema nests deeper than {_MAX_DEPTH}.", "Move inner schemas to $defs.")


def _clipped(text: str) -> str:
    return text if len(text) <= _MESSAGE else text[: _MESSAGE - 3] + "..."
