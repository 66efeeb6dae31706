"""Random calls in every dialect, cut at random, and what a reader makes of them."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from typing import Any

from edgeinfer.core.results import Chunk
from edgeinfer.openai.calls import ArgumentsPiece, CallPiece, CallReader, TextPiece
from edgeinfer.openai.dialects import FORMATS, Kinds, ToolFormat

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
# What makes readers stumble: markers and quotes of every dialect, escapes, blanks, other scripts.
_PIECES = (
    "a", "Oslo", " ", "\n", "\t", '"', "'", "\\", "\\n", "{", "}", "[", "]", "(", ")", "<", ">", "=", ",", ":", "```",
    "</parameter>", "</tool_call>", "<tool_call>", "</function>", "</arg_value>", "<arg_key>", "[TOOL_CALLS]", "[ARGS]",
    "<|tool_call_end|>", "<tool_call|>", '<|"|>', "<escape>", "<｜tool▁call▁end｜>", "</｜DSML｜parameter>", "\\u003c",
    "\n</parameter>\n</function>\n</tool_call>", "</invoke>", "Ω", "日本", "🙂", "é", "\x7f", "\x00", "null", "1",
)  # fmt: skip
_NUMBERS: tuple[Any, ...] = (0, -1, 7, 2**53, 10**30, 0.5, -2.25, 1e22, 1e-7, -0.0)


def text(chance: random.Random, most: int = 6) -> str:
    return "".join(chance.choice(_PIECES) for _ in range(chance.randrange(most)))


def value(chance: random.Random, depth: int = 2) -> Any:
    kind = chance.randrange(8 if depth else 5)
    if kind < 2:
        return text(chance)
    if kind == 2:
        return chance.choice(_NUMBERS)
    if kind < 5:
        return chance.choice((True, False, None))
    if kind < 7:
        return [value(chance, depth - 1) for _ in range(chance.randrange(3))]
    return {key(chance): value(chance, depth - 1) for _ in range(chance.randrange(3))}


def word(chance: random.Random, more: str = "_") -> str:
    return chance.choice(_LETTERS[:52]) + "".join(chance.choice(_LETTERS + more) for _ in range(chance.randrange(9)))


def key(chance: random.Random) -> str:
    return word(chance) if chance.random() < 0.8 else text(chance) or "class"


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def parameters(chance: random.Random, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A schema that arguments follow; some of them are left without a type."""
    made: dict[str, Any] = {}
    for name, given in arguments.items():
        kind = _TYPES.get(type(given), "null")
        other = chance.choice([*_TYPES.values()])
        made[name] = chance.choice([{"type": kind}, {"type": kind}, {"type": [kind, other]}, {}])
    return {"type": "object", "properties": made, "required": [*made]}


def calls(chance: random.Random, most: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Calls, each with a name, arguments and the schema of its function; names differ."""
    names = {word(chance, "_-./:").rstrip(":") for _ in range(chance.randint(1, most))}
    made = []
    for name in sorted(names):
        arguments = {key(chance): value(chance) for _ in range(chance.randrange(4))}
        made.append((name, arguments, parameters(chance, arguments)))
    return made


def cuts(chance: random.Random, reply: str) -> list[str]:
    """A reply in pieces of random sizes: single characters, a few, or long runs."""
    most = chance.choice((1, 3, 12, 80))
    pieces: list[str] = []
    at = 0
    while at < len(reply):
        size = chance.randint(1, most)
        pieces.append(reply[at : at + size])
        at += size
    return pieces


TEXTS = ("", "Let me look.", "A <tag> and {braces}\n\nin  text", "1. [first](x), `code` Ω🙂")


def gathered(reader: CallReader, chunks: Iterable[Chunk]) -> tuple[str, list[tuple[str, Any]]]:
    """Text and calls of a whole reply, as a client puts them together."""
    text = ""
    calls: list[list[str]] = []
    for piece in (piece for pieces in [*map(reader.push, chunks), reader.finish()] for piece in pieces):
        match piece:
            case TextPiece(more):
                text += more
            case CallPiece(place, id_, name):
                assert place == len(calls) and id_
                calls.append([name, ""])
            case ArgumentsPiece(place, more):
                calls[place][1] += more
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def case(form: ToolFormat, number: int) -> dict[str, Any]:
    """Functions, a reply that calls them, and its text and calls."""
    chance = random.Random(f"{form.name} {number}")
    made = calls(chance, 3 if form.several else 1)[: None if form.several else 1]
    before = chance.choice(TEXTS) if form.anywhere else ""
    kinds = Kinds({name: schema for name, _, schema in made})
    wanted = [[name, arguments] for name, arguments, _ in made]
    reply = before + form.write([(name, arguments) for name, arguments, _ in made], kinds)
    return {
        "dialect": form.name,
        "functions": [{"name": name, "parameters": schema} for name, _, schema in made],
        "reply": reply,
        "pieces": cuts(chance, reply),
        "text": before.rstrip(),
        "calls": wanted,
    }


def read(form: ToolFormat, given: Mapping[str, Any]) -> dict[str, Any]:
    """Text and calls that the reader finds in a case's pieces."""
    schemas = {each["name"]: each["parameters"] for each in given["functions"]}
    reader = CallReader(form, list(schemas), Kinds(schemas))
    text, found = gathered(reader, [Chunk(piece, ()) for piece in given["pieces"]])
    return {"text": text, "calls": [[name, arguments] for name, arguments in found]}


def main() -> None:
    """Check many cases of every dialect, or write them as lines of JSON for another reader."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=1000, help="cases of each dialect")
    parser.add_argument("--write", action="store_true", help="write the cases instead of checking them here")
    options = parser.parse_args()
    wrong = 0
    for form in FORMATS.values():
        for number in range(options.count):
            given = case(form, number)
            if options.write:
                print(json.dumps(given, ensure_ascii=False))
            else:
                wrong += read(form, given) != {"text": given["text"], "calls": given["calls"]}
    if not options.write:
        print(f"{len(FORMATS)} forms, {options.count} replies each: {wrong} read wrongly")


if __name__ == "__main__":
    main()
